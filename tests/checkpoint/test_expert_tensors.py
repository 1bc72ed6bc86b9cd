"""Checkpoints with experts: every tensor gets its place, and invalid files are refused before memory is allocated."""

import json
import shutil

import pytest
import torch
from checkpoints import EXPERTS, write_tiny
from quantized import change_config, write_quantized
from safetensors.torch import load_file, save_file

from tridecode.checkpoint import load as checkpoint
from tridecode.checkpoint.load import load_config, load_weights
from tridecode.checkpoint.loader import Loader
from tridecode.errors import CheckpointError

BLOCKS = dict(linear_key_head_dim=128, linear_value_head_dim=128, linear_num_value_heads=4)
WIDTHS = dict(moe_intermediate_size=96, shared_expert_intermediate_size=64)
FAMILY = "qwen3.5-moe"  # 6 experts of width 80, and a shared one. hidden_size is 192.
MLP = "model.layers.1.mlp."
STACKED = f"{MLP}experts.gate_up_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Directories by (family, stacked). Tests must not change them."""
    made = {}

    def get(family, stacked=False):
        if (family, stacked) not in made:
            made[family, stacked] = write_tiny(tmp_path_factory.mktemp("written"), family, stacked=stacked)
        return made[family, stacked]

    return get


@pytest.mark.parametrize("family", EXPERTS)
def test_both_forms_of_experts_give_the_same_weights(family, written):
    forms = [written(family, stacked) for stacked in (False, True)]
    specs = [load_config(path) for path in forms]
    each, whole = (load_weights(path, spec, "cpu", torch.float32) for path, spec in zip(forms, specs))
    assert specs[0] != specs[1] and each.tensors().keys() == whole.tensors().keys()
    for name, tensor in each.tensors().items():
        assert torch.equal(tensor, whole.tensors()[name]), name


@pytest.mark.parametrize("stacked", [False, True], ids=["each", "stacked"])
def test_experts_are_read_in_small_pieces(stacked, written, monkeypatch):
    """The host stores no second copy of a tensor, which has gigabytes in a large model."""
    read, sizes = Loader._fill, []

    def fill(self, name, first, part):
        sizes.append(part.nbytes)
        return read(self, name, first, part)

    monkeypatch.setattr(Loader, "_fill", fill)
    path = written(FAMILY, stacked)
    load_weights(path, load_config(path), "cpu", torch.bfloat16)
    assert sum(sizes) == sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert max(sizes) <= 2**16


