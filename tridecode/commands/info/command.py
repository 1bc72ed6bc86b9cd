"""`tridecode info`: what would run, without loading the weights."""

import json
import platform

import torch

from ...cache.kv import kv_bytes_per_token
from ...engine import BUNDLED
from ...errors import DeviceError
from ...memory import plan_memory
from ...model.checkpoint import load_config, parameter_count
from ...model.config import ModelConfig
from ...model.hub import resolve_model
from ...placement import plan_capacity, resolve_device, resolve_dtype
from ...version import __version__
from ..loading import slots_of
from ..terminal import Output, counted, visible
from . import doctor


def info(args, output: Output) -> int:
    device, backend = resolve_device(args.device, args.backend)
    path = BUNDLED if args.model is None else resolve_model(args.model, weights=False)
    config = load_config(path)
    dtype = resolve_dtype(args.dtype, config, device)
    gpus, versions = doctor.gpu_facts(), version_facts()
    report = {
        "model": model_facts(config, args.model or "bundled", str(path)),
        "memory": memory_facts(config, dtype, device, args),
        "run": run_facts(args, device, backend, dtype),
        "gpus": gpus,
        "versions": versions,
        "warnings": doctor.warnings(gpus, versions["driver"], versions["cuda"]),
    }
    if args.json:
        print(json.dumps(report))
    else:
        output.text(visible(as_text(report)) + "\n")
    return 0


def model_facts(config: ModelConfig, name: str, path: str) -> dict:
    return {
        "name": name,
        "path": path,
        "family": config.family,
        "parameters": parameter_count(config),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        "dtype": config.dtype,
    }


def memory_facts(config: ModelConfig, dtype: torch.dtype, device: torch.device, args) -> dict:
    """Sizes in bytes, contexts in tokens. `context` of each of the `slots` requests, and `kv_tokens` that all of them
    share: what would be allocated; 0, with `problem`, where it cannot be."""
    slots, per_token = slots_of(args), kv_bytes_per_token(config, dtype)
    plan, problem = plan_memory(config, dtype, device, slots, args.chunk_tokens), None
    asked = args.max_seq_len, slots, args.kv_tokens, args.chunk_tokens
    try:
        _, context, _ = plan_capacity(config, dtype, device, *asked)
        pool = plan.kv_tokens(context, args.kv_tokens, str(device))
    except DeviceError as error:
        context, pool, problem = 0, 0, str(error)
    return {
        "weights": plan.weights,
        "kv_per_token": per_token,
        "workspace": plan.fixed + (slots - 1) * plan.per_slot,
        "free": plan.free,
        "largest_context": plan.max_context,
        "context": context,
        "slots": slots,
        "kv_tokens": pool,
        "kv_bytes": pool * per_token,
        "problem": problem,
    }


def run_facts(args, device: torch.device, backend: str, dtype: torch.dtype) -> dict:
    """`pdl`: programmatic dependent launch, from compute capability 9.0 on."""
    captured = backend == "triton" and device.type == "cuda"
    return {
        "device": str(device),
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "graph": args.graph if captured else "none",
        "pdl": captured and torch.cuda.get_device_capability(device) >= (9, 0),
    }


def version_facts() -> dict:
    """None where something is not installed."""
    return {
        "tridecode": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "driver": doctor.driver_version(),
    }


def triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def as_text(report: dict) -> str:
    model, memory, run = report["model"], report["memory"], report["run"]
    context = memory["problem"] or f"{memory['context']:,} tokens"
    heads = f"{model['heads']} heads, {model['kv_heads']} for K/V, of {model['head_dim']}"
    where = "in the package" if model["name"] == "bundled" else model["path"]
    rows = [
        ("model", f"{model['name']}, family {model['family']}, {where}"),
        ("parameters", f"{model['parameters']:,}, {model['dtype']} in the checkpoint"),
        ("layers", f"{model['layers']} of width {model['hidden_size']:,}; {heads}; vocabulary {model['vocab_size']:,}"),
        ("would run", f"{run['device']}, backend {run['backend']}, {run['dtype']}, {graph_words(run)}"),
        ("kernels", kernel_words(run, model["layers"])),
        ("weights", size(memory["weights"])),
        ("K/V", f"{memory['kv_per_token']:,} bytes per token{pool_words(memory)}"),
        ("workspace", size(memory["workspace"])),
        ("free memory", f"{size(memory['free'])} on {run['device']}"),
        ("context", f"{context}; the largest that fits: {memory['largest_context']:,} of {model['max_position']:,}"),
    ]
    for index, gpu in enumerate(report["gpus"]):
        free = f"{size(gpu['free'])} of {size(gpu['memory'])} free"
        rows.append((f"GPU {index}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {free}"))
    if not report["gpus"]:
        cuda = report["versions"]["cuda"]
        rows.append(("GPU", "none that torch can use" if cuda else "none: this PyTorch was built without CUDA"))
    rows.append(("versions", ", ".join(f"{name} {value or 'none'}" for name, value in report["versions"].items())))
    rows += [("warning", f"{warning['problem']}; {warning['fix']}") for warning in report["warnings"]]
    rows.append(("verdict", verdict(report)))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def verdict(report: dict) -> str:
    """Whether the model runs here and on what; the last line."""
    model, run, gpus = report["model"]["name"], report["run"], report["gpus"]
    if report["memory"]["problem"]:
        return f"{model} does not run here so; see context above"
    if run["device"] != "cpu":
        where = f"the GPU {run['device']}"
    elif gpus:
        where = "the CPU, though there is a GPU (--device cuda)"
    else:
        build = "; one needs PyTorch's CUDA build" if report["versions"]["cuda"] is None else ""
        where = f"the CPU; bench, profile and tune need a GPU{build}"
    warned = len(report["warnings"])
    return f"{model} runs here, on {where}" + (f"; see the {counted(warned, 'warning')} above" if warned else "")


def kernel_words(run: dict, layers: int) -> str:
    if run["backend"] == "torch":
        return "none of its own: PyTorch's"
    return f"Triton: embed, {layers} x (qkv, attention, o_proj, gate_up, down), lm_head, sample"


def pool_words(memory: dict) -> str:
    if memory["problem"]:
        return ""
    slots = "1 slot has" if memory["slots"] == 1 else f"{memory['slots']} slots share"
    return f"; {slots} {memory['kv_tokens']:,} positions, {size(memory['kv_bytes'])}"


def graph_words(run: dict) -> str:
    if run["graph"] == "none":
        return "no graph"
    graphs = "CUDA graphs between attention launches" if run["graph"] == "piecewise" else "one CUDA graph a pass"
    return f"{graphs} {'with' if run['pdl'] else 'without'} programmatic dependent launch"


def size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
