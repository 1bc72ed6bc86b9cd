"""Quantization while a checkpoint is loaded, and to a checkpoint that other programs read."""

import json
import shutil

import pytest
import torch
from checkpoints import write_tiny
from quantized import WIDTHS, write_quantized
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from util import relative_rms

from tridecode.checkpoint.custom_code import code_files
from tridecode.checkpoint.hub import BUNDLED
from tridecode.checkpoint.load import load_config, load_weights, random_weights
from tridecode.checkpoint.quantization.quantize import SCHEMES, fitted, quantize, rules
from tridecode.checkpoint.quantization.write import write
from tridecode.checkpoint.slices import tensor_slices, weight_bytes
from tridecode.cli.main import main
from tridecode.engine import Engine
from tridecode.errors import ParameterError
from tridecode.options import EngineOptions
from tridecode.plan import device

SCHEME_CASES = pytest.mark.parametrize("scheme, error", [("fp8", 0.03), ("int8", 0.007), ("int4", 0.11)])


@SCHEME_CASES
def test_quantization_error_is_small(scheme, error):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    found = quantize(weight, SCHEMES[scheme]).dequantize()
    assert 0 < relative_rms(found, weight) < error


def test_chosen_scale_is_no_worse_than_the_peak_scale():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    best = (quantize(weight, SCHEMES["int4"]).dequantize() - weight).square().sum()
    parts = weight.view(64, 2, 128)
    scale = (parts.abs().amax(2, keepdim=True) / 7).bfloat16().float()
    plain = ((parts / scale).round().clamp(-8, 7) * scale - parts).square().sum()
    assert best < 0.95 * plain


def test_zeros_stay_zero():
    for scheme in SCHEMES:
        assert not quantize(torch.zeros(4, 256), SCHEMES[scheme]).dequantize().any()


def test_groups_divide_the_columns():
    assert [fitted(SCHEMES["int4"], k).group for k in (256, 192, 96, 80)] == [128, 64, 32, 0]


@pytest.mark.parametrize(
    "scheme, family",
    [
        ("fp8", "qwen3"), ("int8", "qwen2"), ("int4", "qwen3-tied"), ("fp8", "qwen3.5"), ("int4", "qwen3.5"),
        ("fp8", "qwen2-moe"), ("int8", "qwen3-moe"), ("int4", "qwen3.5-moe"),
    ],
)  # fmt: skip
def test_loading_and_packing_agree(scheme, family, tmp_path):
    config = device.quantized(EngineOptions(quantize=scheme), load_config(write_tiny(tmp_path, family)))
    packed = load_weights(tmp_path, config, "cpu", torch.float32, packs=True)
    wide = load_weights(tmp_path, config, "cpu", torch.float32, packs=False)
    number_type = {"fp8": "e4m3"}.get(scheme, scheme)
    assert {linear.number_type for linear in packed.linears()} == {number_type, "e4m3"}
    assert {linear.number_type for linear in wide.linears()} == {"dense"}
    for ours, theirs in zip(packed.layers, wide.layers):
        for role in ours.linears:
            assert torch.equal(ours.linears[role].matrix(), theirs.linears[role].weight)
    assert torch.equal(packed.lm_head.matrix(), wide.lm_head.weight)
    assert not packed.tied


@SCHEME_CASES
def test_engine_quantizes_at_load(scheme, error, tmp_path):
    write_tiny(tmp_path, "qwen3", **WIDTHS)
    ids = [3, 40, 5, 106, 7]
    exact = Engine.load(tmp_path, device="cpu").score(ids)
    found = Engine.load(tmp_path, device="cpu", quantize=scheme).score(ids)
    assert 0 < relative_rms(found, exact) < 6 * error


def test_the_memory_plan_counts_packed_weights(tmp_path):
    config = device.quantized(EngineOptions(quantize="int4"), load_config(write_tiny(tmp_path, "qwen3")))
    weights = random_weights(config, "cpu", torch.bfloat16, packs=True)
    assert weights.nbytes() == weight_bytes(config, torch.bfloat16, packs=True)


def test_head_is_quantized_only_with_the_other_linears(tmp_path):
    with pytest.raises(ParameterError, match="^quantize_head: nothing is quantized; use it with quantize"):
        Engine.load(write_tiny(tmp_path, "qwen3"), device="cpu", quantize_head="int4")


def test_quantized_checkpoint_is_refused(tmp_path):
    write_quantized(tmp_path, "awq")
    with pytest.raises(ParameterError, match="quantize int4: the checkpoint is quantized already .awq."):
        Engine.load(tmp_path, device="cpu", quantize="int4")
    with pytest.raises(ParameterError, match="quantize must be fp8, int8 or int4"):
        Engine.load(tmp_path, device="cpu", quantize="int3")


