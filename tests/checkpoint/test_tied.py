"""Tied embeddings whose files disagree with config.json: the model is the one that transformers builds."""

import json
import shutil

import pytest
import torch
from checkpoints import write_tiny
from safetensors.torch import load_file, save_file
from util import relative_rms

from tridecode import Engine
from tridecode.checkpoint.load import load_config, load_weights

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return {family: write_tiny(tmp_path_factory.mktemp(family), family) for family in ("qwen3-tied", "qwen3.5-g3")}


def other_values(tensors):
    tensors[HEAD] = tensors[EMBED] * 1.5


def one_other_row(tensors):
    tensors[HEAD] = tensors[EMBED].clone()
    tensors[HEAD][-1] += 1


def equal_values(tensors):
    tensors[HEAD] = tensors[EMBED].clone()


def equal_in_the_dtype(tensors):
    tensors[HEAD] = tensors[EMBED].bfloat16()
    tensors[EMBED] = tensors[HEAD].float() * (1 + 1e-5)  # Rounded to bf16, it is the LM head.


def head_alone(tensors):
    tensors[HEAD] = tensors.pop(EMBED)


CHANGES = {  # change: whether embedding and LM head are one matrix
    other_values: False, one_other_row: False, equal_values: True, head_alone: True,
}  # fmt: skip


def changed(source, path, change, **config):
    """Copy a checkpoint with changed tensors and keys of config.json."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    return path


def reference_logits(path, ids):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3.5-g3"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_head_of_the_files(change, family, written, tmp_path, caplog):
    path, ids = changed(written[family], tmp_path / "changed", change), list(range(3, 40))
    with Engine.load(path, device="cpu", dtype="float32") as engine:
        assert engine.config.tie_word_embeddings == CHANGES[change]
        assert relative_rms(engine.score(ids), reference_logits(path, ids)) < 1e-5
    lines = [r.message for r in caplog.records if HEAD in r.message and r.name == "tridecode"]
    assert len(lines) == (0 if CHANGES[change] else 1)


def test_values_are_compared_in_the_dtype_of_the_model(written, tmp_path):
    path = changed(written["qwen3-tied"], tmp_path / "changed", equal_in_the_dtype, dtype="bfloat16")
    assert load_config(path).tie_word_embeddings


def test_changed_files_are_compared_again(written, tmp_path):
    path = changed(written["qwen3-tied"], tmp_path / "changed", equal_values)
    assert load_config(path).tie_word_embeddings
    tensors = load_file(path / "model.safetensors")
    other_values(tensors)
    save_file(tensors, path / "model.safetensors")
    assert not load_config(path).tie_word_embeddings


@pytest.mark.parametrize("change", [other_values, head_alone], ids=lambda change: change.__name__)
@pytest.mark.parametrize("head", ["keep", "int8"])
def test_quantized_copy_has_the_same_head(change, head, written, tmp_path):
    from tridecode.cli.main import main

    path, out = changed(written["qwen3-tied"], tmp_path / "changed", change), tmp_path / "out"
    command = ["quantize", str(path), str(out), "--to", "int8", "--head", head]
    if change is head_alone and head == "int8":  # As for every tied embedding.
        assert main(command) != 0
        return
    assert main(command) == 0
    spec, source = load_config(out), load_file(path / "model.safetensors")
    assert spec.tie_word_embeddings == CHANGES[change]
    weights = load_weights(out, spec, "cpu", torch.float32)
    assert relative_rms(weights.lm_head.weight, source[HEAD]) < (1e-2 if head == "int8" else 1e-7)
