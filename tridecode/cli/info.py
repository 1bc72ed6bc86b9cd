"""`tridecode info`: the plan of an engine, without loading the weights."""

import json
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from ..blocks.attention import Attention
from ..blocks.spec import ModelSpec
from ..blocks.weights import bytes_read
from ..checkpoint.gguf.schemes import SCHEMES
from ..checkpoint.hub import BUNDLED, resolve_model
from ..checkpoint.load import empty_weights, load_config, read_tensor_infos
from ..checkpoint.names import model_name, repository
from ..checkpoint.slices import host_layer_bytes, parameter_count
from ..checkpoint.tensor_info import FLOATS
from ..errors import CheckpointError, DeviceError
from ..kernels.device import Device, device_of
from ..models.gguf import read_gguf
from ..options import EngineOptions
from ..plan.device import find_device
from ..plan.memory import prompt_bytes
from ..plan.resolve import EnginePlan, resolve
from ..state.kv import kv_bytes_per_token
from ..step.dispatch import Dispatcher
from ..step.model import choose_configs, linear_cases
from ..tuning.report import KernelRow, kernel_rows, render
from ..tuning.tables import package_tables, table_path
from ..version import __version__
from . import doctor
from .expert_kernels import expert_rows
from .explain import LOADING, with_options
from .options import engine_options
from .terminal import Output, counted, visible
from .wrapping import WHOLE


def info(args, output: Output) -> int:
    """Run `tridecode info`: print the plan of an engine without loading weights. Return the exit code."""
    options = EngineOptions(**engine_options(args))
    device = find_device(options)
    path = resolve_model(args.model, weights=False)
    stored = load_config(path)
    plan = resolve(options, stored, device)
    gpus, versions = doctor.gpu_facts(), version_facts()
    # If the model is a Hugging Face id, its weights are downloaded when they are needed. A directory must contain them.
    problem = weights_problem(path, stored) if repository(args.model) is None else None
    report: dict[str, Any] = {
        "model": model_facts(plan.spec, model_name(args.model), str(path)) | {"problem": problem},
        "experts": expert_facts(plan.spec, plan.dtype, device.type == "cuda"),
        "gguf": gguf_facts(path, device.type == "cuda") if path.is_file() else None,
        "memory": memory_facts(plan),
        "run": run_facts(plan),
        "prompts": prompt_facts(plan),
        "notes": list(plan.notes),
        "gpus": gpus,
        "versions": versions,
        "warnings": doctor.warnings(gpus, versions["driver"], versions["cuda"]),
    }
    gpu = device_of(device)
    rows = kernel_choices(plan.spec, plan.dtype, gpu, options.batch_invariant) if gpu.capability else []
    own = rows and plan.backend == "triton"
    report["launch_configs"] = config_facts(rows, gpu, options.batch_invariant) if own else None
    if args.kernels:
        if not rows:
            raise DeviceError("--kernels needs an NVIDIA GPU, since a CPU runs the references; none is used here")
        if plan.spec.has_experts:
            rows = kernel_choices(plan.spec, plan.dtype, gpu, options.batch_invariant, experts=True)
        report["kernels"] = [row._asdict() for row in rows]
    if args.json:
        print(json.dumps(report))
    else:
        text = as_text(report, plan, output.console.width if output.tty else None) + "\n"
        if args.kernels:
            text += f"\n{render(rows)}"
        if report["gguf"]:
            text += f"\n{describe_tensors(report['gguf'])}"
        output.text(visible(text))
    return 0


def weights_problem(path: Path, spec: ModelSpec) -> str | None:
    """Read the headers of the weight files in the directory `path`. Return an error message, or None."""
    try:
        read_tensor_infos(path, spec)
    except CheckpointError as error:
        return str(error)
    return None


def model_facts(spec: ModelSpec, name: str, path: str) -> dict:
    """Return the sizes and formats of a model for the report."""
    attention = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention))
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