@SCHEME_CASES
def test_written_checkpoint_matches_quantization_at_load(scheme, error, tmp_path):
    source, out = write_tiny(tmp_path / "source", "qwen3", shards=3), tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--to", scheme, "--head", "fp8", "--quiet"]) == 0
    config = device.quantized(EngineOptions(quantize=scheme), load_config(source))
    made = load_weights(source, config, "cpu", torch.float32, packs=True)
    read = load_weights(out, load_config(out), "cpu", torch.float32, packs=True)
    expected, found = made.tensors(), read.tensors()
    assert set(expected) == set(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert main(["quantize", str(source), str(out), "--quiet"]) == 1


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_written_hybrid_checkpoint_keeps_gates_and_convolutions(scheme, tmp_path):
    source, out = write_tiny(tmp_path / "source", "qwen3.5"), tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--to", scheme, "--quiet"]) == 0
    before = load_file(source / "model.safetensors")
    after = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    same = {name for name in before if name in after and after[name].dtype == before[name].dtype}
    kept = {name for name in same if torch.equal(after[name], before[name])}
    linears = {name for name in before if name.endswith(("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight"))}
    assert len(linears) == 2 * 4 + 2 * 3 + 4 * 3 and kept == before.keys() - linears
    assert {name for name in kept if "linear_attn.in_proj" in name}, "the projections a and b were quantized"
    ids = [3, 40, 5, 106, 7]
    made = Engine.load(source, device="cpu", quantize=scheme, quantize_head="keep").score(ids)
    assert torch.equal(Engine.load(out, device="cpu").score(ids), made)
    assert 0 < relative_rms(made, Engine.load(source, device="cpu").score(ids)) < 0.7


def stack_experts(path) -> None:
    """Store the weights of all experts of a layer in one tensor, as some published checkpoints do."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for owner in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        count = len({name for name in tensors if name.startswith(f"{owner}.experts.") and "down_proj" in name})
        parts = {
            part: torch.stack([tensors.pop(f"{owner}.experts.{expert}.{part}.weight") for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{owner}.experts.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), 1)
        tensors[f"{owner}.experts.down_proj"] = parts["down_proj"]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "scheme, family, listed, form",
    [
        ("int4", "qwen3-moe", True, "separate"), ("int4", "qwen3-moe", False, "stacked"),
        ("fp8", "qwen2-moe-equal", False, "separate"), ("int8", "qwen2-moe", True, "stacked"),
    ],
)  # fmt: skip
def test_written_experts_are_quantized_and_their_routers_are_not(scheme, family, listed, form, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("tridecode.checkpoint.quantization.write.MAX_LISTED", 10**6 if listed else 5)
    source, out = write_tiny(tmp_path / "source", family), tmp_path / "out"
    before = load_file(source / "model.safetensors")
    if form == "stacked":
        stack_experts(source)
    assert main(["quantize", str(source), str(out), "--to", scheme, "--quiet"]) == 0
    after = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    same = {name for name in before if name in after and after[name].dtype == before[name].dtype}
    kept = {name for name in same if torch.equal(after[name], before[name])}
    linears = {name for name in before if name.endswith("_proj.weight")}
    assert kept == before.keys() - linears and any(name.endswith("mlp.gate.weight") for name in kept)
    entry = json.loads((out / "config.json").read_text())["quantization_config"]
    targets = [target for group in entry["config_groups"].values() for target in group["targets"]]
    assert ("Linear" in targets) is not listed
    assert any("mlp.gate" in module for module in entry["ignore"]) is not listed

    ids = [3, 40, 5, 106, 7, 250, 33]
    made = Engine.load(source, device="cpu", quantize=scheme, quantize_head="keep").score(ids)
    assert torch.equal(Engine.load(out, device="cpu").score(ids), made)
    # transformers computes the same with the dequantized weights.
    config = load_config(out)
    weights, slices = load_weights(out, config, "cpu", torch.float32), tensor_slices(config)
    stored = weights.tensors()
    plain = {
        name: (stored[of.target] - of.offset)[of.start : of.start + of.shape[0]].clone() for name, of in slices.items()
    }
    save_file(plain, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        assert relative_rms(made, model(torch.tensor([ids])).logits[0]) < 1e-5


def test_invalid_checkpoint_is_refused_before_writing(tmp_path, capsys):
    source, out = write_tiny(tmp_path / "source", "qwen3"), tmp_path / "out"

    def refused() -> str:
        capsys.readouterr()
        assert main(["quantize", str(source), str(out), "--quiet"]) == 1 and not out.exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    (source / "other.safetensors").write_bytes(b"from another program")
    (source / "model.gguf").write_bytes(b"from another program")
    assert main(["quantize", str(source), str(out), "--quiet"]) == 0
    assert len({file.stat().st_mode for file in out.iterdir() if file.name.startswith("model")}) == 1
    assert not (out / "model.gguf").exists() and Engine.load(out, device="cpu").score([3, 40, 5]).isfinite().all()
    shutil.rmtree(out)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in refused()
    weights.unlink()
    assert "no model.safetensors and no model.safetensors.index.json" in refused()


def test_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    def full(*args, **options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("tridecode.checkpoint.shards.save_file", full)
    source = write_tiny(tmp_path / "source", "qwen3")
    assert main(["quantize", str(source), str(tmp_path / "out"), "--quiet"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "model-00001.safetensors: cannot be written" in error and "No space" in error and "traceback" not in error


def test_quantize_accepts_the_name_bundled(tmp_path, monkeypatch):
    monkeypatch.setattr("tridecode.cli.quantize.write", lambda source, *args: found.append(source))
    found = []
    assert main(["quantize", "bundled", str(tmp_path / "out"), "--quiet"]) == 0 and found == [BUNDLED]


def test_only_needed_files_are_copied(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    needed = {"LICENSE", "README.md", "NOTICE", "chat_template.jinja", "generation_config.json", "tokenizer.json",
              "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
              "tokenizer.model"}  # fmt: skip
    others = {"__init__.py", "modeling_x.py", "training.log", "pytorch_model.bin", "optimizer.pt", ".gitattributes"}
    for directory in (source, out):
        directory.mkdir()
    for name in needed | others | {"config.json"}:
        (source / name).write_text("{}")
    write(source, out, {}, rules("int4", "keep"), set())
    written = {"config.json", "model.safetensors.index.json"}
    assert {file.name for file in out.iterdir()} == needed | written


CODE = """
from transformers import Qwen3Config
from .numbers_x import SEVEN

class XConfig(Qwen3Config):
    model_type = "qwen3"
    seven = SEVEN
"""


@pytest.fixture
def with_code(tmp_path):
    """A checkpoint whose configuration class is in Python files, which must not run here."""
    source = write_tiny(tmp_path / "source", "qwen3")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}))
    (source / "configuration_x.py").write_text(CODE)
    (source / "numbers_x.py").write_text("SEVEN = 7")
    (source / "other_x.py").write_text("")
    return source


def test_named_python_files_are_copied(with_code, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    out = tmp_path / "out"
    assert main(["quantize", str(with_code), str(out), "--quiet"]) == 0
    assert {file.name for file in out.glob("*.py")} == {"configuration_x.py", "numbers_x.py"}
    assert (out / "configuration_x.py").read_text() == CODE
    assert transformers.AutoConfig.from_pretrained(out, trust_remote_code=True).seven == 7


def test_python_of_a_repository_is_referenced(with_code, tmp_path, monkeypatch):
    monkeypatch.setattr("tridecode.cli.quantize.resolve_model", lambda model: with_code)
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "tokenization_x.X"]}, "a": 1}
    (with_code / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    out = tmp_path / "out"
    assert main(["quantize", "owner/name", str(out), "--quiet"]) == 0
    assert not list(out.glob("*.py"))
    config, tokenizer = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "tokenizer_config"))
    assert config["auto_map"] == {"AutoConfig": "owner/name--configuration_x.XConfig"}
    assert tokenizer == {"auto_map": {"AutoTokenizer": [None, "owner/name--tokenization_x.X"]}, "a": 1}


@pytest.mark.parametrize("named", [5, ["a"], {"AutoModel": "../x.X"}, {"AutoModel": "o/n--m.X"}, {"AutoModel": None}])
def test_invalid_auto_map_copies_no_file(named, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "x.py").write_text("")
    (tmp_path / "source" / "m.py").write_text("")
    assert code_files(tmp_path / "source", {"auto_map": named}) == []


def test_transformers_reads_a_written_checkpoint(tmp_path):
    import transformers

    source, out = write_tiny(tmp_path / "source", "qwen3", **WIDTHS), tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--to", "int4", "--quiet"]) == 0
    ids = [3, 40, 5, 106, 7]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert relative_rms(Engine.load(out, device="cpu").score(ids), expected) < 1e-4
