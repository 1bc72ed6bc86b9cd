"""Adapters on the command line: chat, generate, settings, info and merge."""

import io
import json

import pytest
import torch
from checkpoints import write_tiny
from lora import merge, modules_of, random_matrices, write_lora
from safetensors.torch import load_file

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.load import load_config
from tridecode.cli.main import main

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = ["--device", "cpu", "--max-seq-len", "200", "--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint, two adapters for it, and the checkpoint with each of them merged."""
    path = tmp_path_factory.mktemp("cli")
    base = write_tiny(path / "base", "qwen3")
    modules = modules_of(base)
    matrices = [random_matrices(modules, seed=i, scale=0.5) for i in range(2)]
    for i, each in enumerate(matrices):
        write_lora(path / f"a{i}", each)
        merge(base, path / f"m{i}", each)
    return path


@pytest.fixture(scope="module")
def texts(files):
    """Answers to "Hello": of the base model, and with each adapter."""
    answers = []
    for name in ("base", "m0", "m1"):
        with Engine.load(files / name, device="cpu", max_seq_len=200) as engine:
            answers.append(engine.generate([{"role": "user", "content": "Hello"}], PARAMS).token_ids)
    assert len(set(answers)) == 3
    return answers


def test_the_bundled_adapter_answers_in_json(capsys):
    for question, answer in (("Which city is the capital of France?", "Paris"), ("What is 2 + 2?", "4"), ("Hi!", "")):
        code, out, err = run(
            capsys,
            "generate",
            "--device",
            "cpu",
            "--temperature",
            "0",
            "--adapter",
            "json=bundled",
            "--prompt",
            question,
        )
        assert code == 0, err
        assert [*json.loads(out)] == ["answer"] and answer in json.loads(out)["answer"]


def adapters(files) -> list[str]:
    return ["--adapter", f"one={files / 'a0'}", "--adapter", f"two={files / 'a1'}"]


def run(capsys, *args) -> tuple[int, str, str]:
    code = main([*map(str, args)])
    return code, *capsys.readouterr()


def test_generate_answers_with_the_first_adapter(files, texts, capsys):
    for names, expected in ((adapters(files), texts[1]), (adapters(files)[2:], texts[2]), ([], texts[0])):
        code, out, err = run(
            capsys, "generate", "--model", files / "base", *OPTIONS, *names, "--prompt", "Hello", "--json"
        )
        assert code == 0, err
        assert tuple(json.loads(out)["token_ids"]) == expected


def test_a_line_of_a_batch_names_its_adapter(files, texts, capsys, monkeypatch):
    lines = [{"messages": [{"role": "user", "content": "Hello"}]} | more for more in (
        {}, {"adapter": "two"}, {"adapter": "one"}, {"adapter": "three"})]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(json.dumps, lines)).encode())))
    code, out, _ = run(
        capsys, "generate", "--model", files / "base", *OPTIONS, *adapters(files), "--jsonl", "-", "--slots", "2"
    )
    *answers, last = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and [tuple(each["token_ids"]) for each in answers] == [texts[1], texts[2], texts[1]]
    assert "three" in last["error"] and "one, two" in last["error"]


def test_the_chat_selects_adapters(files, texts, capsys, monkeypatch):
    inputs = ["/adapter", "Hello", "/clear", "/adapter two", "Hello", "/clear", "/adapter -", "Hello", "/adapter none"]
    inputs += ["/stats"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(inputs) + "\n"))
    code, out, err = run(capsys, "chat", "--model", files / "base", *OPTIONS, *adapters(files))
    with Engine.load(files / "base", device="cpu", max_seq_len=200) as engine:
        decoded = [engine.tokenizer.decode(list(ids)) for ids in texts]
    answers = [decoded[1], decoded[2], decoded[0]]
    positions = [out.find(answer.strip()[:10]) for answer in answers]
    assert -1 not in positions and positions == sorted(positions), out
    assert "adapter one; also loaded: two" in err and "adapter two; also loaded: one" in err
    assert "there is no adapter 'none'; the loaded ones are one, two" in err and code == 0


