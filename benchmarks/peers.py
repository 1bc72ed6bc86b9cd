"""Comparison with transformers on the same model shape, GPU and steps, in the same run.

    python -m benchmarks.peers --preset qwen3-4b

The script needs transformers.
"""

import sys
import time

import torch

from benchmarks.rows import PeersRow, options, run
from tridecode.blocks.attention import Attention
from tridecode.blocks.mlp import MLP
from tridecode.blocks.moe import MoE
from tridecode.blocks.spec import ModelSpec
from tridecode.cli.bench.decode import capacity_of, pass_figures
from tridecode.cli.bench.measure import preset_engine, read_bandwidth, run_facts, step_bytes, time_decode
from tridecode.cli.bench.prefill import prompt_ids
from tridecode.cli.bench.rows import Row
from tridecode.cli.bench.run import with_commands
from tridecode.cli.bench_options import add_script
from tridecode.errors import ParameterError
from tridecode.models.registry import FAMILIES
from tridecode.plan.memory import free_memory


def parse(argv: list[str] | None):
    """Return the options of a command line."""
    parser = options("peers", __doc__)
    add_script(parser, "stream", ("runs", "preset", "context", "steps", "capacity"), runs=5)
    parser.set_defaults(what="peers")
    return parser.parse_args(argv)


def measure(args, output) -> list[Row]:
    """Return three rows: this engine, transformers with its defaults, and with a static cache and torch.compile."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ParameterError("peers: transformers is not installed here; pip install transformers") from None
    engine = preset_engine(args.preset, capacity_of(args))
    device, spec = engine.device, engine.config
    bandwidth, nbytes = read_bandwidth(device), step_bytes(engine, args.context, args.steps)
    where = dict(preset=args.preset, context=args.context, steps=args.steps, runs=args.runs, **run_facts(device))
    where["transformers"] = transformers.__version__

    def row(variant: str, times: list[float]) -> Row:
        return PeersRow(variant=variant, **where, **pass_figures("us_per_token", times, nbytes, bandwidth))

    rows = [row("tridecode", time_decode(engine, args.context, args.steps, args.runs))]
    del engine
    free_memory(device)
    model = peer_model(spec, device, torch.bfloat16)
    for variant, cache in (("transformers, default", None), ("transformers, static cache and compile", "static")):
        output.note(f"{variant} ...")
        rows.append(row(variant, time_peer(model, spec, args.context, args.steps, args.runs, cache)))
    return with_commands("python -m benchmarks.peers", args, rows)


def peer_model(spec: ModelSpec, device, dtype: torch.dtype):
    """Return the model of transformers for a ModelSpec, with random weights created on `device`."""
    import transformers

    family = spec.family.replace("_", "")
    architecture = next(name for name in FAMILIES if name.lower().startswith(f"{family}for"))
    settings = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**peer_settings(spec))
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()


def peer_settings(spec: ModelSpec) -> dict:
    """Return the entries of config.json for a decoder with attention in all layers."""
    attention, feed_forwards = spec.layers[0].mixer, [layer.ffn for layer in spec.layers]
    assert isinstance(attention, Attention)
    experts = {}
    if mixture := next((each for each in feed_forwards if isinstance(each, MoE)), None):
        experts = {
            "num_experts": mixture.experts,
            "num_experts_per_tok": mixture.top_k,
            "moe_intermediate_size": mixture.intermediate,
            "norm_topk_prob": mixture.normalize,
            "mlp_only_layers": [number for number, each in enumerate(feed_forwards) if isinstance(each, MLP)],
        }
        if mixture.shared or mixture.apart:
            experts["shared_expert_intermediate_size"] = (mixture.apart or mixture).intermediate
    mlp = next((each for each in feed_forwards if isinstance(each, MLP)), mixture)
    assert mlp is not None
    settings = attention.rope
    rope = {"rope_type": settings.kind, "rope_theta": settings.theta}
    if settings.kind == "llama3":
        rope |= {
            "factor": settings.factor,
            "low_freq_factor": settings.low_freq_factor,
            "high_freq_factor": settings.high_freq_factor,
            "original_max_position_embeddings": settings.original_max_position,
        }
    return experts | {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": mlp.intermediate,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "sliding_window": attention.window or None,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": None,  # Answers must not end early.
        "pad_token_id": 0,
    }


def time_peer(model, spec: ModelSpec, context: int, steps: int, runs: int, cache: str | None) -> list[float]:
    """Return seconds per token of greedy answers, without the time of the prompt.

    Three untimed answers precede the timed ones, for compilation, recording and the first replay of graphs.

    Args:
        model: a model of transformers
        spec: its ModelSpec
        context: prompt tokens
        steps: tokens after the first one
        runs: number of timed answers
        cache: cache implementation of transformers. With "static", which its documentation recommends for speed,
            generate compiles the forward pass in mode reduce-overhead.
    """
    ids = torch.tensor([prompt_ids(spec, context)], device=model.device)

    def seconds(tokens: int) -> float:
        synchronize(model.device)
        started = time.perf_counter()
        ids_out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            cache_implementation=cache,
        )
        synchronize(model.device)
        if ids_out.shape[1] != context + tokens:
            raise RuntimeError(f"transformers sampled {ids_out.shape[1] - context} tokens; expected {tokens}")
        return time.perf_counter() - started

    for _ in range(3):
        seconds(steps + 1)  # The long answer comes first, so that the short one reuses its cache.
    return [(seconds(steps + 1) - seconds(1)) / steps for _ in range(runs)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run(args, lambda output: measure(args, output))


if __name__ == "__main__":
    sys.exit(main())
