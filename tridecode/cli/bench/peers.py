"""bench peers: transformers on the same shape, GPU and steps as ours, in the same run."""

import time

import torch

from ...errors import ParameterError
from ...models.config import FAMILIES, ModelConfig
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
    device, config = engine.device, engine.config
    bandwidth, nbytes = read_bandwidth(device), step_bytes(engine, args.context, args.steps)
    where = {"bench": "peers", "preset": args.preset, "context": args.context, "steps": args.steps, "runs": args.runs}
    facts = run_facts(device) | {"transformers": transformers.__version__}

    def row(variant: str, times: list[float]) -> dict:
        return where | {"variant": variant} | decode_figures(times, nbytes, bandwidth) | facts

    rows = [row("tridecode", time_decode(engine, args.context, args.steps, args.runs))]
    del engine
    free_memory(device)
    model = peer_model(config, device, torch.bfloat16)
    for variant, cache in (("transformers, default", None), ("transformers, static cache and compile", "static")):
        output.note(f"{variant} ...")
        rows.append(row(variant, time_peer(model, config, args.context, args.steps, args.runs, cache)))
    return rows


def peer_model(config: ModelConfig, device, dtype: torch.dtype):
    """transformers' model of a ModelConfig, with random weights made on `device`."""
    import transformers

    architecture = next(name for name, family in FAMILIES.items() if family.name == config.family)
    settings = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**peer_settings(config))
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype).eval()


def peer_settings(config: ModelConfig) -> dict:
    """The entries of config.json that say the same as `config`."""
    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": config.sliding_window,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": None,  # nothing ends an answer early
        "pad_token_id": 0,
    }


def time_peer(model, config: ModelConfig, context: int, steps: int, runs: int, cache: str | None) -> list[float]:
    """Seconds a token of `runs` greedy answers of `steps` tokens after the first one, the prompt's time taken off.

    cache "static" is what transformers documents for speed: generate then compiles the forward pass by itself, in mode
    reduce-overhead. Three answers come before those that count: compilation, recording and replay of its graphs.
    """
    ids = torch.tensor([prompt_ids(config, context)], device=model.device)

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
