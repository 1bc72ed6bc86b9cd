"""bench prefill: time to first token of a prompt, with or without a cached prefix, against the measured matmul rate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from ...blocks.spec import ModelSpec
from ...blocks.weights import bytes_read
from ...engine import Engine
from ...errors import GenerationError
from ...results import Result
from ..terminal import counted
from .measure import GREEDY, bench_engine, make_row, make_runners, matmul_rate, read_bandwidth, running
from .rows import Row, column
from .timing import WARM_UP, spread, time_runs


@dataclass(kw_only=True)
class PrefillRow(Row):
    """The figures of one prompt length in one graph mode."""

    bench = "prefill"
    header = "prefill"
    prompt_tokens: int = column("prompt tokens", selects=True)
    cached: int = column("cached", default=0)
    graph: str = column("graph", selects=True)
    runs: int
    reads: str = column("read by")
    prefill_ms: float = column("ms", 2, kept=3, compared=True)
    prefill_ms_p5: float = column("p5", 2, kept=3)
    prefill_ms_p95: float = column("p95", 2, kept=3)
    ttft_ms: float = column("ms to first token", 2, kept=3, compared=True)
    flops: int = column("TFLOP", 2, 1e-12)
    matmul_tflops: float = column("matmul TFLOP/s", kept=1)
    pct_matmul: float = column("% of matmul rate", 1, kept=1)
    weight_bytes: int | None = column("GB of weights", 3, 1e-9, default=None)
    read_bandwidth_gbs: float | None = column("read GB/s", kept=1, default=None)
    pct_limit: float | None = column("% of limit", 1, kept=1, default=None)


def prefill(args, output) -> list[Row]:
    """Return a row for each length of --prompt-tokens in each mode of --graph. One engine runs all of them."""
    engine = bench_engine(args, args.capacity or args.cached + max(args.prompt_tokens) + 1)
    rate, bandwidth = matmul_rate(engine.device), read_bandwidth(engine.device)
    rows: list[Row] = []
    modes = make_runners(engine, args.graph)
    for tokens in args.prompt_tokens:
        flops = prefill_flops(engine.config, tokens, args.cached)
        weights = chunk_weights(engine, tokens)
        limit = sum(max(flops * rows / tokens / rate, size / bandwidth) for rows, size in weights)
        for mode, runners in modes.items():
            with running(engine, *runners) as prompt_modes:
                device, host = time_prefill(engine, tokens, args.runs, args.cached)
            figures = {"prompt_tokens": tokens, "graph": mode, "reads": prompt_modes()}
            figures |= spread("prefill_ms", device, 1e3) | {"ttft_ms": 1e3 * median(host), "flops": flops}
            figures |= {"matmul_tflops": rate / 1e12, "pct_matmul": 100 * flops / median(device) / rate}
            figures |= {"weight_bytes": int(sum(size for _, size in weights)), "read_bandwidth_gbs": bandwidth / 1e9}
            figures["pct_limit"] = 100 * limit / median(device)
            rows.append(make_row(PrefillRow, engine, args, **figures))
    return rows


def time_prefill(engine: Engine, tokens: int, runs: int, cached: int = 0) -> tuple[list[float], list[float]]:
    """Return the seconds of each run by CUDA events, and the seconds until the host receives the first token.

    Args:
        engine: the engine to time
        tokens: length of the new part of the prompt; its tokens differ in each run
        runs: number of timed runs
        cached: length of the prefix, which an untimed first turn stores in the cache
    """
    params = replace(GREEDY, max_tokens=1, ignore_eos=True)
    turn, new = prompt_ids(engine.config, cached), prompt_ids(engine.config, tokens)
    if cached:
        checked(engine.generate(turn, params, reuse_prefix=False), 0)
    prompts: Iterator[list[int]] = iter(
        [turn + [(token + run) % engine.config.vocab_size for token in new] for run in range(WARM_UP + runs)]
    )
    results: list[Result] = []

    def read() -> None:
        results.append(engine.generate(next(prompts), params, reuse_prefix=cached > 0))

    device = time_runs(read, runs, partial(torch.cuda.synchronize, engine.device))
    for result in results:
        checked(result, cached)
    return device, [result.timings.ttft for result in results[WARM_UP:]]


def checked(result: Result, cached: int) -> None:
    """Raise GenerationError if a prompt failed, or if the cached prefix has another length than `cached`."""
    if result.error:
        raise GenerationError(result.error)
    if result.usage.reused_tokens != cached:
        raise GenerationError(
            f"the cache provided {counted(result.usage.reused_tokens, 'token')}, expected {cached}; nothing is measured"
        )


def prompt_ids(spec: ModelSpec, tokens: int) -> list[int]:
    """Return token ids from the whole vocabulary, equal in every run."""
    return [(7919 * i + 1) % spec.vocab_size for i in range(tokens)]


def prefill_flops(spec: ModelSpec, tokens: int, cached: int = 0) -> int:
    """Return the floating-point operations of a prompt pass up to the first sampled token.

    A linear takes two operations per weight and token; blocks declare the operations of attention. If the last layer
    is cut, it computes K/V for all tokens and the rest for the last token only. Only the last token needs the LM head.

    Args:
        spec: the model
        tokens: number of new tokens
        cached: number of tokens before them that are in the cache
    """
    flops, end = 2 * spec.lm_head.n * spec.lm_head.k, cached + tokens
    for i, layer in enumerate(spec.layers, 1):
        cut = i == spec.num_layers and layer.mixer.cuts_prompt
        for block in layer.blocks:
            for linear in block.linears():
                whole = not cut or (block is layer.mixer and linear.epilogue != "residual")
                rows = linear.n * linear.active // linear.experts if linear.experts else linear.n
                flops += 2 * rows * linear.k * (tokens if whole else 1)
            flops += block.attention_flops(end - 1 if cut else cached, end)
    return flops


def chunk_weights(engine: Engine, tokens: int) -> list[tuple[int, float]]:
    """Return the rows of each pass that reads a prompt of `tokens` tokens, and the bytes of weights that it reads.

    Even a short prompt uses most of the experts.
    """
    chunk = engine.plan.chunk
    rows = [min(chunk, tokens - first) for first in range(0, tokens, chunk)]
    return [(count, bytes_read(engine.config, engine.model.weights, count)) for count in rows]
