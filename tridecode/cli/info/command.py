"""`tridecode info`: what would run, without loading the weights."""

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ...blocks.spec import ModelSpec
from ...checkpoint.hub import BUNDLED, resolve_model
from ...checkpoint.load import load_config, told_tensors
from ...checkpoint.slices import host_layer_bytes, parameter_count
from ...errors import CheckpointError, DeviceError
from ...kernels.device import device_of
from ...plan.memory import plan_memory, prompt_bytes
from ...plan.placement import (
    GraphPlan,
    capture_support,
    plan_graphs,
    plan_kv,
    plan_weights,
    resolve_device,
    resolve_dtype,
    resolve_speculation,
    to_quantize,
)
from ...serve.policy import Policy
from ...state.kv import PAGE, kv_bytes_per_token
from ...step.dispatch import Dispatcher
from ...tuning.report import render
from ...version import __version__
from ..explain import LOADING, with_options
from ..loading import slots_of
from ..terminal import Output, counted, visible
from . import doctor
from .kernels import kernel_choices


def info(args, output: Output) -> int:
    device, backend = resolve_device(args.device, args.backend)
    path = resolve_model(args.model, weights=False)
    stored = load_config(path)
    spec = to_quantize(stored, args.quantize, args.quantize_head, args.kv_dtype)
    dtype = resolve_dtype(args.dtype, spec, device)
    gpus, versions = doctor.gpu_facts(), version_facts()
    support = capture_support(backend, spec, dtype, device)
    policy = Policy(
        args.chunk_tokens, prompt_ms=args.prompt_ms, prefix_sharing=args.prefix_sharing,
        batch_invariant=args.batch_invariant, speculate=args.speculate, speculate_ngram=args.speculate_ngram,
    )  # fmt: skip
    graphs = graphs_of(args, policy.chunk_tokens, support)
    host = args.kv_offload is not None, args.weights_offload is not None
    given = args.speculate_ngram is not None
    speculate, why_off = resolve_speculation(policy.speculate, graphs, spec.fp8_kv, *host, given)
    policy = replace(policy, speculate=speculate)
    memory = memory_facts(spec, dtype, device, backend, args, policy, graphs)
    chunk = policy.chunk(memory["slots"], memory["context"] or policy.chunk_tokens, PAGE)
    graphs = graphs_of(args, chunk, support)
    # What an id names comes when it is wanted; a directory has to have it.
    directory = path == BUNDLED or path == Path(args.model).expanduser()
    problem = weights_problem(path, stored) if directory else None
    report = {
        "model": model_facts(spec, args.model or BUNDLED.name, str(path)) | {"problem": problem},
        "memory": memory,
        "run": run_facts(device, backend, dtype, graphs, support[0], policy, why_off),
        "prompts": prompt_facts(spec, dtype, device, memory["slots"], chunk, graphs, support[0], policy),
        "gpus": gpus,
        "versions": versions,
        "warnings": doctor.warnings(gpus, versions["driver"], versions["cuda"]),
    }
    rows = []
    if args.kernels:
        gpu = device_of(device)
        if not gpu.capability:
            raise DeviceError("--kernels needs an NVIDIA GPU, since a CPU runs the references; none is used here")
        rows = kernel_choices(spec, dtype, gpu, policy.batch_invariant)
        report["kernels"] = [row._asdict() for row in rows]
    if args.json:
        print(json.dumps(report))
    else:
        output.text(visible(as_text(report)) + "\n" + (f"\n{render(rows)}" if rows else ""))
    return 0


def weights_problem(path: Path, spec: ModelSpec) -> str | None:
    """Why the weights in a directory cannot be loaded, as far as their files' headers tell."""
    try:
        told_tensors(path, spec)
    except CheckpointError as error:
        return str(error)
    return None


def model_facts(spec: ModelSpec, name: str, path: str) -> dict:
    attention = next(layer.mixer for layer in spec.layers if layer.pages())
    return {
        "name": name,
        "path": path,
        "family": spec.family,
        "parameters": parameter_count(spec),
        "layers": spec.num_layers,
        "linears": list(dict.fromkeys(linear.name for layer in spec.layers for linear in layer.linears())),
        "hidden_size": spec.hidden_size,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position": spec.max_position,
        "dtype": spec.dtype,
        "formats": formats(spec),
    }