def test_experts_follow_each_other(written):
    tensors = load_file(written(FAMILY) / "model.safetensors")
    linears = load_weights(written(FAMILY), load_config(written(FAMILY)), "cpu", torch.float32).layers[1].linears
    gate_up, down = linears["experts_gate_up"].weight.view(7, 160, 192), linears["experts_down"].weight.view(7, 192, 80)
    for number, name in enumerate([*(f"experts.{expert}" for expert in range(6)), "shared_expert"]):
        gate, up, out = (tensors[f"{MLP}{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(gate_up[number], torch.cat((gate, up))) and torch.equal(down[number], out)


@pytest.mark.parametrize("method, options", [("fp8", {}), ("pack-quantized", dict(group=32)), ("awq", dict(group=32))])
def test_a_shared_expert_in_16_bits_leaves_the_experts_packed(method, options, tmp_path):
    """Published checkpoints leave the shared expert in 16 bits."""
    sizes = dict(moe_intermediate_size=128, shared_expert_intermediate_size=128)
    skip = ("lm_head", "self_attn", "linear_attn", "shared_expert")
    truth = write_quantized(tmp_path, method, skip, "qwen3.5-moe", sizes, **options)
    tensors = load_file(tmp_path / "model.safetensors")
    linears = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32, packs=True).layers[1].linears
    assert linears["shared_gate_up"].packed is None and linears["shared_down"].packed is None
    shared = [tensors[f"{MLP}shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")]
    assert torch.equal(linears["shared_gate_up"].weight, torch.cat(shared[:2]))
    assert torch.equal(linears["shared_down"].weight, shared[2])
    for name, parts in (("experts_gate_up", ("gate", "up")), ("experts_down", ("down",))):
        assert linears[name].packed
        own = [truth[f"{MLP}experts.{expert}.{part}_proj"] for expert in range(6) for part in parts]
        assert torch.allclose(linears[name].matrix(), torch.cat(own), rtol=1e-2, atol=1e-3)


def test_rows_of_a_head_are_separated(written):
    """Qwen3-Next stores q, k, v and z of each head of q and k together, and b and a."""
    path = written("qwen3-next")
    tensors = load_file(path / "model.safetensors")
    layer = load_weights(path, load_config(path), "cpu", torch.float32).layers[0]
    stored, keys = "model.layers.0.linear_attn.", 2
    heads = tensors[f"{stored}in_proj_qkvz.weight"].view(keys, -1, 192)
    parts = heads.split([32, 32, 96, 96], 1)  # Three V heads of 32 columns for each head of q and k.
    assert torch.equal(layer.linears["in_proj"].weight, torch.cat([part.flatten(0, 1) for part in parts]))
    gates = tensors[f"{stored}in_proj_ba.weight"].view(keys, 2, 3, 192).transpose(0, 1)
    assert torch.equal(layer.weights["ba"], gates.flatten(0, 2))


QUANTIZED = {
    # case: (method, options, family, changes of config.json)
    "fp8 experts": ("fp8", {}, FAMILY, {}),
    "fp8 heads": ("fp8", {}, "qwen3-next", BLOCKS),
    "fp8 tensors": ("float-quantized", dict(shared="tensor"), "qwen3-next", {}),
    "fp8 rows": ("float-quantized", dict(shared="channel"), "qwen3-next-wide", {}),
    "int4": ("pack-quantized", dict(zeros=True, group=32), "qwen3-next", WIDTHS | dict(intermediate_size=320)),
    "awq": ("awq", dict(group=32), "qwen2-moe", WIDTHS),
    "gptq": ("gptq", dict(group=-1), "qwen3-next", dict(linear_num_key_heads=3, linear_num_value_heads=3)),
}


@pytest.mark.parametrize("packs", [False, True], ids=["dequantized", "packed"])
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_tensors_for_each_expert(case, packs, tmp_path):
    method, options, family, sizes = QUANTIZED[case]
    skip = ("lm_head",) if method == "gptq" else ("lm_head", "layers.1.mlp")
    truth = write_quantized(tmp_path / "few", method, skip, family, sizes, **options)
    write_tiny(tmp_path / "all", family, **sizes)
    tensors = load_file(tmp_path / "all" / "model.safetensors")
    tensors |= {f"{name}.weight": weight.contiguous() for name, weight in truth.items()}
    save_file(tensors, tmp_path / "all" / "model.safetensors", metadata={"format": "pt"})
    specs = [load_config(tmp_path / name) for name in ("few", "all")]
    few, every = (
        load_weights(tmp_path / name, spec, "cpu", torch.float32, packs=packs)
        for name, spec in zip(("few", "all"), specs)
    )
    packed = set()
    for i, (layer, exact) in enumerate(zip(few.layers, every.layers)):
        for name, linear in layer.linears.items():
            assert torch.equal(linear.matrix(), exact.linears[name].matrix()), (i, name)
            packed |= {(i, name)} if linear.packed else set()
    if packs:
        linears = {(i, each.name) for i, layer in enumerate(specs[0].layers) for each in layer.linears()}
        mixers = ("qkv", "o_proj", "in_proj", "out_proj")
        assert packed == {(i, name) for i, name in linears if i != 1 or name in mixers or len(skip) == 1}
        assert any(name == "experts_gate_up" for _, name in packed)
    else:
        assert not packed


def pop(*names):
    return lambda tensors, config: [tensors.pop(name) for name in names]


def add(name):
    return lambda tensors, config: tensors.update({name: torch.ones(80, 192)})


def change(name, make):
    return lambda tensors, config: tensors.update({name: make(tensors[name]).contiguous()})


def configure(**changes):
    return lambda tensors, config: config.update(changes)


def stacked_fp8(tensors, config):
    tensors.update({STACKED: tensors[STACKED].to(torch.float8_e4m3fn), f"{STACKED}_scale_inv": torch.ones(6, 2, 2)})
    skipped = ["self_attn", "linear_attn", "shared_expert", "gate", "layers.0"]
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": skipped,
    }  # fmt: skip


