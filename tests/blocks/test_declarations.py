"""Declarations of blocks: they are complete, have no duplicates, and match what the passes use."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from models import FAMILIES, tiny_config

from tridecode.blocks.attention import Attention
from tridecode.blocks.declarations import Linear, Pages, Weight
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.shared_expert import SharedExpert
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.checkpoint.load import empty_weights
from tridecode.checkpoint.quantization.quantize import rules
from tridecode.checkpoint.slices import declared, linear_modules, parameter_count, targets, tensor_slices, weight_bytes
from tridecode.kernels.device import Device
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.models.presets import PRESETS
from tridecode.step.decode import decode_pass
from tridecode.step.model import choose_configs, linear_cases, make_model
from tridecode.step.prompt import finish, read
from tridecode.step.run import Recorder
from tridecode.step.workspace import first_rows, make_prompt_buffers, make_workspace, named_tensors
from tridecode.tuning.attention import prompt_attention_config
from tridecode.tuning.configs import TILE_ROWS

WINDOWS = dict(num_layers=3, layer_types=("full_attention", "sliding_attention", "full_attention"), sliding_window=24)
SPECS = dict(PRESETS) | {f"tiny {name}": tiny_config(**fields) for name, fields in FAMILIES.items()}
SPECS |= {"tiny of two windows": tiny_config(**WINDOWS)}
COMMON = dict(hidden=96, norm_offset=1.0)
GATED = Attention(**COMMON, heads=2, kv_heads=1, head_dim=64, qk_norm=True, gate=True, rope=RopeConfig(partial=0.25))
DELTA = GatedDelta(**COMMON, key_heads=2, value_heads=4, key_dim=32, value_dim=16)
HYBRID = tuple(Layer(mixer, MLP(**COMMON, intermediate=160)) for mixer in (DELTA, DELTA, GATED, DELTA))
SPECS |= {"tiny hybrid": ModelSpec("qwen3_5", 96, 331, 512, HYBRID, norm_offset=1.0)}
EXPERTS = dict(**COMMON, experts=6, top_k=2, intermediate=48, shared=True)
MIXTURE = (Layer(GATED, MoE(**EXPERTS)), HYBRID[2], Layer(DELTA, MoE(**EXPERTS)), Layer(DELTA, MoE(**EXPERTS)))
SPECS |= {"tiny experts": ModelSpec("qwen3_5_moe", 96, 331, 512, MIXTURE, norm_offset=1.0)}
STACKED = tuple(replace(layer, ffn=replace(layer.ffn, stacked=True)) for layer in (MIXTURE[0], MIXTURE[2]))
SPECS |= {"tiny stacked experts": ModelSpec("qwen3_5_moe", 96, 331, 512, STACKED, norm_offset=1.0)}
WIDE = MoE(**EXPERTS | dict(shared=False), apart=SharedExpert(**COMMON, intermediate=80))
SPECS |= {"tiny wide shared expert": ModelSpec("qwen2_moe", 96, 331, 512, (Layer(GATED, WIDE),) * 2, norm_offset=1.0)}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
FIELDS = dict(hidden=96, heads=4, kv_heads=2, head_dim=64)


def workspace_of(spec: ModelSpec, slots: int = 1, device="meta"):
    return make_workspace(spec, 64, device, torch.bfloat16, slots)


@EVERY_SPEC
def test_names_are_unique_within_a_layer(spec):
    for layer in spec.layers:
        names = [each.name for each in layer.declarations()]
        assert len(names) == len(set(names)) and {"mixer_norm", "ffn_norm"} <= set(names)
        modules = [part.module for linear in layer.linears() for part in linear.parts]
        tensors = [weight.tensor for weight in layer.weights()] + [f"{module}.weight" for module in modules]
        assert len(tensors) == len(set(tensors))


@EVERY_SPEC
def test_a_layer_declares_what_its_blocks_declare(spec):
    for layer in spec.layers:
        assert Counter(layer.linears()) == Counter(each for block in layer.blocks for each in block.linears())
        own = Counter(each for block in layer.blocks for each in block.weights())
        norms = Counter(layer.weights()) - own
        assert {(norm.tensor, norm.shape) for norm in norms} == {
            (f"{block.norm}.weight", (block.hidden,)) for block in layer.blocks
        }
        assert Counter(layer.declarations()) == Counter(layer.linears()) + Counter(layer.weights())


@EVERY_SPEC
def test_rows_of_a_linear_are_the_sum_of_its_parts(spec):
    for linear in spec.linears():
        tied = linear == spec.lm_head and spec.tie_word_embeddings
        assert sum(part.rows for part in linear.parts) == (0 if tied else linear.n)
        assert linear.k > 0 and all(part.rows > 0 for part in linear.parts)
        assert linear.epilogue in ("normed", "gated", "residual")
    for layer in spec.layers:
        for block in layer.blocks:
            ends = [linear.epilogue for linear in block.linears()].count("residual")
            assert ends == 1 + len(block.inner())
            for linear in block.linears():
                stream = linear.n // (linear.experts or 1) if linear.epilogue == "residual" else linear.k
                assert stream == block.hidden == spec.hidden_size


@EVERY_SPEC
def test_tensor_slices_cover_every_tensor_once(spec):
    slices, rows = tensor_slices(spec), {}
    for of in slices.values():
        rows.setdefault(of.target, []).append((of.start, of.start + of.shape[0]))
    found = targets(spec, packs=False)
    assert rows.keys() == found.keys()
    for target, parts in rows.items():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [start for start, _ in sorted(parts)] == ends[:-1], (
            f"{target}: the parts do not cover its rows exactly once"
        )
        assert ends[-1] == found[target].shape[0]
    linears = [each for _, _, each in declared(spec) if isinstance(each, Linear)]
    weights = [each for _, _, each in declared(spec) if isinstance(each, Weight)]
    parts = sum(len(linear.parts) * (1 + linear.bias) for linear in linears)
    assert len(slices) == parts + len(weights), "two declarations name the same tensor"
    assert parameter_count(spec) == sum(math.prod(target.shape) for target in found.values())


@EVERY_SPEC
def test_linear_modules_are_the_matrices_without_the_embedding(spec):
    matrices = {name for name, of in tensor_slices(spec).items() if len(of.shape) == 2}
    # These linears are small, so they stay in bf16.
    small = ("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
    gates = {name for name in matrices if name.removesuffix(".weight").endswith(small)}
    modules = linear_modules(spec)
    stacked = {module for module in modules if module in matrices}  # Such a tensor is named as its module.
    assert {f"{module}.weight" for module in modules - stacked} | stacked == matrices - gates - {spec.embed.tensor}
    assert ("lm_head" in modules) != spec.tie_word_embeddings
    # A recurrent layer has in_proj_qkv, in_proj_z and out_proj instead of q, k, v and o, or in_proj_qkvz and out_proj.
    deltas = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, GatedDelta)]
    attention = 4 * spec.num_layers - sum(1 + delta.grouped_qkvz for delta in deltas)
    mixtures = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoE)]
    mlps = spec.num_layers - len(mixtures)
    shared = sum(ffn.shared or ffn.apart is not None for ffn in mixtures)
    experts = sum(2 if ffn.stacked else 3 * ffn.experts for ffn in mixtures) + 3 * shared
    assert len(modules) == attention + 3 * mlps + experts + (not spec.tie_word_embeddings)
    assert len(gates) == sum(2 - delta.grouped_ba for delta in deltas) + len(mixtures) + shared


@EVERY_SPEC
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_loaded_tensors_have_the_declared_shapes(spec, quantize):
    spec = replace(spec, load_quantization=quantize and rules(quantize, "fp8"))
    weights = empty_weights(spec, "meta", torch.bfloat16, packs=True)
    for layer, loaded in zip(spec.layers, weights.layers, strict=True):
        assert loaded.weights.keys() == {each.name for each in layer.weights()}
        assert loaded.linears.keys() == {each.name for each in layer.linears()}
        for weight in layer.weights():
            assert loaded.weights[weight.name].shape == weight.shape
        for linear in layer.linears():
            found = loaded.linears[linear.name]
            assert isinstance(found, LoadedLinear) and (found.out_features, found.in_features) == (linear.n, linear.k)
            assert (found.packed is not None) == (quantize is not None)
            assert found.bias.shape == (linear.n,) if linear.bias else found.bias is None
    head = weights.lm_head
    assert (head.out_features, head.in_features) == (spec.vocab_size, spec.hidden_size)
    assert weights.tied == (spec.tie_word_embeddings and quantize is None)
    assert weights.nbytes() == weight_bytes(spec, torch.bfloat16, packs=True)


class Used(dict):
    """The buffers of a block. It records the names of the buffers that were read."""

    def __init__(self, buffers):
        super().__init__(buffers)
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)


@EVERY_SPEC
def test_passes_use_all_declared_buffers_linears_and_weights(spec):
    """Passes cannot use other tensors, because a tensor exists only if it is declared."""
    weights = empty_weights(spec, "meta", torch.bfloat16)
    # Passes of one or two rows use fewer buffers of experts.
    model = make_model(spec, weights, 256, page=64, slots=4 if spec.has_experts else 1)
    decode = {block: Used(own) for block, own in model.workspace.blocks.items()}
    prompt = {block: Used(own) for block, own in model.prompt.blocks.items()}
    model.workspace.blocks.update(decode)
    recorder = Recorder()
    decode_pass(recorder, model, "greedy")
    roles = Counter(launch.role for launch in recorder.launches)
    declared_linears = Counter(linear.name for linear in spec.linears())
    assert {name: roles[name] for name in declared_linears} == declared_linears
    for block, own in decode.items():
        assert own.names == {buffer.name for buffer in block.buffers()} == own.keys()
    args = [arg for launch in recorder.launches for arg in tensors_of(launch.args)]
    used = {id(each) for arg in args for each in (arg, arg._base)}  # A launch may read a part of a tensor.
    missing = [name for name, tensor in weights.tensors().items() if id(tensor) not in used]
    assert missing == []

    narrowed = replace(model.prompt, blocks=prompt)
    object.__setattr__(model, "prompt", narrowed)
    object.__setattr__(narrowed, "first", lambda rows: narrowed)
    recorder = Recorder()
    read(recorder, model, 40)
    finish(recorder, model, "greedy")
    roles = Counter(launch.role for launch in recorder.launches)
    assert {name: roles[name] for name in declared_linears} == declared_linears
    for block, own in prompt.items():
        last_only = block not in [each for layer in spec.layers[:-1] for each in layer.blocks]
        assert last_only or own.names == {buffer.name for buffer in block.prompt_buffers()} == own.keys()


def tensors_of(args):
    """Yield the tensors among the arguments of a launch, also those within weights and named tuples."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, LoadedLinear):
            yield from arg.tensors().values()
        elif isinstance(arg, tuple):
            yield from tensors_of(arg)


