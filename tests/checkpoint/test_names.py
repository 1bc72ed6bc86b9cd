"""Names of models, and files and directories of other formats: each works, or is refused in one line with advice."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import write_tiny

from tridecode.checkpoint.hub import BUNDLED, resolve_model
from tridecode.checkpoint.load import load_config, load_weights
from tridecode.checkpoint.names import model_name, repository
from tridecode.errors import CheckpointError
from tridecode.text.tokenizer import Tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SITE = "https://huggingface.co/"


def refusal(action, *args) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*args)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


NAMES = {
    "Qwen/Qwen3-4B": ("Qwen/Qwen3-4B", None),
    "Qwen/Qwen3-4B@v1.0": ("Qwen/Qwen3-4B", "v1.0"),
    "Qwen/Qwen3-4B@refs/pr/3": ("Qwen/Qwen3-4B", "refs/pr/3"),
    f"Qwen/Qwen3-4B@{COMMIT}": ("Qwen/Qwen3-4B", COMMIT),
    "models--Qwen--Qwen3-4B": ("Qwen/Qwen3-4B", None),
    SITE + "Qwen/Qwen3-4B": ("Qwen/Qwen3-4B", None),
    SITE + "Qwen/Qwen3-4B/": ("Qwen/Qwen3-4B", None),
    SITE + "Qwen/Qwen3-4B/tree/main": ("Qwen/Qwen3-4B", None),
    SITE + "Qwen/Qwen3-4B/tree/v1.0": ("Qwen/Qwen3-4B", "v1.0"),
    SITE + "Qwen/Qwen3-4B/tree/refs%2Fpr%2F3": ("Qwen/Qwen3-4B", "refs/pr/3"),
    SITE + f"Qwen/Qwen3-4B/commit/{COMMIT}": ("Qwen/Qwen3-4B", COMMIT),
    SITE + "Qwen/Qwen3-4B/blob/main/config.json": ("Qwen/Qwen3-4B", None),
    SITE + "Qwen/Qwen3-4B/resolve/v1.0/model.safetensors?download=true": ("Qwen/Qwen3-4B", "v1.0"),
    SITE + "Qwen/Qwen3-4B/discussions/7#x": ("Qwen/Qwen3-4B", None),
    "http://www.huggingface.co/Qwen/Qwen3-4B": ("Qwen/Qwen3-4B", None),
    "huggingface.co/Qwen/Qwen3-4B?library=vllm": ("Qwen/Qwen3-4B", None),
    "hf.co/Qwen/Qwen3-4B": ("Qwen/Qwen3-4B", None),
    "hf://Qwen/Qwen3-4B@v1.0": ("Qwen/Qwen3-4B", "v1.0"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_repository(name):
    id, revision = NAMES[name]
    assert repository(name) == (id, revision, None)
    assert model_name(name) == (f"{id}@{revision}" if revision else id)


@pytest.mark.parametrize(
    "name, expected",
    {
        "a/b-GGUF:Q4_K_M": ("a/b-GGUF", None, "Q4_K_M"),
        "a/b:q8_0": ("a/b", None, "q8_0"),
        "a/b@v1:UD-Q4_K_XL": ("a/b", "v1", "UD-Q4_K_XL"),
        "a/b:b-Q4_0.gguf": ("a/b", None, "b-Q4_0.gguf"),
        "a/b:BF16/b-00001-of-00002.gguf": ("a/b", None, "BF16/b-00001-of-00002.gguf"),
        "hf.co/a/b:Q4_K_M": ("a/b", None, "Q4_K_M"),
        SITE + "a/b-GGUF/blob/main/b-Q4_K_M.gguf": ("a/b-GGUF", None, "b-Q4_K_M.gguf"),
        SITE + "a/b/resolve/v2/IQ4_NL/b.gguf": ("a/b", "v2", "IQ4_NL/b.gguf"),
    }.items(),
)
def test_names_of_gguf_files(name, expected):
    assert repository(name) == expected


def test_address_on_a_mirror(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hf-mirror.com")
    assert repository("https://hf-mirror.com/Qwen/Qwen3-4B/tree/main") == ("Qwen/Qwen3-4B", None, None)


@pytest.mark.parametrize(
    "name",
    [None, "bundled", "nothing", "a/b/c", "a/b@", "a/b@../c", "a/b@c@d", "hello world", "a/b:latest", "a/b.gguf"],
)
def test_no_repository(name):
    assert repository(name) is None


REFUSED = {
    SITE: "not the address of a model",
    SITE + "gpt2": "not the address of a model",
    SITE + "datasets/owner/name": "not the address of a model",
    SITE + "spaces/owner/name": "not the address of a model",
    SITE + "a/b/tree/main/sub/dir": "hf download a/b --include 'sub/dir/*'",
    SITE + "a/b/tree/..": "give a/b@REVISION",
    "https://github.com/owner/name": "not an address on https://huggingface.co",
    "ftp://huggingface.co/a/b": "not an address on https://huggingface.co",
    "a/b:latest": "names of models have no such tags here",
    "model.gguf": "no such file",
    "some/dir/Model.GGUF": "no such file",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_names(name):
    message = refusal(resolve_model, name)
    assert message.startswith(f"{name}: ") and REFUSED[name] in message


@pytest.mark.parametrize("name", ["owner/name@v1", "https:/huggingface.co/a"])
def test_a_directory_has_precedence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    assert resolve_model(name) == Path(name) and repository(name) is None and model_name(name) == name


# ---- files


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("written"), "llama", num_hidden_layers=1, shards=2)


@pytest.fixture
def copy(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "copy"))


def load(path: Path) -> None:
    """All files of a checkpoint, as an engine reads them."""
    spec = load_config(path)
    Tokenizer.load(path)
    load_weights(path, spec, "cpu", torch.float32)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 5\n" % (b"0" * 64)
IMPOSTORS = {
    "pointer": (POINTER, "git-lfs pointer, not the file; install git-lfs, run `git lfs pull` in "),
    "web page": (b"<!DOCTYPE html>\n<html class=''>", "is a web page, not the file"),
    "gguf": (b"GGUF\x03\x00\x00\x00", "is a GGUF file; give its own path as the model"),
    "pickle": (b"PK\x03\x04\x00\x00", "is a PyTorch or zip file"),
}
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json", "model-00001-*.safetensors", "model-00002-*.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_git_lfs_pointer_in_place_of_a_file(name, copy):
    file = next(copy.glob(name), copy / name)
    file.write_bytes(POINTER)
    assert refusal(load, copy).startswith(f"{file}: is a {IMPOSTORS['pointer'][1]}{copy}")


@pytest.mark.parametrize("kind", IMPOSTORS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-*.safetensors"])
def test_other_content_in_place_of_a_file(name, kind, copy):
    content, words = IMPOSTORS[kind]
    file = next(copy.glob(name))
    file.write_bytes(content + bytes(100))
    message = refusal(load, copy)
    assert message.startswith(f"{file}: ") and words in message


@pytest.mark.parametrize("content, words", [IMPOSTORS[name] for name in ("pointer", "web page", "pickle")])
def test_file_of_another_kind_as_model(content, words, tmp_path):
    file = tmp_path / "sha256-0123"  # A blob of ollama has no extension.
    file.write_bytes(content)
    assert words in refusal(resolve_model, file)


def test_file_of_a_checkpoint_names_its_directory(copy):
    assert f"give {copy}, the directory" in refusal(resolve_model, str(copy / "config.json"))


# ---- directories

ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-4B"})
CONTENTS = {
    # file: (content, words)
    "adapter_config.json": (ADAPTER, ["a LoRA adapter of 'Qwen/Qwen3-4B'", "--adapter NAME=PATH"]),
    "pytorch_model-00001-of-00002.bin": ("", ["save_pretrained"]),
    "consolidated.00.pth": ("", ["Hugging Face's format"]),
    "consolidated.safetensors": ("", ["Mistral's own format"]),
    "model_index.json": ("{}", ["diffusers"]),
    "checkpoint-500/config.json": ("{}", ["give a directory in it, like ", "checkpoint-500"]),
    "README.md": ("", ["give the directory of a"]),
}


@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("file", CONTENTS)
def test_directory_of_another_format(file, with_config, written, tmp_path):
    content, words = CONTENTS[file]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    if with_config:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(written / name, tmp_path / name)
    message = refusal(load, resolve_model(tmp_path))
    assert message.startswith(f"{tmp_path}: no {'model.safetensors' if with_config else 'config.json'}")
    assert all(word in message for word in words), message


def test_broken_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(POINTER)
    assert refusal(load, tmp_path).startswith(f"{tmp_path / 'adapter_config.json'}: is a git-lfs pointer")


def test_adapter_next_to_a_model_is_reported(copy, caplog):
    (copy / "adapter_config.json").write_text(ADAPTER)
    load(copy)
    assert ["a LoRA adapter of 'Qwen/Qwen3-4B', which is not used" in r.message for r in caplog.records] == [True]


def cached(root: Path, written: Path, *commits: str) -> Path:
    """Return a repository in the cache of Hugging Face, with a snapshot for each commit."""
    repo = root / "models--owner--name"
    for commit in commits:
        shutil.copytree(written, repo / "snapshots" / commit)
    return repo


def test_directory_of_the_cache(written, tmp_path):
    repo, other = cached(tmp_path, written, COMMIT), COMMIT[::-1]
    assert resolve_model(repo) == resolve_model(str(repo)) == repo / "snapshots" / COMMIT
    load(resolve_model(repo))
    assert model_name(str(repo)) == str(repo) and resolve_model(repo / "snapshots" / COMMIT).name == COMMIT
    shutil.copytree(written, repo / "snapshots" / other)
    message = refusal(resolve_model, repo)
    assert "holds 2 snapshots; give one of them, like " in message and str(repo / "snapshots") in message
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(other)
    assert resolve_model(repo).name == other
    assert "give a directory in it" in refusal(load, repo / "snapshots")


def test_incomplete_copy_in_the_cache(written, tmp_path):
    repo = cached(tmp_path, written, COMMIT)
    for file in (repo / "snapshots" / COMMIT).glob("model*"):
        file.unlink()
    assert "give the id owner/name, which downloads the rest" in refusal(load, resolve_model(repo))


def test_name_of_the_bundled_model():
    assert model_name(None) == model_name("bundled") == "bundled" and resolve_model("bundled") == BUNDLED
