"""bench peers: transformers on the same shape, GPU and steps as ours, in the same run."""

import time

import torch

from ...blocks.attention import Attention
from ...blocks.mlp import MLP
from ...blocks.spec import ModelSpec
from ...errors import ParameterError
from ...models.registry import FAMILIES
from ...plan.memory import free_memory
from .decode import capacity_of, decode_figures
from .measure import preset_engine, read_bandwidth, run_facts, step_bytes, time_decode
from .prefill import prompt_ids


def peers(args, output) -> list[dict]:
    """Three rows: ours, transformers with a static cache and torch.compile, transformers as it is by default."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise ParameterError(
            "bench peers compares with transformers, which is not installed here; pip install transformers"
        ) from None
    engine = preset_engine(args.preset, capacity_of(args))
    device, spec = engine.device, engine.config
    bandwidth, nbytes = read_bandwidth(device), step_bytes(engine, args.context, args.steps)
    where = {"bench": "peers", "preset": args.preset, "context": args.context, "steps": args.steps, "runs": args.runs}
    facts = run_facts(device) | {"transformers": transformers.__version__}

    def row(variant: str, times: list[float]) -> dict:
        return where | {"variant": variant} | decode_figures(times, nbytes, bandwidth) | facts

    rows = [row("tridecode", time_decode(engine, args.context, args.steps, args.runs))]
    del engine
    free_memory(device)
    model = peer_model(spec, device, torch.bfloat16)
    for variant, cache in (("transformers, default", None), ("transformers, static cache and compile", "static")):
        output.note(f"{variant} ...")
        rows.append(row(variant, time_peer(model, spec, args.context, args.steps, args.runs, cache)))
    return rows


def peer_model(spec: ModelSpec, device, dtype: torch.dtype):
    """transformers' model of a ModelSpec, with random weights made on `device`."""
    import transformers

    architecture = next(name for name in FAMILIES if name.lower().startswith(spec.family + "for"))
    settings = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**peer_settings(spec))
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()


def peer_settings(spec: ModelSpec) -> dict:
    """Return the entries of config.json for a dense decoder."""
    attention, mlp = spec.layers[0].blocks
    assert isinstance(attention, Attention) and isinstance(mlp, MLP)
    settings = attention.rope
    rope = {"rope_type": settings.kind, "rope_theta": settings.theta}
    if settings.kind == "llama3":
        rope |= {
            "factor": settings.factor,
            "low_freq_factor": settings.low_freq_factor,
            "high_freq_factor": settings.high_freq_factor,
            "original_max_position_embeddings": settings.original_max_position,
        }
    return {
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
        "eos_token_id": None,  # nothing ends an answer early
        "pad_token_id": 0,
    }


def time_peer(model, spec: ModelSpec, context: int, steps: int, runs: int, cache: str | None) -> list[float]:
    """Seconds a token of `runs` greedy answers of `steps` tokens after the first one, the prompt's time taken off.

    cache "static" is what transformers documents for speed: generate then compiles the forward pass by itself, in mode
    reduce-overhead. Three answers come before those that count: compilation, recording and replay of its graphs.
    """
    ids = torch.tensor([prompt_ids(spec, context)], device=model.device)

    def seconds(tokens: int) -> float:
        synchronize(model.device)
        started = time.perf_counter()
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            cache_implementation=cache,
        )
        synchronize(model.device)
        if found.shape[1] != context + tokens:
            raise RuntimeError(f"transformers gave {found.shape[1] - context} tokens of {tokens}")
        return time.perf_counter() - started

    for _ in range(3):
        seconds(steps + 1)  # the long one first: its cache serves the short one too
    return [(seconds(steps + 1) - seconds(1)) / steps for _ in range(runs)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
