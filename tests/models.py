"""Tiny models in memory for tests of the passes and the engine: real head sizes, odd widths, few programs."""

from contextlib import contextmanager
from dataclasses import replace

import torch

from tridecode.blocks.attention import Attention
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.shared_expert import SharedExpert
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.checkpoint.load import random_weights
from tridecode.engine import Engine
from tridecode.kernels.attention.attention import AttentionConfig
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig
from tridecode.kernels.device import Device
from tridecode.kernels.linear.matvec import MatvecConfig
from tridecode.kernels.linear.registry import LINEAR_KERNELS
from tridecode.models.dense import dense_spec
from tridecode.options import EngineOptions
from tridecode.plan.resolve import EnginePlan, chunk_of, resolve
from tridecode.step.model import attention_case, linear_cases
from tridecode.step.run import launch
from tridecode.tuning.configs import Choice, PassConfigs

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
H100 = Device("NVIDIA H100 80GB HBM3", 90, 132, 232448, 233472, 65536)
# A few large programs, because the interpreter takes about 2 ms for each program and each iteration of a loop.
_BLOCK_N = {"qkv": 128, "o_proj": 64, "gate_up": 64, "down": 64, "lm_head": 128, "in_proj": 128, "out_proj": 64}
_ATTENTION = {
    1: AttentionConfig(block_t=32, splits=3),
    2: AttentionRowsConfig(block_t=32, splits=3, least=1, programs=3),
}


def interpreter_configs(spec: ModelSpec, weights) -> dict[int, PassConfigs]:
    """Return launch configs for the interpreter: for one row, and for more."""
    by_role = {role: MatvecConfig(block_n, 1) for role, block_n in _BLOCK_N.items()}
    return {rows: configs_of(spec, weights, by_role, attention) for rows, attention in _ATTENTION.items()}


def configs_of(spec: ModelSpec, weights, by_role: dict, attention) -> PassConfigs:
    """Return launch configs for a model. `by_role` maps the role of a linear, such as qkv, to its config."""
    kernels = {kernel.config: kernel for kernel in LINEAR_KERNELS}
    cases = linear_cases(spec, weights)
    by_case = {case: by_role[role.removeprefix("shared_")] for role, case in cases.items()}
    linears = {case: Choice(kernels[type(config)], config) for case, config in by_case.items()}
    blocks = [block for block in spec.blocks() if isinstance(block, Attention)]
    return PassConfigs(linears, {attention_case(b, weights.dtype, spec.fp8_kv): attention for b in blocks})


def tiny_config(layer_types=None, sliding_window=None, experts=None, **overrides) -> ModelSpec:
    """A small decoder.

    Args:
        layer_types: "full_attention" or "sliding_attention" for each layer.
        experts: settings of a mixture of experts in all layers but the second, which has an MLP. None: no experts.
    """
    fields = dict(
        family="qwen3",
        hidden_size=96,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=331,
        max_position=512,
        qk_norm=True,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=1e4),
    )
    if layer_types is not None:
        fields["windows"] = tuple(sliding_window if kind == "sliding_attention" else 0 for kind in layer_types)
    spec = dense_spec(**fields | overrides)
    if experts is None:
        return spec
    ffn = MoE(hidden=spec.hidden_size, eps=spec.eps, **experts)
    return replace(spec, layers=tuple(each if i == 1 else Layer(each.mixer, ffn) for i, each in enumerate(spec.layers)))


