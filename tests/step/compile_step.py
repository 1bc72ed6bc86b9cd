"""Compile every launch of a token step and of a prompt pass for GPUs that are not here; a script, not interpreted.

    python compile_step.py PRESET[,PRESET...] ARCH[,ARCH...]

The launchers themselves run, on meta tensors of the real sizes, with a recorder in place of each kernel. So what is
compiled is what is launched. Prints a line a kernel and architecture: model, name, arch, registers, stack bytes, local
bytes, shared bytes.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tridecode import kernels
from tridecode.blocks.spec import ModelSpec
from tridecode.checkpoint.load import empty_weights
from tridecode.checkpoint.quantization.quantize import rules
from tridecode.kernels.attention.gather_kv import gather_kv
from tridecode.kernels.device import Device
from tridecode.kernels.linear.dequantize import dequantize
from tridecode.kernels.linear.matmul_ring import _matmul_ring_kernel
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.registry import kernel_named
from tridecode.kernels.take_residual import take_residual
from tridecode.models.presets import PRESETS
from tridecode.state.kv import PAGE, make_kv_cache
from tridecode.state.offload import Offload
from tridecode.step import decode
from tridecode.step.graphs import launcher
from tridecode.step.model import DecodeModel, choose_configs, rope_keys
from tridecode.step.prompt import finish, read
from tridecode.step.workspace import make_prompt_buffers, make_workspace
from tridecode.tuning.attention import prompt_attention_config
from tridecode.tuning.configs import Choice, PassConfigs

MODULES = [import_module(found.name) for found in walk_packages(kernels.__path__, f"{kernels.__name__}.")]
ROWS = (1, 8, 16, 64)  # of passes
FP16 = ("qwen2.5-0.5b", "qwen3-4b_fp16")  # the others are bf16


def odd_heads(**heads) -> ModelSpec:
    """Two layers of Qwen3-0.6B with other heads."""
    layer = PRESETS["qwen3-0.6b"].layers[0]
    layer = replace(layer, mixer=replace(layer.mixer, **heads))
    return replace(PRESETS["qwen3-0.6b"], layers=(layer,) * 2)


MODELS = dict(PRESETS) | {"qwen3-4b_fp16": PRESETS["qwen3-4b"]} | {
    f"head_dim_{d}": odd_heads(head_dim=d, heads=heads, kv_heads=kv)
    for d, heads, kv in ((80, 5, 1), (96, 24, 8), (256, 8, 1))
} | {"group_16": odd_heads(heads=32, kv_heads=2)}  # fmt: skip
QUANTIZED = {f"{name}_{scheme}": replace(PRESETS[name], load_quantization=rules(scheme, "fp8"))
             for name in ("qwen3-4b", "qwen3-0.6b", "llama-3.1-8b", "llama-3.2-3b")
             for scheme in ("fp8", "int8", "int4")}  # fmt: skip
MODELS |= QUANTIZED | {f"{name}_kv8": replace(MODELS[name], fp8_kv=True)
                       for name in ("qwen3-4b", "qwen3-0.6b", "head_dim_80", "head_dim_256", "group_16")}  # fmt: skip
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.int16: "*i16", torch.uint8: "*u8",
}  # fmt: skip


class Recorder:
    """Stands in for a kernel: remembers what it was launched with."""

    def __init__(self, kernel, launches: dict):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, launch_pdl=False, **named):
            signature, constants, attributes = {}, {}, {}
            args = (*args, *(named.pop(param.name) for param in self.kernel.params[len(args) :]))
            for i, (param, value) in enumerate(zip(self.kernel.params, args, strict=True)):
                if param.is_constexpr or value is None or (type(value) is int and value == 1):
                    signature[param.name], constants[param.name] = "constexpr", value
                    continue
                if isinstance(value, TensorDescriptor | GluonDescriptor):
                    block = ", ".join(map(str, value.block_shape))
                    layout = f",{value.layout!r}" if isinstance(value, GluonDescriptor) else ""
                    signature[param.name] = f"tensordesc<{TYPES[value.base.dtype].lstrip('*')}[{block}]{layout}>"
                    continue
                if isinstance(value, torch.Tensor):
                    signature[param.name] = TYPES[value.dtype]
                    aligned = True
                else:
                    signature[param.name] = "i32" if isinstance(value, int) else "fp32"
                    aligned = isinstance(value, int) and value % 16 == 0
                if aligned:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            key = (self.kernel.__name__, str(signature), str(constants), str(named))
            self.launches[key] = (self.kernel, signature, constants, attributes, named, launch_pdl)

        return launch


def meta_model(preset: str, dtype: torch.dtype, arch: int, capacity: int = 4096) -> DecodeModel:
    """The model's tensors by shape only: no memory, no GPU."""
    config, device, gpu = MODELS[preset], torch.device("meta"), gpu_of(arch)
    weights = empty_weights(config, device, dtype, packs=True)
    prompt_config = prompt_attention_config(gpu, batch_invariant=False, fp8=config.fp8_kv)
    workspace = make_workspace(config, capacity, device, dtype, slots=64)
    kv = make_kv_cache(config, capacity, device, dtype, page=PAGE)
    expanded = len(kv.pool) if kv.fp8 and prompt_config.hopper else 0
    return DecodeModel(
        spec=config,
        weights=weights,
        kv=kv,
        ropes={key: (torch.empty(capacity, key[1] // 2, device=device),) * 2 for key in rope_keys(config)},
        workspace=workspace,
        verify=workspace,
        prompt=make_prompt_buffers(config, 2048, device, dtype, prompt_config, expanded, PAGE),
        prompt_config=prompt_config,
        configs_by_rows=choose_configs(config, weights, gpu),
        gpu=gpu,
    )


def recorded(run) -> dict:
    """Every distinct launch of what `run` does."""
    launches: dict = {}
    originals = []
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                originals.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
    try:
        run()
    finally:
        for module, name, value in originals:
            setattr(module, name, value)
    return launches


def run_all(preset: str, dtype: torch.dtype, arch: int) -> None:
    """All kinds of step, and a prompt pass."""
    model = meta_model(preset, dtype, arch)
    for rows in (*ROWS, 32) if arch == 90 else ROWS:  # which has products of its own there
        for kind in decode.KINDS:
            decode.decode_pass(launcher(model), model.of_rows(rows), kind)
            decode.decode_pass(launcher(model), model.of_rows(rows), kind, masked=True)
    if not model.spec.fp8_kv:  # which are not verified
        for requests, queries in ((1, 1), (1, 8), (2, 2), (4, 4)):
            for kind in decode.KINDS:
                decode.decode_pass(launcher(model), model.of_queries(requests, queries), kind)
        alone = replace(model.of_queries(4, 4), fixed_chunk=256)  # as in the batch-invariant mode
        decode.decode_pass(launcher(model), alone, "greedy")
    if preset in QUANTIZED and arch == 90:
        for name in QUANTIZED:  # every number type of the ring
            one = meta_model(name, dtype, arch).of_rows(1)
            decode.decode_pass(partial(launch_rings, launcher(one)), one, "greedy")
    if preset in QUANTIZED:
        dequantize(model.weights.layers[0].linears["qkv"], 0, 1024, model.prompt.dequantized)
    else:
        few = replace(model.of_rows(16), configs_by_rows={16: wide(model.of_rows(16), arch)})
        decode.decode_pass(launcher(model), few, "greedy")
    if arch == 90:  # the batch-invariant mode, which other GPUs do not have
        alike = choose_configs(model.spec, model.weights, gpu_of(arch), batch_invariant=True)
        alike = replace(model, configs_by_rows=alike)
        for rows in ROWS:
            decode.decode_pass(launcher(model), alike.of_rows(rows), "greedy")
    run = launch_ours if arch == 90 and model.spec.pages.head_dim <= 128 else launch_but_attention
    read(run, model, 68)
    read(run, model, 512)  # where no launch of its own adds up splits
    read(run, model, 2048)
    read(run, model, 132, decoding=64)
    table = model.kv.page_table[0]
    gather_kv(table, model.kv.k[0], model.kv.v[0], 70, *model.prompt.x.new_empty(2, *model.kv.k[0][0].shape))
    finish(launcher(model), model.of_rows(1), "greedy")
    ws, prompt = model.of_rows(1).workspace, model.prompt  # behind a last layer that is not cut
    take_residual(ws.meta, prompt.hidden, prompt.delta, model.weights.final_norm, ws.hidden, ws.normed, ws.sumsq)
    if preset in QUANTIZED or model.spec.fp8_kv:
        return  # nothing of these lies on the host
    kv = make_kv_cache(model.spec, 4096, model.device, dtype, page=PAGE, offload=Offload(host=8, ring=8))
    weights = empty_weights(model.spec, model.device, dtype, on_host=min(3, model.spec.num_layers))
    offloaded = replace(model, kv=kv, weights=weights)
    decode.decode_pass(launch_ours, offloaded.of_rows(1), "greedy")
    read(run, offloaded, 132, decoding=64)


def gpu_of(arch: int) -> Device:
    """A GPU of that compute capability, with the sizes of an H200."""
    return Device("a GPU", arch, 132, 232448, 233472, 65536)


def wide(model: DecodeModel, arch: int) -> PassConfigs:
    """Configs that only some GPUs have in their tables: of four warps where these multiply together, else of one."""
    one = WideConfig(64, 64, 2) if arch in (90, 100) else WideConfig(16, 32, 2, num_warps=1)
    two = replace(one, split=2)
    kernel = kernel_named("wide")
    by_role = {"gate_up": one, "lm_head": one}
    linears = {case: Choice(kernel, by_role.get(role, two)) for role, case in model.cases.items()}
    return replace(model.configs, linears=linears)


def launch_ours(role: str, op, *args, **how) -> None:
    """Launch what has a kernel here; torch's own products and attention are compiled already."""
    if op.kernels:
        op.launch(*args, **how)


def launch_rings(run, role: str, op, *args, **how) -> None:
    """Launch what `matmul_ring` multiplies."""
    if _matmul_ring_kernel in op.kernels:
        run(role, op, *args, **how)


def launch_but_attention(role: str, op, *args, **how) -> None:
    """Where attention of prompts is torch's."""
    if role != "attention":
        launch_ours(role, op, *args, **how)


def resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, stack bytes, local bytes) from Triton's own cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text.stdout)
    return tuple(int(group) for group in found.groups())


LAUNCHES = []  # filled before the pool forks: (preset, arch, launch)


def compile_one(index: int) -> str:
    preset, arch, (kernel, signature, constants, attributes, options, pdl) = LAUNCHES[index]
    options = options | ({"launch_pdl": True} if pdl else {})
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    found = (*resources(compiled.asm["cubin"]), compiled.metadata.shared)
    return " ".join(map(str, (preset, kernel.__name__, arch, *found)))


def main() -> None:
    presets, archs = (arg.split(",") for arg in sys.argv[1:3])
    for arch in map(int, archs):
        distinct = {}
        for preset in presets:
            dtype = torch.float16 if preset in FP16 else torch.bfloat16
            for key, launch in recorded(partial(run_all, preset, dtype, arch)).items():
                distinct.setdefault(key, (preset, arch, launch))
        LAUNCHES.extend(distinct.values())
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for line in pool.imap(compile_one, range(len(LAUNCHES))):
            print(line, flush=True)


if __name__ == "__main__":
    main()