@EVERY_SPEC
def test_buffers_have_their_declared_shapes_and_dtypes(spec):
    """Buffers that linears read in tiles have the rows of a whole tile in memory."""
    for dtype, activation in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        dtypes = {"activation": activation, "weights": dtype, "float32": torch.float32, "int32": torch.int32}
        decode = make_workspace(spec, 64, "meta", dtype, 3).blocks
        config = prompt_attention_config(Device(), batch_invariant=False)
        prompt = make_prompt_buffers(spec, 3, "meta", dtype, config).blocks
        assert decode.keys() == prompt.keys() == set(spec.blocks())
        for blocks, buffers in ((decode, "buffers"), (prompt, "prompt_buffers")):
            for block, own in blocks.items():
                for buffer in getattr(block, buffers)():
                    tensor = own[buffer.name]
                    assert tensor.shape == (3, *buffer.shape) and tensor.dtype == dtypes[buffer.dtype]
                    rows = TILE_ROWS if buffer.tile else 3
                    assert tensor.untyped_storage().nbytes() == rows * math.prod(buffer.shape) * tensor.itemsize


@EVERY_SPEC
def test_all_layers_with_attention_have_equal_pages(spec):
    mixers = [layer.mixer for layer in spec.layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    assert spec.pages == Pages(attention[0].kv_heads, attention[0].head_dim)
    assert spec.pages.width == attention[0].kv_size and spec.page_layers == len(attention)
    assert [layer.pages() for layer in spec.layers] == [spec.pages if m in attention else None for m in mixers]
    assert [bool(layer.recurrent()) for layer in spec.layers] == [isinstance(m, GatedDelta) for m in mixers]


def spec_of(*layers: Layer) -> ModelSpec:
    return ModelSpec("test", 96, 331, 512, layers=layers)


def test_layers_without_pages_are_not_counted():
    """The pages of a layer are found by its index among the layers that have pages."""
    attention, mlp = Attention(**FIELDS), MLP(hidden=96, intermediate=160)
    spec = spec_of(Layer(mlp), Layer(attention, mlp), Layer(mlp, mlp), Layer(attention))
    assert (spec.page_layers, spec.num_layers, spec.pages) == (2, 4, Pages(2, 64))
    model = make_model(spec, empty_weights(spec, "meta", torch.bfloat16), 128, page=64)
    assert [layer.pages for layer in model.layers] == [None, 0, None, 1]
    assert model.kv.pool.shape[1] == 2


def test_layers_with_different_pages_are_refused():
    layers = (Layer(Attention(**FIELDS)), Layer(Attention(**FIELDS | dict(kv_heads=4))))
    with pytest.raises(AssertionError, match="only layers with equal pages"):
        _ = spec_of(*layers).pages
    with pytest.raises(AssertionError, match="only layers with equal pages"):
        _ = spec_of(Layer(MLP(hidden=96, intermediate=160))).pages


def test_equal_blocks_are_listed_once():
    first, second = (Layer(Attention(**FIELDS), MLP(hidden=96, intermediate=160)) for _ in range(2))
    spec = spec_of(first, second)
    assert first == second and spec.blocks() == first.blocks
    workspace = workspace_of(spec)
    assert [*workspace.blocks] == [*first.blocks]
    assert workspace.blocks[first.mixer] is workspace.blocks[second.mixer]
    assert workspace_of(spec_of(first)).blocks.keys() == workspace.blocks.keys()


@pytest.mark.parametrize("change", [dict(window=24), dict(qk_norm=True), dict(bias=True), dict(scale=0.5)], ids=str)
def test_blocks_of_equal_sizes_share_their_buffers(change):
    """Equal blocks never run at the same time, so they share buffers."""
    one, other = Attention(**FIELDS), Attention(**FIELDS | change)
    small = MLP(hidden=96, intermediate=32)
    spec = spec_of(Layer(one, MLP(hidden=96, intermediate=160)), Layer(other, small))
    assert one != other and len(spec.blocks()) == 4
    for narrow in (False, True):
        workspace = workspace_of(spec, 3, "cpu")
        workspace = first_rows(workspace, 2) if narrow else workspace
        blocks = workspace.blocks
        assert blocks[one].keys() == blocks[other].keys()
        assert all(blocks[one][name] is blocks[other][name] for name in blocks[one])
        wide = blocks[spec.layers[0].ffn]["act"]
        assert blocks[small]["act"] is not wide and blocks[small]["act"].shape != wide.shape
        tensors = named_tensors(workspace)
        own = [name for name in tensors if name.startswith(("attention.", "mlp."))]
        assert sorted(own) == sorted([f"attention.{name}" for name in blocks[one]] + ["mlp.act", "mlp.3.act"])
    names = {f"attention.{buffer.name}" for buffer in one.buffers()} | {"mlp.act"}
    assert names <= named_tensors(workspace_of(spec_of(Layer(one, small)))).keys()


def test_a_second_layer_needs_no_additional_workspace():
    def nbytes(layers):
        workspace = workspace_of(tiny_config(num_layers=layers))
        return sum(tensor.nbytes for tensor in named_tensors(workspace).values() if tensor.is_meta)

    assert nbytes(1) == nbytes(2) == nbytes(7)
    two = workspace_of(tiny_config(**WINDOWS))
    assert sum(tensor.nbytes for tensor in named_tensors(two).values() if tensor.is_meta) == nbytes(1)


def test_every_linear_has_a_named_case():
    spec = tiny_config(num_layers=3)
    wide = replace(spec.layers[1], ffn=replace(spec.layers[1].ffn, intermediate=224))
    spec = replace(spec, layers=(spec.layers[0], wide, spec.layers[2]))
    weights = empty_weights(spec, "meta", torch.bfloat16)
    cases = linear_cases(spec, weights)
    names = ["qkv", "o_proj", "gate_up", "down", "gate_up of layer 1", "down of layer 1", "lm_head"]
    assert list(cases) == names and len(set(cases.values())) == len(names)
    gpu = Device("NVIDIA H100", 90, 132, 232448, 233472, 65536)
    assert choose_configs(spec, weights, gpu)[1].linears.keys() == set(cases.values())


def test_a_bias_needs_the_epilogue_normed():
    for epilogue in ("gated", "residual"):
        with pytest.raises(ValueError, match="has no bias"):
            Linear("x", 4, 4, (), epilogue, bias=True)