def formats(spec: ModelSpec) -> list[str]:
    """Of the weights in fewer bits, in words; the first is the method."""
    which = spec.quantization
    return [which.name, *(scheme.describe() for scheme in which.schemes)] if which else []


def graphs_of(args, chunk: int, support: tuple[bool, bool]) -> GraphPlan:
    """How passes would run whose prompts come in chunks of that many tokens."""
    names = (
        "graph", "graph_sizes", "attention", "prompt_graph_max_tokens", "prompt_graph_sizes", "prompt_attention",
        "batch_invariant",
    )  # fmt: skip
    return plan_graphs(slots_of(args), chunk, *support, **{name: getattr(args, name) for name in names})


def memory_facts(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    args,
    policy: Policy,
    graphs: GraphPlan,
) -> dict:
    """Sizes in bytes, contexts in tokens. `context` of each of the `slots` requests, and `kv_tokens` that all of them
    share: what would be allocated; 0, with `problem`, where it cannot be. `offload`: pages of the host and of each of
    the ring's buffers, if asked for; `weights_on_host`: bytes of the last `host_layers` layers."""
    slots, per_token = slots_of(args), kv_bytes_per_token(spec, dtype)
    how, problem = (slots, policy.chunk_tokens, graphs.one_piece), None
    passes = dict(speculate=policy.speculates, batch_invariant=policy.batch_invariant)
    plan, on_host = plan_memory(spec, dtype, device, *how, **passes), 0
    asked = args.max_seq_len, slots, args.kv_tokens, policy.chunk_tokens, graphs.one_piece
    offload = args.kv_offload, args.kv_ring, policy.batch_invariant
    try:
        on_host = plan_weights(spec, dtype, args.weights_offload)
        kv = plan_kv(spec, dtype, device, backend, *asked, *offload, on_host, policy.speculates)
        plan, context, pool, offload = kv.memory, kv.capacity, kv.kv_tokens, kv.offload
    except DeviceError as error:
        context, pool, offload, problem = 0, 0, None, str(error)
    return {
        "weights": plan.weights,
        "host_layers": on_host,
        "weights_on_host": on_host * host_layer_bytes(spec, dtype),
        "kv_per_token": per_token,
        "workspace": plan.fixed + (slots - 1) * plan.per_slot,
        "free": plan.free,
        "largest_context": max(plan.max_context, context),
        "context": context,
        "slots": slots,
        "kv_tokens": pool,
        "kv_bytes": pool * per_token,
        "kv_dtype": "fp8" if spec.fp8_kv else str(dtype).removeprefix("torch."),
        "offload": offload and asdict(offload) | {"page": kv.page, "host_tokens": offload.host * kv.page},
        "problem": problem,
    }


def prompt_facts(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, slots: int, chunk: int, graphs: GraphPlan,
    captured: bool, policy: Policy,
) -> dict:  # fmt: skip
    """How prompts would be read: in chunks of at most `chunk_tokens`, by a graph of the next of `sizes` where `mode` is
    not none, and beside rows that decode, where there are `slots` for them, by one of as many more. `sharing`: whether
    what earlier ones had in common with it is reused. `buffers`: bytes, part of the workspace."""
    mode, _ = Dispatcher(graphs.graph, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention).plan_prompt(1)
    sizes = list(graphs.prompt_sizes) if mode != "none" else []
    return {
        "mode": mode,
        "attention": graphs.prompt_attention if captured else "torch",
        "chunk_tokens": chunk,
        "sizes": sizes,
        "largest": max(sizes, default=None),
        "graphs": len(sizes) * (1 if slots == 1 or policy.batch_invariant else 2),
        "sharing": policy.prefix_sharing,
        "buffers": prompt_bytes(spec, dtype, chunk + max(slots, *graphs.sizes), device),
    }