EXPERTS = dict(experts=6, top_k=2, intermediate=48, shared=True)
FAMILIES = {
    "qwen3": {},
    "llama3": dict(
        family="llama",
        qk_norm=False,
        tie_word_embeddings=False,
        head_dim=80,
        num_heads=3,
        num_kv_heads=1,
        rope=RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=64),
    ),
    "qwen2": dict(family="qwen2", qk_norm=False, qkv_bias=True, num_heads=7, num_kv_heads=1, rms_norm_eps=1e-5),
    "mistral": dict(
        family="mistral",
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_window=24,
        layer_types=("sliding_attention",) * 2,
    ),
    "experts": dict(family="qwen2_moe", qk_norm=False, qkv_bias=True, experts=EXPERTS),
    "wide shared expert": dict(
        family="qwen2_moe",
        qk_norm=False,
        qkv_bias=True,
        experts=EXPERTS | dict(shared=False, apart=SharedExpert(hidden=96, intermediate=112)),
    ),
}
# Overrides of tiny_config, for tests with and without experts.
BOTH = {
    name: {key: value for key, value in FAMILIES[name].items() if key == "experts"} for name in ("qwen3", "experts")
}


def tiny_engine(
    backend="auto", graph="full", dtype=None, capacity=256, seed=0, build=None, on_host=0, **overrides
) -> Engine:
    """Build an engine of a tiny model with random weights.

    Args:
        backend: by default the one that this machine has: Triton on a GPU, torch otherwise.
        build: additional arguments of build_engine.
        on_host: layers whose linears are in host memory.
        overrides: arguments of tiny_config.
    """
    config = tiny_config(**overrides)
    dtype = dtype or (torch.bfloat16 if CUDA else torch.float32)
    if backend == "auto":
        backend = "triton" if CUDA else "torch"
    weights = random_weights(config, DEVICE, dtype, seed, on_host)
    configs = None if CUDA else interpreter_configs(config, weights)
    return build_engine(config, weights, capacity, backend, graph, configs, **build or {})


def build_engine(
    spec, weights, capacity, backend=None, graph="full", configs=None, *, pages=None, page=None, offload=None, **options
) -> Engine:
    """Build an engine without loading a checkpoint.

    Args:
        backend: None selects triton on a GPU and torch on a CPU.
        configs: launch configs.
        pages, page, offload: values that replace those that `plan.resolve` computes.
        options: fields of EngineOptions. The default of `speculate` is off here.
    """
    backend = backend or ("triton" if CUDA else "torch")
    dtype = str(weights.dtype).removeprefix("torch.")
    options = {"speculate": "off", "dtype": dtype} | options
    requested = EngineOptions(max_seq_len=capacity, backend=backend, graph=graph, **options)
    plan = resolve(requested, spec, weights.device)
    page = page or plan.page
    chunk = chunk_of(requested, capacity, page)
    plan = replace(plan, pages=pages or plan.pages, page=page, offload=offload or plan.offload, chunk=chunk)
    return Engine.build(plan, weights, configs=configs)


def planned(spec: ModelSpec, on="cuda", **options) -> EnginePlan:
    """Return the plan of a model, without drafts unless options request them. Raises DeviceError if it does not fit."""
    plan = resolve(EngineOptions(**{"speculate": "off"} | options), spec, torch.device(on))
    plan.check()
    return plan


@contextmanager
def no_allocations():
    """Check that nothing is allocated on the GPU within a `with` block."""
    names = "allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.allocated"
    before = torch.cuda.memory_stats()
    yield
    after = torch.cuda.memory_stats()
    assert [after[name] for name in names] == [before[name] for name in names]


def use_h100(monkeypatch) -> None:
    """Give devices the properties of an H100 where memory is planned and models are made."""
    for room in ("plan.memory", "plan.graphs", "step.model"):
        monkeypatch.setattr(f"tridecode.{room}.device_of", lambda device: H100)


def slowed(late: str):
    """Return a runner that launches. Before each launch of the role `late`, the stream sleeps for a millisecond."""

    def run(role, op, *args, **options):
        if role == late:
            torch.cuda._sleep(2_000_000)
        launch(role, op, *args, **options)

    return run


def begin(engine: Engine, ids, position, params, stop_ids=(), limit=None) -> None:
    """Start slot 0 at `position` of `ids`, without a request."""
    slots, limit = engine.scheduler.slots, limit or engine.capacity + 1
    slots.write_tokens(slots[0], ids, limit - 1)
    slots.begin(slots[0], 0, params, position=position, n_known=len(ids), limit=limit, stop_ids=stop_ids)