def expert_facts(spec: ModelSpec, dtype: torch.dtype, packs: bool) -> dict | None:
    """Return the sizes of the mixtures of experts, or None for a model without experts.

    A token uses `of_token` of `experts`. Both numbers include the `shared` ones, and so do the `active_parameters`.
    `bytes` is the size of all experts on the device, and `bytes_of_pass` the size of all weights that a pass of one row
    reads.
    """
    linears = [linear for linear in spec.linears() if linear.experts]
    if not linears:
        return None
    weights, first = empty_weights(spec, "meta", dtype, packs=packs), linears[0]
    idle = sum(linear.n * linear.k * (linear.experts - linear.active) // linear.experts for linear in linears)
    loaded = (
        each.linears[linear.name]
        for layer, each in zip(spec.layers, weights.layers)
        for linear in layer.linears()
        if linear.experts
    )
    return {
        "layers": sum(any(linear.experts for linear in layer.linears()) for layer in spec.layers),
        "experts": first.experts,
        "of_token": first.active,
        "shared": first.always,
        "active_parameters": parameter_count(spec) - idle,
        "bytes": sum(each.nbytes for each in loaded),
        "bytes_of_pass": int(bytes_read(spec, weights, 1)),
    }


def gguf_facts(path: Path, packs: bool) -> dict:
    """Return the tensors of a GGUF file by their role and type, for the report.

    `bits` is the number of bits of the file's tensors for each of their numbers. `device` is how a tensor is stored on
    the device.
    """
    gguf = read_gguf(path)
    tensors: dict[tuple[str, str, tuple[int, ...]], int] = Counter()
    for name, tensor in gguf.tensors.items():
        tensors[re.sub(r"^blk\.\d+\.", "", name), tensor.type.name, tensor.shape] += 1
    numbers = sum(prod(tensor.shape) for tensor in gguf.tensors.values())
    return {
        "bytes": sum(tensor.nbytes for tensor in gguf.tensors.values()),
        "bits": round(8 * sum(tensor.nbytes for tensor in gguf.tensors.values()) / numbers, 2),
        "tensors": [
            {
                "role": role,
                "type": type_name,
                "shape": list(shape),
                "count": count,
                "device": stored_as(role, type_name, packs),
            }
            for (role, type_name, shape), count in tensors.items()
        ],
        "template": "tokenizer.chat_template" in gguf.values,
        "tokenizer": [gguf.values.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")],
    }


def stored_as(role: str, type_name: str, packs: bool) -> str:
    """Return how a tensor is stored on the device."""
    if type_name in FLOATS:
        return "as it is"
    if packs and type_name in SCHEMES and role != "token_embd.weight":
        return f"packed, {SCHEMES[type_name].number_type}"
    return "expanded to the dtype of the weights"


def describe_tensors(facts: dict) -> str:
    """Return the table of the tensors of a GGUF file."""
    lines = [["tensor", "type", "shape", "count", "on the device"]]
    for each in facts["tensors"]:
        shape = " x ".join(map(str, each["shape"]))
        lines.append([each["role"], each["type"], shape, str(each["count"]), each["device"]])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines)


def formats(spec: ModelSpec) -> list[str]:
    """Return the name of the quantization of the weights, and its schemes in words."""
    which = spec.quantization
    return [which.name, *(scheme.describe() for scheme in which.schemes)] if which else []


def memory_facts(plan: EnginePlan) -> dict:
    """Return the memory plan, with sizes in bytes and contexts in tokens.

    `context` is the context of each of the `slots` requests. `kv_tokens` is the number of positions that they share.
    Both are 0, with `problem`, if the plan does not fit. `pools` contains the bytes of each pool, `offload` the pages
    on the host and in the ring's buffers, and `weights_on_host` the bytes of the last `host_layers` layers.
    """
    memory, spec, offload = plan.memory, plan.spec, plan.offload
    per_token = kv_bytes_per_token(spec, plan.dtype)
    return {
        "weights": memory.weights,
        "host_layers": plan.host_layers,
        "weights_on_host": plan.host_layers * host_layer_bytes(spec, plan.dtype),
        "kv_per_token": per_token,
        "workspace": memory.fixed - memory.snapshots + (plan.slots - 1) * memory.per_slot,
        "snapshots": plan.snapshots,
        "snapshot_bytes": plan.snapshot_bytes,
        "pools": plan.pools,
        "free": memory.free,
        "largest_context": max(memory.max_context, plan.capacity),
        "context": plan.capacity,
        "slots": plan.slots,
        "kv_tokens": plan.kv_tokens,
        "kv_bytes": plan.kv_tokens * per_token,
        "kv_dtype": "fp8" if spec.fp8_kv else str(plan.dtype).removeprefix("torch."),
        "offload": offload and asdict(offload) | {"page": plan.page, "host_tokens": offload.host * (plan.page or 0)},
        "problem": plan.problem,
    }


def prompt_facts(plan: EnginePlan) -> dict:
    """Return how the engine reads prompts, for the report.

    A pass reads at most `chunk_tokens` tokens of prompts. If `mode` is not none, the pass replays a captured graph: the
    graph with the smallest size in `sizes` that is large enough. With several slots, each size has a second graph, for
    passes in which other requests decode. `sharing` is whether equal prefixes of prompts share their K/V. `buffers` is
    the size of the workspace in bytes.
    """
    graphs = plan.graphs
    mode, _ = Dispatcher(graphs.graph, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention).plan_prompt(1)
    sizes = list(graphs.prompt_sizes) if mode != "none" else []
    return {
        "mode": mode,
        "attention": graphs.prompt_attention if graphs.captured else "torch",
        "chunk_tokens": plan.chunk,
        "sizes": sizes,
        "largest": max(sizes, default=None),
        "graphs": len(sizes) * (1 if plan.slots == 1 or plan.options.batch_invariant else 2),
        "sharing": plan.prefix_sharing,
        "buffers": prompt_bytes(plan.spec, plan.dtype, plan.chunk + plan.rows, plan.device),
    }


def run_facts(plan: EnginePlan) -> dict:
    """Return how the engine would run.

    `speculate` is ngram or off. If the engine disabled drafts, `speculate_off` is the reason. `pdl` is whether
    programmatic dependent launch is used.
    """
    return {
        "device": str(plan.device),
        "backend": plan.backend,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "graph": plan.graphs.graph,
        "batch_invariant": plan.options.batch_invariant,
        "speculate": "ngram" if plan.ngram else "off",
        "speculate_ngram": plan.ngram,
        "speculate_off": plan.why_no_drafts,
        "pdl": plan.dependent_launch,
    }


def version_facts() -> dict:
    """Return versions by name; None for a package that is not installed."""
    return {
        "tridecode": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        "driver": doctor.driver_version(),
    }


def triton_version() -> str | None:
    """Return the version of the installed Triton, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def as_text(report: dict, plan: EnginePlan, width: int | None = None) -> str:
    """Return the report as text with aligned lines, which are wrapped between words if `width` is not None."""
    model, memory, run, configs = report["model"], report["memory"], report["run"], report["launch_configs"]
    context = memory["problem"] or f"{counted(memory['context'], 'token')}"
    heads = f"{counted(model['heads'], 'head')}, {model['kv_heads']} for K/V, of {model['head_dim']}"
    where = "in the package" if model["path"] == str(BUNDLED) else model["path"]
    rows = [
        ("verdict", verdict(report)),
        ("model", f"{model['name']}, family {model['family']}, {where}"),
        ("parameters", f"{model['parameters']:,}, {model['dtype']} in the checkpoint"),
        *([("formats", "; ".join(model["formats"]))] if model["formats"] else []),
        *([("file", describe_file(report["gguf"]))] if report["gguf"] else []),
        ("layers", f"{model['layers']} of width {model['hidden_size']:,}; {heads}; vocabulary {model['vocab_size']:,}"),
        *([("experts", describe_experts(report["experts"], model["layers"]))] if report["experts"] else []),
        ("would run", f"{run['device']}, backend {run['backend']}, {run['dtype']}, {describe_graphs(run)}"),
        ("kernels", describe_kernels(run, model)),
        *([("configs", f"launch configs: {describe_configs(configs)}")] if configs else []),
        ("prompts", describe_prompts(report["prompts"])),
        ("speculation", describe_speculation(plan)),
        ("weights", describe_weights(memory)),
        ("K/V", f"{counted(memory['kv_per_token'], 'byte')} per token{describe_kv(memory)}"),
        *([("snapshots", describe_snapshots(memory))] if memory["snapshot_bytes"] else []),
        ("workspace", size(memory["workspace"])),
        ("free memory", f"{size(memory['free'])} on {run['device']}"),
        *([("plan", pool_sizes(memory, run["device"] == "cpu"))] if not memory["problem"] else []),
        ("context", f"{context}; the largest that fits: {memory['largest_context']:,} of {model['max_position']:,}"),
    ]
    for index, gpu in enumerate(report["gpus"]):
        free = f"{size(gpu['free'])} of {size(gpu['memory'])} free"
        rows.append((f"GPU {index}", f"{gpu['name']}, compute capability {gpu['compute_capability']}, {free}"))
    if not report["gpus"]:
        cuda = report["versions"]["cuda"]
        rows.append(("GPU", "none that torch can use" if cuda else "none: this PyTorch was built without CUDA"))
    rows.append(("versions", ", ".join(f"{name} {value or 'none'}" for name, value in report["versions"].items())))
    rows += [("note", with_options(note, LOADING)) for note in report["notes"]]
    rows += [("warning", f"{warning['problem']}; {warning['fix']}") for warning in report["warnings"]]
    column = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{column}}{value}" for name, value in rows]
    if width is not None:
        lines = [fill(line, max(width, 2 * column), subsequent_indent=" " * column, **WHOLE) for line in lines]
    return "\n".join(lines)


def describe_file(facts: dict) -> str:
    """Return the bits per weight, the tokenizer and the chat template of a GGUF file."""
    tokenizer = ", ".join(filter(None, facts["tokenizer"]))
    template = "a chat template" if facts["template"] else "no chat template"
    return f"GGUF, {facts['bits']} bits a weight, {size(facts['bytes'])}; tokenizer {tokenizer}; {template}"


def verdict(report: dict) -> str:
    """Return the first line: whether the model runs here, and on which device."""
    model, run, gpus = report["model"]["name"], report["run"], report["gpus"]
    if report["model"]["problem"]:
        return f"does not run: {report['model']['problem']}"
    if report["memory"]["problem"]:
        return f"{model} does not fit with these options; see context below"
    if run["device"] != "cpu":
        where = f"the GPU {run['device']}"
    elif gpus:
        where = "the CPU, though there is a GPU (--device cuda)"
    else:
        build = ", which needs PyTorch's CUDA build" if report["versions"]["cuda"] is None else ""
        where = f"the CPU; bench, profile and tune need a GPU{build}"
    warned = len(report["warnings"])
    return f"{model} runs here, on {where}" + (f"; see the {counted(warned, 'warning')} below" if warned else "")


def describe_kernels(run: dict, model: dict) -> str:
    """Return the launches of a decode pass, or the note that PyTorch runs it."""
    if run["backend"] == "torch":
        return "none of its own: PyTorch's"
    linears = ", ".join(model["linears"]).replace("experts_gate_up", "route, experts_gate_up")
    return f"Triton: embed, {model['layers']} x (attention, {linears}), lm_head, sample"


def describe_experts(facts: dict, layers: int) -> str:
    """Return the number of experts, and the parameters and bytes that a token uses."""
    where = "every layer" if facts["layers"] == layers else f"{facts['layers']} of {layers} layers"
    shared = " with a shared one" * facts["shared"]
    used = f"{facts['of_token']} of {facts['experts']}{shared} for a token"
    reads = f"{size(facts['bytes'])} of the weights; a pass of one row reads {size(facts['bytes_of_pass'])}"
    return f"{used}, in {where}; {facts['active_parameters']:,} parameters for a token; {reads}"


def describe_weights(memory: dict) -> str:
    """Return the size of the weights, and of those in host memory."""
    if layers := memory["host_layers"]:
        last = f"the last {counted(layers, 'layer')}, {size(memory['weights_on_host'])}"
        return f"{size(memory['weights'])}; {last}, on the host"
    return size(memory["weights"])


def describe_prompts(prompts: dict) -> str:
    """Return how prompts are read: chunks, captured passes, attention, and the size of the buffers."""
    sizes = prompts["sizes"]
    modes = {"full": "whole", "piecewise": "in pieces between attention launches"}
    read = "launched line by line"
    if sizes:
        span = f"{sizes[0]:,} to {sizes[-1]:,} tokens" if len(sizes) > 1 else counted(sizes[0], "token")
        passes = f"{counted(prompts['graphs'], 'pass')}"
        read = f"{passes} of {span} captured {modes[prompts['mode']]}"
    chunks = f"in chunks of up to {counted(prompts['chunk_tokens'], 'token')}"
    shared = "common prefixes are read once" if prompts["sharing"] else "common prefixes are not shared"
    return f"{chunks}, {read}; {shared}; attention by {prompts['attention']}; buffers {size(prompts['buffers'])}"


def describe_kv(memory: dict) -> str:
    """Return the positions of the K/V pool, on the device and in host memory; "" if they do not fit."""
    if memory["problem"]:
        return ""
    slots = "1 slot has" if memory["slots"] == 1 else f"{memory['slots']} slots share"
    host = ""
    if offload := memory["offload"]:
        runnable = offload["ring"] * offload["page"]
        host = f"; {offload['host_tokens']:,} more on the host, of which {runnable:,} can run"
    positions = f"{counted(memory['kv_tokens'], 'position')}, {memory['kv_dtype']}, {size(memory['kv_bytes'])}"
    return f"; {slots} {positions}{host}"


def pool_sizes(memory: dict, on_cpu: bool) -> str:
    """Return the bytes of each pool of device memory in words."""
    others = "temporary tensors" if on_cpu else "CUDA graphs and libraries"
    names, pools = {"kv": "K/V", "prompts": "buffers of prompts", "graphs": others}, memory["pools"]
    return f"{size(sum(pools.values()))}: " + ", ".join(f"{names.get(n, n)} {size(b)}" for n, b in pools.items())


def describe_snapshots(memory: dict) -> str:
    """Return a text with the number and the size of the snapshots of recurrent state."""
    count, each = memory["snapshots"], memory["snapshot_bytes"]
    if not count:
        return f"none, so prompts are not shared; one would take {size(each)}"
    return f"{size(count * each)}: {counted(count, 'snapshot')} of {size(each)}"


def describe_graphs(run: dict) -> str:
    """Return how decode passes are captured and launched."""
    suffix = ", batch invariant" if run["batch_invariant"] else ""
    if run["graph"] == "none":
        return f"no graph{suffix}"
    graphs = "CUDA graphs between attention launches" if run["graph"] == "piecewise" else "one CUDA graph per pass"
    return f"{graphs} {'with' if run['pdl'] else 'without'} programmatic dependent launch{suffix}"


def describe_speculation(plan: EnginePlan) -> str:
    """Return the lengths of the matches that propose drafts, or why there are no drafts."""
    if plan.ngram is None:
        return with_options(f"off: it {plan.why_no_drafts}", LOADING) if plan.why_no_drafts else "off"
    longest, shortest = plan.ngram
    return f"ngram, by the last {longest} to {shortest} tokens: several tokens a pass where the text repeats"


def size(count: int) -> str:
    """Return a number of bytes in the largest unit that fits."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return counted(count, "byte")


def kernel_choices(
    spec: ModelSpec, dtype: torch.dtype, gpu: Device, batch_invariant: bool = False, experts: bool = False
) -> list[KernelRow]:
    """Return the choices for a model on a GPU. No memory is allocated for the weights.

    experts: include the kernels of experts.
    """
    weights = empty_weights(spec, "meta", dtype, packs=True)
    configs = choose_configs(spec, weights, gpu, batch_invariant, user_table=True)
    rows = kernel_rows(linear_cases(spec, weights), configs)
    return rows + expert_rows(spec, weights, configs, gpu, batch_invariant) if experts else rows


def config_facts(rows: Sequence[KernelRow], gpu: Device, batch_invariant: bool = False) -> dict:
    """Return the sources of the launch configs of linears on a GPU.

    `choices`: the number of choices by source; a linear has one for each size of a pass. `tables`: names of the GPUs
    whose tables in the package serve this GPU. `user_table`: the path of the user's table if a choice is from it.
    `tune`: whether to suggest a search, because all choices are from rules.
    """
    counts = Counter(row.source for row in rows)
    return {
        "choices": {source: counts[source] for source in ("user table", "table", "rule")},
        "tables": [table.gpu for table in package_tables(gpu)],
        "user_table": str(table_path(gpu.name)) if counts["user table"] else None,
        # Batch-invariant mode does not read the user's tables.
        "tune": set(counts) == {"rule"} and not batch_invariant,
    }


def describe_configs(facts: dict) -> str:
    """Return the sources of the launch configs as text: tables, rules, or both with their counts."""
    tables, choices = " and ".join(facts["tables"]), {name: n for name, n in facts["choices"].items() if n}
    names = {"user table": f"your table {facts['user_table']}", "table": f"table of {tables}", "rule": "rules"}
    if set(choices) == {"rule"}:
        why = f"the table of {tables} has no entry for this model" if tables else "no table for this GPU"
        return f"rules ({why})" + "; `tridecode tune` searches better ones" * facts["tune"]
    if len(choices) == 1:
        return names[next(iter(choices))]
    shares = ", ".join(f"{names[source]} for {count}" for source, count in choices.items())
    return f"{shares} of {sum(choices.values())} choices"
