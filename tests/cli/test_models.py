"""Tests of the command models, which lists, downloads and removes models of the Hugging Face cache."""

import json
import re
import shutil

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tridecode.checkpoint.names import quantization
from tridecode.cli import models
from tridecode.errors import CheckpointError


@pytest.fixture
def cache(tmp_path, monkeypatch, tiny):
    """A cache with a model, a GGUF file, a data set and an incomplete download; returns its directory."""
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub))

    def add(folder, *files, commit="0" * 40):
        snapshot = hub / folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (hub / folder / "refs").mkdir()
        (hub / folder / "refs" / "main").write_text(commit)
        for source in files:
            shutil.copy(source, snapshot)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "q4.gguf").write_bytes(b"GGUF" * 100)
    add("models--Org--Tiny", *(file for file in tiny.iterdir()))
    add("models--org--quantized", tmp_path / "q4.gguf", commit="1" * 40)
    add("models--org--half", tiny / "config.json", commit="2" * 40)
    add("datasets--org--texts", tmp_path / "q4.gguf", commit="3" * 40)
    return hub


def rows(run, *argv):
    code, out, err = run("models", *argv)
    assert code == 0
    return {line.split()[0]: line for line in out.splitlines()}, err


def test_list_shows_size_and_kind(run, cache):
    shown, err = rows(run)
    assert [*shown] == ["bundled", "org/half", "org/quantized:q4", "org/texts", "Org/Tiny", "q4.gguf"] and str(
        cache
    ) in err
    assert shown["bundled"].endswith("qwen3, bfloat16, part of the program") and " MB " in shown["bundled"]
    assert " MB  qwen3" in shown["Org/Tiny"] and "no complete" not in shown["Org/Tiny"]
    assert shown["org/quantized:q4"].endswith("400 bytes  GGUF") and shown["q4.gguf"].endswith("400 bytes  GGUF")
    assert "no complete weights" in shown["org/half"] and shown["org/texts"].endswith("dataset, not a model")
    assert rows(run, "list") == (shown, err)
    assert (
        run("models", "--names")[:2]
        == run("models", "list", "--names")[:2]
        == (0, "bundled\norg/quantized:q4\nOrg/Tiny\nq4.gguf\n")
    )
    found = [json.loads(line) for line in run("models", "--json")[1].splitlines()]
    assert [each["name"] for each in found if each["usable"]] == [
        "bundled", "org/quantized:q4", "Org/Tiny", "q4.gguf",
    ]  # fmt: skip
    assert found[2]["bytes"] == 400 and found[2]["path"].endswith("1" * 40 + "/q4.gguf")


def test_models_with_experts_are_described(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 128, "dtype": "bfloat16"}))
    assert models.described(tmp_path) == "qwen3_moe, 128 experts, bfloat16"
    config.write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": {"num_experts": 256}}))
    assert models.described(tmp_path) == "qwen3_5_moe, 256 experts"
    config.write_text(json.dumps({"model_type": "qwen3", "num_experts": "many"}))
    assert models.described(tmp_path) == "qwen3"


@pytest.mark.parametrize(
    "file, tag",
    {
        "Qwen3-4B-Q4_K_M.gguf": "Q4_K_M",
        "Llama-3.1-8B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
        "m.IQ4_NL.gguf": "IQ4_NL",
        "m-BF16-00001-of-00002.gguf": "BF16",
        "q8_0.gguf": "q8_0",
        "model.gguf": "",
        "Q4_K_M-model.gguf": "",
    }.items(),
)
def test_quantization_in_the_name_of_a_file(file, tag):
    assert quantization(file) == tag


def test_empty_cache_lists_the_bundled_model(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "none"))
    assert [*rows(run)[0]] == ["bundled"]
    assert run("models", "remove", "a/b")[0] == 1


def test_remove_is_all_or_none(run, cache):
    code, _, err = run("models", "remove", "org/half", "org/haf")
    assert code == 1 and "org/haf: there is no such model" in err and "did you mean org/half?" in err
    assert "org/half" in rows(run)[0] and "cannot be removed" in run("models", "remove", "bundled")[2]
    code, out, err = run("models", "rm", "org/half", "Org/Tiny")
    assert (code, out) == (0, "") and re.fullmatch(r"removed org/half, Org/Tiny, [\d.]+ [kM]B\n", err)
    assert [*rows(run)[0]] == ["bundled", "org/quantized:q4", "org/texts", "q4.gguf"]
    assert not (cache / "models--Org--Tiny").exists()


def test_remove_takes_the_address_of_a_page(run, cache):
    assert run("models", "rm", "https://huggingface.co/org/half")[::2] == (0, "removed org/half, 828 bytes\n")
    code, _, err = run("models", "rm", "org/quantized@v1")
    assert code == 1 and "there is no such model" in err and "org/quantized:q4" in rows(run)[0]
    assert "models remove org/quantized" in run("models", "rm", "org/quantized:q4")[2]
    assert "Hugging Face id, like" in run("models", "rm", "--help")[1]


@pytest.mark.parametrize(
    "typed, words",
    {
        "tiny": "did you mean Org/Tiny?",
        "tinny": "did you mean Org/Tiny?",
        "tiny:latest": "names of models have no such tags here; give a Hugging Face id, like Qwen/Qwen3-4B; did you "
        "mean Org/Tiny?",
        "org/tinny": "did you mean Org/Tiny?",
        "other/Tiny": "did you mean Org/Tiny?",
        "org/tiny:7b": "names of models have no such tags here; give a Hugging Face id, like org/tiny",
        "zebra": "check the spelling",
    }.items(),
)
def test_unknown_name_suggests_a_cached_model(run, cache, monkeypatch, typed, words):
    def offline(*_, **__):
        raise LocalEntryNotFoundError("no")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    code, _, err = run("info", "--model", typed)
    assert code == 1 and err.endswith(f"{words}\n") and err.count("\n") == 1
    assert words.split("; ")[-1] in run("run", typed)[2]
    if "/" not in typed and ":" not in typed and "?" in words:
        assert words in run("models", "rm", typed)[2]


def test_download_resolves_each_name(run, monkeypatch, tmp_path):
    def resolve(name):
        if name == "a/c":
            raise CheckpointError("a/c: no network")
        return tmp_path / name

    monkeypatch.setattr(models, "resolve_model", resolve)
    assert run("models", "download", "a/b") == (0, "", f"a/b is in {tmp_path}/a/b\n")
    assert run("models", "pull", "a/b", "a/c")[::2] == (
        1,
        f"a/b is in {tmp_path}/a/b\ntridecode: error: a/c: no network\n",
    )


@pytest.mark.parametrize("width, lines", [(None, 1), (80, 1), (40, 2), (20, 2)])
def test_line_of_a_model_fits_the_window(width, lines):
    model = models.Cached("org/" + "x" * 30, 15_000_000, "qwen3, bfloat16, gptq", True, "")
    found = models.rows(model, 34, width)
    assert len(found) == lines and max(map(len, found)) <= (width or 100)
    assert width == 20 or "qwen3, bfloat16, gptq" in found[-1]