def run_facts(
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    graphs: GraphPlan,
    captured: bool,
    policy: Policy,
    why_off: str | None,
) -> dict:
    """`batch_invariant`: whether a request has the same bits in any company. `speculate`, `speculate_ngram`: ngram with
    what the options say, or off and null; `speculate_off`: why, where it was left to the engine. `pdl`: programmatic
    dependent launch, from compute capability 9.0 on."""
    return {
        "device": str(device),
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "graph": graphs.graph,
        "batch_invariant": policy.batch_invariant,
        "speculate": policy.speculate,
        "speculate_ngram": policy.speculate_ngram,
        "speculate_off": why_off,
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
    context = memory["problem"] or f"{counted(memory['context'], 'token')}"
    heads = f"{counted(model['heads'], 'head')}, {model['kv_heads']} for K/V, of {model['head_dim']}"
    where = "in the package" if model["path"] == str(BUNDLED) else model["path"]
    rows = [
        ("model", f"{model['name']}, family {model['family']}, {where}"),
        ("parameters", f"{model['parameters']:,}, {model['dtype']} in the checkpoint"),
        *([("formats", "; ".join(model["formats"]))] if model["formats"] else []),
        ("layers", f"{model['layers']} of width {model['hidden_size']:,}; {heads}; vocabulary {model['vocab_size']:,}"),
        ("would run", f"{run['device']}, backend {run['backend']}, {run['dtype']}, {graph_words(run)}"),
        ("kernels", kernel_words(run, model)),
        ("prompts", prompt_words(report["prompts"])),
        ("speculation", speculation_words(run)),
        ("weights", weight_words(memory)),
        ("K/V", f"{counted(memory['kv_per_token'], 'byte')} per token{pool_words(memory)}"),
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
    if report["model"]["problem"]:
        return f"does not run: {report['model']['problem']}"
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


def kernel_words(run: dict, model: dict) -> str:
    if run["backend"] == "torch":
        return "none of its own: PyTorch's"
    linears = ", ".join(model["linears"])
    return f"Triton: embed, {model['layers']} x (attention, {linears}), lm_head, sample"


def weight_words(memory: dict) -> str:
    if layers := memory["host_layers"]:
        last = f"the last {counted(layers, 'layer')}, {size(memory['weights_on_host'])}"
        return f"{size(memory['weights'])}; {last}, on the host"
    return size(memory["weights"])


def prompt_words(prompts: dict) -> str:
    sizes = prompts["sizes"]
    ways = {"full": "whole", "piecewise": "in pieces between attention launches"}
    read = "launched line by line"
    if sizes:
        span = f"{sizes[0]:,} to {sizes[-1]:,} tokens" if len(sizes) > 1 else counted(sizes[0], "token")
        passes = f"{counted(prompts['graphs'], 'pass')}"
        read = f"{passes} of {span} captured {ways[prompts['mode']]}"
    chunks = f"in chunks of up to {counted(prompts['chunk_tokens'], 'token')}"
    shared = "what several have in common is read once" if prompts["sharing"] else "each is read for itself alone"
    return f"{chunks}, {read}; {shared}; attention by {prompts['attention']}; buffers {size(prompts['buffers'])}"


def pool_words(memory: dict) -> str:
    if memory["problem"]:
        return ""
    slots = "1 slot has" if memory["slots"] == 1 else f"{memory['slots']} slots share"
    host = ""
    if offload := memory["offload"]:
        most = offload["ring"] * offload["page"]
        host = f"; {offload['host_tokens']:,} more on the host, of which {most:,} can run"
    held = f"{counted(memory['kv_tokens'], 'position')}, {memory['kv_dtype']}, {size(memory['kv_bytes'])}"
    return f"; {slots} {held}{host}"


def graph_words(run: dict) -> str:
    company = ", the same bits in any company" if run["batch_invariant"] else ""
    if run["graph"] == "none":
        return f"no graph{company}"
    graphs = "CUDA graphs between attention launches" if run["graph"] == "piecewise" else "one CUDA graph a pass"
    return f"{graphs} {'with' if run['pdl'] else 'without'} programmatic dependent launch{company}"


def speculation_words(run: dict) -> str:
    if run["speculate"] == "off":
        why = run["speculate_off"]
        return with_options(f"off: it {why}", LOADING) if why else "off"
    most, least = run["speculate_ngram"]
    return f"{run['speculate']}, by the last {most} to {least} tokens: several tokens a pass where the text repeats"


def size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return counted(count, "byte")