def test_the_chat_without_adapters_names_the_option(files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("/adapter\n/help\n"))
    _, out, err = run(capsys, "chat", "--model", files / "base", *OPTIONS)
    assert "--adapter NAME=PATH" in err and "/adapter" not in out


def test_another_model_of_the_chat_has_no_adapters(files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/model {files / 'm1'}\n/adapter\n"))
    _, _, err = run(capsys, "chat", "--model", files / "base", *OPTIONS, *adapters(files))
    assert "no adapter is loaded" in err


@pytest.mark.parametrize(
    "option, word",
    [
        ("one", "NAME=PATH"),
        ("=x", "letters"),
        ("a b=x", "letters"),
        ("one=", "directory"),
        ("one=/no/such", "/no/such"),
    ],
)
def test_wrong_adapters_are_one_line(files, capsys, option, word):
    try:
        code = main(["generate", "--model", str(files / "base"), *OPTIONS, "--adapter", option, "--prompt", "x"])
    except SystemExit as exit:
        code = exit.code
    err = capsys.readouterr().err
    assert code in (1, 2) and word in err and err.count("\n") == 1, err


def test_settings_name_adapters(files, capsys, monkeypatch, tmp_path):
    (tmp_path / "tridecode").mkdir()
    config = tmp_path / "tridecode" / "config.toml"
    config.write_text(f'adapters = {{ one = "{files / "a0"}", two = "{files / "a1"}" }}\nmax_rank = 32\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    code, out, err = run(capsys, "config")
    assert code == 0 and f'adapters = {{"one" = "{files / "a0"}"' in out, err
    monkeypatch.setenv("TRIDECODE_ADAPTERS", f"three={files / 'a0'}")
    assert '"three"' in run(capsys, "config")[1]


def test_info_counts_the_memory_of_adapters(files, capsys):
    code, out, err = run(capsys, "info", "--model", files / "base", "--device", "cpu", *adapters(files), "--json")
    assert code == 0, err
    assert "adapters" in out
    pools = json.loads(out)["memory"] if "memory" in json.loads(out) else json.loads(out)
    assert "adapters" in json.dumps(pools)


def test_merge_writes_the_sum(files, capsys, tmp_path):
    code, _, err = run(capsys, "merge", files / "base", tmp_path / "out", "--adapter", files / "a0")
    assert code == 0, err
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(files / "m0" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert load_config(tmp_path / "out") == load_config(files / "base")
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "qwen3-next"])
def test_merge_keeps_the_dtype(family, capsys, tmp_path):
    base = write_tiny(tmp_path / "base", family, dtype=torch.bfloat16)
    write_lora(tmp_path / "a", matrices := random_matrices(modules_of(base)))
    assert run(capsys, "merge", base, tmp_path / "out", "--adapter", tmp_path / "a")[0] == 0
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    expected = load_file(merge(base, tmp_path / "expected", matrices) / "model.safetensors")
    assert found.keys() == expected.keys() and {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name, tensor in expected.items():  # Sums are rounded to the nearest number in both.
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if ".experts." in name)
    assert load_config(tmp_path / "out").has_experts == (family != "llama")


@pytest.mark.parametrize("fault", ["no_adapter", "not_empty", "quantized"])
def test_merge_refuses_what_it_cannot_write(files, capsys, tmp_path, fault):
    model, out, adapter = files / "base", tmp_path / "out", files / "a0"
    if fault == "no_adapter":
        adapter = tmp_path
    elif fault == "not_empty":
        out = files
    else:
        assert run(capsys, "quantize", model, tmp_path / "int8", "--to", "int8")[0] == 0
        model = tmp_path / "int8"
    code, _, err = run(capsys, "merge", model, out, "--adapter", adapter)
    assert code == 1 and err.count("\n") == 1 and err.startswith("tridecode: error: "), err


def test_clients_load_adapters_only_with_an_api_key(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRIDECODE_API_KEY", raising=False)
    options = "--adapter-root", tmp_path, "--adapter-memory", "0.1"
    with pytest.raises(SystemExit) as exit:
        run(capsys, "serve", *options)
    assert exit.value.code == 2 and "--adapter-root needs an API key" in capsys.readouterr().err
