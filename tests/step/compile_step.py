"""Compile every launch of decode and prompt passes for absent GPUs, and check the limits of each GPU.

A script, not interpreted:

    python compile_step.py MODELS GPUS [--common] [--rules]

MODELS are names separated by commas: a preset or a model of OTHERS, with suffixes: _fp16, _fp8, _int8 or _int4
(quantized weights), _kv8 (K and V in fp8). "dense" means every preset up to 8B in bf16, fp8 and int4. GPUS are names of
gpus.py.

The launchers run on meta tensors of the real sizes, with a recorder instead of each kernel. So an engine launches the
same kernels. The script prints a line for each kernel and GPU: model, kernel, GPU, registers, stack bytes, local bytes,
shared bytes. The exit status is 1 if a kernel does not compile or exceeds a limit.
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from pkgutil import walk_packages
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.cache import triton_key
from triton.tools.tensor_descriptor import TensorDescriptor

from tridecode import kernels
from tridecode.blocks.attention import Attention
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.shared_expert import SharedExpert
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.checkpoint.gguf.schemes import with_file_type
from tridecode.checkpoint.load import empty_weights
from tridecode.checkpoint.quantization.quantize import rules
from tridecode.kernels.attention.gather_kv import gather_kv
from tridecode.kernels.device import Device
from tridecode.kernels.linear.dequantize import dequantize
from tridecode.kernels.linear.matmul_groups import _matmul_groups_kernel
from tridecode.kernels.linear.matmul_ring import _matmul_ring_kernel
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.registry import kernel_named
from tridecode.kernels.moe.expert_groups import _down_groups_kernel, _gate_up_groups_kernel
from tridecode.kernels.moe.expert_rows import _down_rows_kernel
from tridecode.kernels.take_residual import take_residual
from tridecode.models.presets import PRESETS
from tridecode.state.adapters import make_adapters
from tridecode.state.kv import PAGE, make_kv_cache
from tridecode.state.offload import Offload
from tridecode.state.records import make_records
from tridecode.step import decode
from tridecode.step.graphs import launcher
from tridecode.step.model import DecodeModel, choose_configs, rope_keys
from tridecode.step.prompt import finish, read
from tridecode.step.workspace import make_prompt_buffers, make_workspace
from tridecode.tuning import resolve
from tridecode.tuning.attention import prompt_attention_config, prompt_tiles_fit
from tridecode.tuning.configs import HOPPER, Choice, PassConfigs

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpus import GPUS

MODULES = [import_module(module.name) for module in walk_packages(kernels.__path__, f"{kernels.__name__}.")]
ROWS = (1, 8, 16, 64)  # Numbers of rows of the decode passes.
LARGE_PRESETS = "qwen3-14b", "qwen3.5-9b", "qwen3.5-27b", *(name for name in PRESETS if name.endswith("a3b"))
DENSE = [f"{preset}{suffix}" for preset in PRESETS if preset not in LARGE_PRESETS for suffix in ("", "_fp8", "_int4")]
RINGS = [f"{preset}_{scheme}" for preset in ("qwen3-4b", "qwen3-0.6b", "llama-3.1-8b", "llama-3.2-3b")
         for scheme in ("fp8", "int8", "int4")]  # fmt: skip
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.int16: "*i16", torch.uint8: "*u8", torch.int8: "*i8",
}  # fmt: skip

# Limits.
# Unit: bytes. With more, Triton sets the largest shared memory carve-out, and other kernels of a pass lose their L1
# cache.
SHARED = 48 * 1024
LARGE = {  # Kernels that may exceed SHARED, because the kernels that run at the same time exceed it too.
    "_matmul_tiles_kernel", "_attention_rows_kernel", "_matmul_hopper_kernel", "_matmul_ring_kernel",
    "_prompt_attention_kernel", "_prompt_splits_kernel", "_prompt_attention_hopper_kernel", "_expand_kv_kernel",
    "_delta_scan_kernel", "_route_kernel", "_expert_tiles_kernel", "_expert_ring_kernel", "_prompt_packed_kernel",
}  # fmt: skip
# Stack bytes of a thread. Loops over tiles must not use the stack. Triton 3.9 stores part of an item's first tile, and
# up to four numbers that are used at the end of an item. With groups of 3 and 7 heads, Triton 3.6 stores up to eight
# 16-bit numbers in the loop over splits. GPUs without wgmma store up to 14 numbers of a block in _delta_chunks_kernel.
# Triton 3.6 stores two numbers of _matmul_tiles_kernel on GPUs of compute capability 12.0, with 62 to 100 registers. In
# a pass with drafts delta_decode stores up to 14 numbers. With adapters, _matvec_kernel stores up to 24 numbers where a
# table limits its registers, and _matmul_wide_kernel up to four. Tiles of experts store up to 130 numbers on GPUs
# without wgmma, and up to 14 with packed weights. Triton 3.9 stores four numbers of _expert_packed_kernel.
STACK = {
    "_attention_kernel": 16, "_attention_rows_kernel": 104, "_matmul_ring_kernel": 16, "_prompt_attention_kernel": 24,
    "_delta_chunks_kernel": 56, "_delta_decode_kernel": 56, "_matmul_tiles_kernel": 8,
    "_matvec_kernel": 96, "_matmul_wide_kernel": 16, "_expert_tiles_kernel": 520, "_prompt_packed_kernel": 56,
    "_expert_packed_kernel": 16,
}  # fmt: skip
# Spilled bytes of a matmul whose register limit lets two programs share a multiprocessor: up to 24 on Hopper for
# rows of 8,192 columns or more, and 8 on compute capability 12.0.
BOUNDED_STACK = 24
# The same for heads of more than 128. In _prompt_attention_kernel Triton 3.9 stores 70 numbers, and Triton 3.6 up to
# 12, with fp8 K/V only. In _prompt_attention_hopper_kernel Triton 3.9 stores 6.
WIDE_STACK = {"_prompt_attention_kernel": 280, "_prompt_attention_hopper_kernel": 24}
# Maximum threads of a program, and maximum tensor memory columns of a multiprocessor.
THREADS, TENSOR_MEMORY = 1024, 512


class Resources(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        registers: registers of a thread.
        stack, local: bytes of a thread.
        shared: bytes of a program.
        tensor_memory: columns of a program.
        threads: threads of a program.
    """

    registers: int
    stack: int
    local: int
    shared: int
    tensor_memory: int
    threads: int

    def excess(self, kernel: str, gpu: Device, head_dim: int = 0) -> list[str]:
        """Return the limits of the GPU that the kernel exceeds."""
        stack = (STACK | WIDE_STACK if head_dim > 128 else STACK).get(kernel, 0)
        bounded = kernel == "_matmul_kernel" and 2 * self.registers * self.threads == gpu.registers
        needed = {
            # A GPU allocates registers in units of 8.
            "registers": (-(-self.registers // 8) * 8 * self.threads, gpu.registers),
            "stack": (self.stack, BOUNDED_STACK if bounded else stack),
            "local memory": (self.local, 0),
            "shared memory": (self.shared, gpu.shared_memory if kernel in LARGE else SHARED),
            "tensor memory": (self.tensor_memory, TENSOR_MEMORY),
            "threads": (self.threads, THREADS),
        }
        return [f"{name} {value:,} > {limit:,}" for name, (value, limit) in needed.items() if value > limit]


class Launch(NamedTuple):
    """Arguments of Triton's compiler for a launch."""

    kernel: triton.JITFunction
    signature: dict
    constants: dict
    attributes: dict
    options: dict
    pdl: bool

    def compile(self, capability: int):
        """Compile for a compute capability. Raises any error of Triton's compiler."""
        options = self.options | ({"launch_pdl": True} if self.pdl else {})
        source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = source(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Recorder:
    """A replacement for a kernel that records the arguments of its launches."""

    def __init__(self, kernel, launches: dict):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, launch_pdl=False, **named):
            signature, constants, attributes = {}, {}, {}
            args = (*args, *(named.pop(param.name) for param in self.kernel.params[len(args) :]))
            for i, (param, value) in enumerate(zip(self.kernel.params, args, strict=True)):
                specialized = not param.do_not_specialize
                if param.is_constexpr or value is None or (type(value) is int and value == 1 and specialized):
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
                if aligned and specialized:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            key = (self.kernel.__name__, str(signature), str(constants), str(named))
            self.launches[key] = Launch(self.kernel, signature, constants, attributes, named, launch_pdl)

        return launch


def odd_heads(**heads) -> ModelSpec:
    """Return two layers of Qwen3-0.6B with other heads."""
    layer = PRESETS["qwen3-0.6b"].layers[0]
    layer = replace(layer, mixer=replace(layer.mixer, **heads))
    return replace(PRESETS["qwen3-0.6b"], layers=(layer,) * 2)


def hybrid(hidden: int, intermediate: int, heads: int, kv_heads: int, value_heads: int) -> ModelSpec:
    """Return three layers of a Qwen3.5 model: a gated delta net between two layers with full attention."""
    common = dict(hidden=hidden, norm_offset=1.0)
    delta = GatedDelta(**common, key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128)
    attention = Attention(
        **common, heads=heads, kv_heads=kv_heads, head_dim=256, qk_norm=True, gate=True,
        rope=RopeConfig(1e7, partial=0.25),
    )  # fmt: skip
    mlp = MLP(**common, intermediate=intermediate)
    layers = Layer(attention, mlp), Layer(delta, mlp), Layer(attention, mlp)
    return ModelSpec("qwen3_5", hidden, 248320, 262144, layers, tie_word_embeddings=True, norm_offset=1.0)


def mixture(intermediate: int = 768, **settings) -> ModelSpec:
    """Return two layers of Qwen3-0.6B with mixtures of experts as in Qwen3-30B-A3B."""
    spec = PRESETS["qwen3-0.6b"]
    experts = MoE(hidden=spec.hidden_size, experts=128, top_k=8, intermediate=intermediate, **settings)
    return replace(spec, layers=(replace(spec.layers[0], ffn=experts),) * 2)


OTHERS = {
    f"head_dim_{d}": odd_heads(head_dim=d, heads=heads, kv_heads=kv)
    for d, heads, kv in ((80, 5, 1), (96, 24, 8), (256, 8, 1))
} | {"group_16": odd_heads(heads=32, kv_heads=2)} | {
    "qwen3.5-0.8b": hybrid(1024, 3584, 8, 2, 16), "qwen3.5-4b": hybrid(2560, 9216, 16, 4, 32),
    "qwen3.5-27b": hybrid(5120, 17408, 24, 4, 48),
    "moe": mixture(apart=SharedExpert(hidden=1024, intermediate=1024)), "moe_shared": mixture(shared=True),
    "moe_wide": mixture(intermediate=2560),
}  # fmt: skip


# Models that contain each number type that the kernels of small groups read, apart from int8.
GROUPS = {
    "qwen3-0.6b_q4_k_m": (_matmul_groups_kernel,),
    "qwen3-30b-a3b_q4_k_m": (_gate_up_groups_kernel, _down_groups_kernel),
}


def model_named(name: str) -> tuple[ModelSpec, torch.dtype]:
    """Return the model of a name with suffixes, and the dtype of its activations."""
    name, fp8_kv = re.subn("_kv8$", "", name)
    name, fp16 = re.subn("_fp16$", "", name)
    name, _, scheme = re.fullmatch(r"(.+?)(_(fp8|int8|int4|q4_k_m))?", name).groups()
    spec = replace(OTHERS[name] if name in OTHERS else PRESETS[name], fp8_kv=fp8_kv > 0)
    if scheme == "q4_k_m":
        spec = with_file_type(spec, scheme)
    elif scheme:
        spec = replace(spec, load_quantization=rules(scheme, "fp8"))
    return spec, torch.float16 if fp16 else torch.bfloat16


def meta_model(name: str, gpu: Device, capacity: int = 4096) -> DecodeModel:
    """Return a model on the meta device. Its tensors need no memory and no GPU."""
    (spec, dtype), device = model_named(name), torch.device("meta")
    weights = empty_weights(spec, device, dtype, packs=True)
    prompt_config = prompt_attention_config(gpu, False, spec.fp8_kv, spec.pages.head_dim)
    workspace = make_workspace(spec, capacity, device, dtype, slots=64)
    kv = make_kv_cache(spec, capacity, device, dtype, page=PAGE)
    expanded = len(kv.pool) if kv.fp8 and prompt_config.hopper else 0
    return DecodeModel(
        spec=spec,
        weights=weights,
        kv=kv,
        ropes={
            key: (torch.empty(capacity, key[0].columns(key[1]) // 2, device=device),) * 2 for key in rope_keys(spec)
        },
        workspace=workspace,
        verify=workspace,
        prompt=make_prompt_buffers(spec, 4096, device, dtype, prompt_config, expanded, PAGE),
        prompt_config=prompt_config,
        configs_by_rows=choose_configs(spec, weights, gpu),
        gpu=gpu,
        recurrent=make_records(spec, device, dtype, 64, drafts=True),
    )


def with_adapters(model: DecodeModel, max_rank: int = 64) -> DecodeModel:
    """Return the model for passes with adapters."""
    pool = make_adapters(model.spec, model.device, model.weights.dtype, 4, max_rank, 64, 64, 2048)
    configs = choose_configs(model.spec, model.weights, model.gpu, adapters=True)
    return replace(model, pool=pool, adapter_configs=configs, adapting=True)


def recorded(run: Callable[[], None]) -> dict[tuple, Launch]:
    """Return every distinct launch of `run`."""
    launches: dict[tuple, Launch] = {}
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


def run_common(name: str, gpu: Device) -> None:
    """Run the passes that a first answer needs: decode passes of 1 and 8 rows, verifying passes, prompt passes."""
    model = meta_model(name, gpu)
    for rows in (1, 8):
        for kind in decode.KINDS:
            decode.decode_pass(launcher(model), model.for_rows(rows), kind)
        decode.decode_pass(launcher(model), model.for_rows(rows), "sample", masked=True)
    if not model.spec.fp8_kv:  # Drafts cannot be verified with fp8 K/V.
        for queries in (1, 8):
            decode.decode_pass(launcher(model), model.for_queries(1, queries), "greedy")
    run_prompts(model, decoding=8)
    finish(launcher(model), model.for_rows(8), "greedy")


def prompt_run(model: DecodeModel) -> Callable[..., None]:
    """Return the runner of a prompt pass. Its attention is torch's if Triton's tiles do not fit."""
    tiles = prompt_tiles_fit(model.spec.pages.head_dim, model.weights.dtype, model.gpu)
    return launch_ours if tiles else launch_but_attention


def run_prompts(model: DecodeModel, decoding: int) -> None:
    """Run prompt passes with and without decoding rows."""
    run = prompt_run(model)
    for rows in (68, 512, 4096):  # With 512 rows there is no separate launch that adds splits.
        read(run, model, rows)
    read(run, model, 132, decoding=decoding)
    key_values = model.prompt.x.new_empty(2, *model.kv.k[0][0].shape)
    gather_kv(model.kv.page_table[0], model.kv.k[0], model.kv.v[0], 70, *key_values)
    for linear in model.weights.layers[0].linears.values() if model.spec.quantization else ():
        dequantize(linear, 0, 1024, model.prompt.dequantized)


def run_all(name: str, gpu: Device) -> None:
    """Run all kinds of passes."""
    model, hopper = meta_model(name, gpu), gpu.capability == HOPPER
    quantized = model.spec.quantization is not None
    for rows in (*ROWS, 32) if hopper else ROWS:  # On Hopper, other kernels compute the linears for 32 rows.
        for kind in decode.KINDS:
            decode.decode_pass(launcher(model), model.for_rows(rows), kind)
            decode.decode_pass(launcher(model), model.for_rows(rows), kind, masked=True)
    if not model.spec.fp8_kv:  # Drafts cannot be verified with fp8 K/V.
        for requests, queries in ((1, 1), (1, 8), (2, 2), (4, 4)):
            for kind in decode.KINDS:
                decode.decode_pass(launcher(model), model.for_queries(requests, queries), kind)
        row_by_row = replace(model.for_queries(4, 4), fixed_chunk=256)  # The batch-invariant mode uses this config.
        decode.decode_pass(launcher(model), row_by_row, "greedy")
    if quantized:
        for groups, kernels_of_groups in GROUPS.items():
            one = meta_model(groups, gpu).for_rows(1)
            for kernel in kernels_of_groups:
                decode.decode_pass(partial(launch_only, kernel, launcher(one)), one, "greedy")
    if quantized and hopper:
        for ring in RINGS:  # RINGS contains each number type that the ring kernel reads.
            one = meta_model(ring, gpu).for_rows(1)
            decode.decode_pass(partial(launch_only, _matmul_ring_kernel, launcher(one)), one, "greedy")
    if not quantized:
        few = replace(model.for_rows(16), configs_by_rows={16: wide(model.for_rows(16))})
        decode.decode_pass(launcher(model), few, "greedy")
    if name == "moe":  # The registers of down_rows depend on the width of the experts.
        one = meta_model("moe_wide", gpu).for_rows(1)
        decode.decode_pass(partial(launch_only, _down_rows_kernel, launcher(one)), one, "greedy")
    if hopper:  # These launches occur in batch-invariant mode.
        alike = choose_configs(model.spec, model.weights, gpu, batch_invariant=True)
        alike = replace(model, configs_by_rows=alike)
        for rows in ROWS:
            decode.decode_pass(launcher(model), alike.for_rows(rows), "greedy")
    run_prompts(model, decoding=64)
    finish(launcher(model), model.for_rows(1), "greedy")
    run_adapters(with_adapters(model))
    # These launches come next if the last layer runs for all tokens, and not only for those that are sampled.
    ws, prompt = model.for_rows(1).workspace, model.prompt
    take_residual(ws.meta, prompt.hidden, prompt.delta, model.weights.final_norm, ws.hidden, ws.normed, ws.sumsq)
    if quantized or model.spec.fp8_kv:
        return  # Packed tensors and fp8 K/V cannot be in host memory.
    dtype = model.weights.dtype
    kv = make_kv_cache(model.spec, 4096, model.device, dtype, page=PAGE, offload=Offload(host=8, ring=8))
    weights = empty_weights(model.spec, model.device, dtype, on_host=min(3, model.spec.num_layers))
    offloaded = replace(model, kv=kv, weights=weights)
    decode.decode_pass(launch_ours, offloaded.for_rows(1), "greedy")
    read(prompt_run(model), offloaded, 132, decoding=64)


def run_adapters(model: DecodeModel) -> None:
    """Run passes with adapters, also in batch-invariant mode."""
    for rows in ROWS:
        decode.decode_pass(launcher(model), model.for_rows(rows), "greedy")
    read(prompt_run(model), model, 132, decoding=64)
    read(prompt_run(model), model, 68)
    finish(launcher(model), model.for_rows(8), "greedy")
    if model.gpu.capability == HOPPER:
        alike = choose_configs(model.spec, model.weights, model.gpu, batch_invariant=True, adapters=True)
        alike = replace(model, configs_by_rows=alike, adapter_configs=alike, fixed_chunk=256)
        for rows in ROWS:
            decode.decode_pass(launcher(model), alike.for_rows(rows), "greedy")


def wide(model: DecodeModel) -> PassConfigs:
    """Return configs that only some tables contain, with four warps that multiply together, or else with one warp."""
    together = model.gpu.capability in (90, 100)
    one = WideConfig(64, 64, 2) if together else WideConfig(16, 32, 2, num_warps=1)
    two = replace(one, split=2)
    kernel = kernel_named("wide")
    by_role = {"gate_up": one, "lm_head": one}
    linears = {case: Choice(kernel, by_role.get(role, two)) for role, case in model.cases.items()}
    return replace(model.configs, linears=linears)


def launch_ours(role: str, op, *args, **options) -> None:
    """Launch ops with kernels. torch's own products and attention need no compilation."""
    if op.kernels:
        op.launch(*args, **options)


def launch_only(kernel: triton.JITFunction, run, role: str, op, *args, **options) -> None:
    """Launch only the ops that use `kernel`."""
    if kernel in op.kernels:
        run(role, op, *args, **options)


def launch_but_attention(role: str, op, *args, **options) -> None:
    """Launch a prompt pass whose attention is torch's."""
    if role != "attention":
        launch_ours(role, op, *args, **options)


def compile_launch(launch: Launch, capability: int) -> Resources:
    compiled = launch.compile(capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True)
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text.stdout).groups()
    metadata = compiled.metadata
    columns, threads = getattr(metadata, "tmem_size", None) or 0, 32 * metadata.num_warps
    return Resources(int(registers), int(stack), int(local), metadata.shared, columns, threads)


def compile_apart(launch: Launch, capability: int, log, pipe) -> None:
    """Send the resources of a launch or an error to `pipe`. All other output goes to `log`."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        pipe.send(compile_launch(launch, capability))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def compile_all(launches: Iterable[tuple[Launch, int]]) -> Iterator[tuple[int, Resources | str]]:
    """Compile launches for compute capabilities. Yield the index of each, and its resources or an error.

    Each compilation has a process of its own, since an error in LLVM ends the process.
    """
    context, running = multiprocessing.get_context("fork"), {}
    triton_key()  # triton_key hashes Triton's files. The child processes inherit the cached result.
    waiting = iter(enumerate(launches))
    while True:
        while len(running) < (os.cpu_count() or 1) and (entry := next(waiting, None)):
            index, launch = entry
            log, (ours, theirs) = tempfile.TemporaryFile("w+"), context.Pipe(duplex=False)
            process = context.Process(target=compile_apart, args=(*launch, log, theirs))
            process.start()
            theirs.close()
            running[ours] = process, index, log
        if not running:
            return
        for pipe in wait(list(running)):
            process, index, log = running.pop(pipe)
            try:
                result = pipe.recv()
            except EOFError:
                process.join()
                log.seek(0)
                result = f"the compiler ended with status {process.exitcode}: {log.read()[-300:]}"
            process.join()
            yield index, result


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compile the launches of models for GPUs, and check the limits of each GPU."
    )
    parser.add_argument(
        "models",
        help="names of models, separated by commas; 'dense' stands for every preset up to 8B in bf16, fp8 and int4",
    )
    parser.add_argument("gpus", help=f"GPUs, separated by commas: {', '.join(GPUS)}")
    parser.add_argument(
        "--common", action="store_true", help="compile only decode passes of 1 and 8 rows, and prompt passes"
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="choose launch configs only by the rules of tuning/rules.py, and ignore the tables of tuned configs",
    )
    args = parser.parse_args()
    if args.rules:
        resolve.package_tables = lambda device: []
    models, gpus = args.models.replace("dense", ",".join(DENSE)).split(","), args.gpus.split(",")
    distinct: dict = {}  # launch: [its first model, its GPUs]
    for gpu in gpus:
        for model in models:
            launches = recorded(partial(run_common if args.common else run_all, model, GPUS[gpu]))
            for key, launch in launches.items():
                entry = distinct.setdefault((GPUS[gpu].capability, *key), (launch, model, []))
                entry[2].extend([] if gpu in entry[2] else [gpu])
    todo, faults = list(distinct.values()), []
    for index, result in compile_all((launch, GPUS[names[0]].capability) for launch, _, names in todo):
        launch, model, names = todo[index]
        kernel = launch.kernel.__name__
        for gpu in names:
            if isinstance(result, str):
                excess, numbers = [" ".join(result.split())[:500]], ["failed"]
            else:
                excess, numbers = (
                    result.excess(kernel, GPUS[gpu], launch.constants.get("D", 0)),
                    list(map(str, result[:4])),
                )
            print(model, kernel, gpu, *numbers, flush=True)
            faults += [f"{model} {kernel} {gpu}: {fault} {launch.constants}" for fault in excess]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
