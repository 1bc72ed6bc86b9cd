"""bench prefill: a prompt to its first token, against the bf16 matmul rate of the run."""

from dataclasses import replace

import torch

from ...engine import Engine
from ...errors import GenerationError
from ...model.config import ModelConfig
from .measure import GREEDY, WARM_UP, bench_engine, matmul_rate, model_facts, run_facts, spread


def prefill(args, output) -> list[dict]:
    """A row for each number of --prompt-tokens, all on one engine."""
    engine = bench_engine(args, args.capacity or max(args.prompt_tokens) + 1)
    rate = matmul_rate(engine.device)
    rows = []
    for tokens in args.prompt_tokens:
        device, host = time_prefill(engine, tokens, args.runs)
        row = {"bench": "prefill"} | model_facts(engine, args) | {"prompt_tokens": tokens, "runs": args.runs}
        row |= prefill_figures(device, host, prefill_flops(engine.config, tokens), rate)
        rows.append(row | run_facts(engine.device))
    return rows


def time_prefill(engine: Engine, tokens: int, runs: int) -> tuple[list[float], list[float]]:
    """Seconds by CUDA events, and as the host sees the first token, of cold prompts of `tokens` tokens.

    All but the last token go through the prompt pass, the last through the token step, as in every answer.
    """
    params = replace(GREEDY, max_tokens=1, ignore_eos=True)
    device, host = [], []
    for run in range(runs + WARM_UP):
        ids = prompt_ids(engine.config, tokens)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(engine.device)
        start.record()
        result = engine.generate(ids, params, reuse_prefix=False)
        end.record()
        end.synchronize()
        if result.error:
            raise GenerationError(result.error)
        if run >= WARM_UP:
            device.append(start.elapsed_time(end) / 1e3)
            host.append(result.timings.ttft)
    return device, host


def prompt_ids(config: ModelConfig, tokens: int) -> list[int]:
    """Ids all over the vocabulary, the same at every run."""
    return [(7919 * i + 1) % config.vocab_size for i in range(tokens)]


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Floating-point operations of `tokens` tokens up to the first new one, as they are computed here.

    Two a weight and token, four a query element and position attended to. Of the last layer only the last token needs
    more than q, k and v, and only that token needs the LM head.
    """
    c, before = config, tokens - 1
    qkv = c.hidden_size * (c.q_size + 2 * c.kv_size)
    rest = c.hidden_size * (c.q_size + 3 * c.intermediate_size)
    matmul = 2 * tokens * (c.num_layers * qkv + (c.num_layers - 1) * rest) + 2 * (rest + c.hidden_size * c.vocab_size)
    attention = 0
    for layer in range(c.num_layers):
        window = c.window(layer) or tokens
        full = min(before, window)  # the first tokens attend to all before them, the others to a window
        positions = full * (full + 1) // 2 + (before - full) * window if layer + 1 < c.num_layers else 0
        attention += 4 * c.q_size * (positions + min(tokens, window))
    return matmul + attention


def prefill_figures(device: list[float], host: list[float], flops: int, rate: float) -> dict:
    """From seconds, FLOP of one prompt and FLOP a second of the matmul."""
    median, p5, p95 = spread(device)
    return {
        "prefill_ms": round(1e3 * median, 3),
        "prefill_ms_p5": round(1e3 * p5, 3),
        "prefill_ms_p95": round(1e3 * p95, 3),
        "ttft_ms": round(1e3 * spread(host)[0], 3),
        "flops": flops,
        "matmul_tflops": round(rate / 1e12, 1),
        "pct_matmul": round(100 * flops / median / rate, 1),
    }