BROKEN = {
    # case: (stacked, change of the tensors and of config.json, words that the message contains)
    "an expert is missing": (
        False, pop(*(f"{MLP}experts.2.{name}_proj.weight" for name in ("gate", "up", "down"))),
        [f"{MLP}experts.2.gate_proj.weight", "missing (and 2 more)"],
    ),
    "more experts than in config.json": (
        False, add(f"{MLP}experts.6.gate_proj.weight"), [f"{MLP}experts.6.gate_proj.weight", "6 experts"],
    ),
    "fewer experts than in config.json": (
        False, configure(num_experts=8), ["model.layers.0.mlp.experts.6.gate_proj.weight", "missing (and 11 more)"],
    ),
    "far fewer experts than in config.json": (False, configure(num_experts=1000), ["experts.6.", "missing (and 5963"]),
    "another width": (False, configure(moe_intermediate_size=96), ["experts.0.gate_proj", "[96, 192]", "[80, 192]"]),
    "no router": (False, pop(f"{MLP}gate.weight"), [f"{MLP}gate.weight", "missing"]),
    "a router for other experts": (
        False, change(f"{MLP}gate.weight", lambda router: router[:5]), [f"{MLP}gate.weight", "[6, 192]", "[5, 192]"],
    ),
    "no shared expert": (
        False, pop(f"{MLP}shared_expert.up_proj.weight"), [f"{MLP}shared_expert.up_proj.weight", "missing"],
    ),
    "no gate of the shared expert": (
        False, pop(f"{MLP}shared_expert_gate.weight"), [f"{MLP}shared_expert_gate.weight", "missing"],
    ),
    "integers": (
        False, change(f"{MLP}experts.3.up_proj.weight", lambda weight: weight.to(torch.int8)),
        [f"{MLP}experts.3.up_proj.weight", "I8"],
    ),
    "stacked, one tensor is missing": (True, pop(f"{MLP}experts.down_proj"), [f"{MLP}experts.down_proj", "missing"]),
    "stacked, another number of experts": (
        True, configure(num_experts=8, num_experts_per_tok=3), ["[8, 160, 192]", "not [6, 160, 192]"],
    ),
    "stacked, another width": (
        True, change(STACKED, lambda tensor: tensor[:, :158]), [STACKED, "[6, 160, 192]", "not [6, 158, 192]"],
    ),
    "stacked, transposed": (
        True, change(STACKED, lambda tensor: tensor.mT), [STACKED, "transposed", "[6, 192, 160]", "save_pretrained"],
    ),
    "stacked, transposed down": (
        True, change(f"{MLP}experts.down_proj", lambda tensor: tensor.mT), ["down_proj", "transposed", "[6, 80, 192]"],
    ),
    "stacked, two dimensions": (
        True, change(STACKED, lambda tensor: tensor.flatten(0, 1)), [STACKED, "[6, 160, 192]", "not [960, 192]"],
    ),
    "stacked and one for each": (True, add(f"{MLP}experts.0.gate_proj.weight"), ["experts.0.gate_proj", "not belong"]),
    "stacked, quantized": (True, stacked_fp8, ["quantization_config", STACKED, "a tensor for each expert"]),
    "fp8 without quantization_config": (
        True, change(STACKED, lambda tensor: tensor.to(torch.float8_e4m3fn)), [STACKED, "F8_E4M3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_invalid_experts_are_refused(case, written, tmp_path, monkeypatch):
    stacked, broken, words = BROKEN[case]
    path = shutil.copytree(written(FAMILY, stacked), tmp_path / "checkpoint")
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    broken(tensors, config)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoint, "_allocate", lambda *_: pytest.fail("memory was allocated before the check"))
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, load_config(path), "cpu", torch.float32)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    for word in words:
        assert word in message, message


def test_blocks_of_scales_across_heads_are_refused(tmp_path):
    """A block of 128 rows contains rows of several kinds if a head has 32 columns."""
    write_quantized(tmp_path, "fp8", ("lm_head",), "qwen3-next", {})
    with pytest.raises(CheckpointError, match="in_proj_qkvz.*blocks of 128 rows do not divide its runs of 32, 96 rows"):
        load_config(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    change_config(tmp_path, quantization_config=values | {"modules_to_not_convert": ["lm_head", "in_proj_qkvz"]})
    load_config(tmp_path)
