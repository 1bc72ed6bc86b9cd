"""Tests of invalid input: one clear line on stderr, a nonzero exit code and no traceback."""

import io
import json
import re
import shutil

import pytest
import torch
from checkpoints import VOCAB_SIZE, write_tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("bad") / "llama", "llama")


@pytest.fixture
def copy(good, tmp_path):
    """A copy of the checkpoint, which the test damages."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in good.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture
def failure(run):
    """Run the program, check that it writes one line to stderr and nothing to stdout, and return that line."""

    def failure(*argv, code=1):
        found, out, err = run(*argv)
        assert found == code, err
        assert out == "" and err.count("\n") == 1 and err.startswith("tridecode: error: "), (out, err)
        return err

    return failure


def edit(file, **values):
    settings = json.loads(file.read_text()) | values
    file.write_text(json.dumps(settings))


def cut(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def transpose(path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, path / "model.safetensors")


def drop_template(path):
    from checkpoints import write_tokenizer

    write_tokenizer(path, chat_template=None)


HUGE = dict(hidden_size=2**20, intermediate_size=2**20, num_hidden_layers=1000)
SPOILED = {
    "absent": (shutil.rmtree, ("no such directory",)),
    "empty": (lambda path: [file.unlink() for file in path.iterdir()], ("no config.json",)),
    "truncated weights": (cut, ("model.safetensors", "truncated")),
    "a matrix of another shape": (transpose, ("model.layers.1.mlp.down_proj.weight", "240", "432")),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), ("config.json",)),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "no template": (drop_template, ("--raw",)),
    "too large": (lambda path: edit(path / "config.json", **HUGE), ("not enough memory", "GiB")),
    "another architecture": (
        lambda path: edit(path / "config.json", architectures=["MambaForCausalLM"]),
        ("MambaForCausalLM", "LlamaForCausalLM"),
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_damaged_checkpoint(failure, copy, case):
    spoil, words = SPOILED[case]
    spoil(copy)
    line = failure("generate", "--prompt", "x", "--model", copy, "--device", "cpu")
    assert all(word in line for word in words)
    if case in ("absent", "no JSON", "another architecture"):
        for command in ("chat", "info"):
            line = failure(command, "--model", copy)
            assert all(word in line for word in words)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--backend", "foo"),
        ("--graph", "half"),
        ("--dtype", "int3"),
        ("--device", "tpu"),
        ("--device", "cpu:1"),
        ("--temperature", "abc"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-k", "1.5"),
        ("--top-p", "0"),
        ("--min-p", "2"),
        ("--max-seq-len", "many"),
        ("--max-seq-len", "-1"),
        ("--max-tokens", "0"),
        ("--seed", str(2**70)),
        ("--logit-bias", "5=1e400"),
        ("--logit-bias", "5"),
        ("--stop", ""),
        ("--stop-token-ids", "x"),
        ("--prompt-ids", "1,x"),
        ("--n", "0"),
        ("--kv-ring", "-1"),
        ("--prompt-ms", "soon"),
        ("--graph-sizes", "2,1"),
        ("--speculate-ngram", "2:3"),
    ],
)
def test_wrong_value(failure, good, monkeypatch, option, value):
    # The program must check the argument before it loads weights.
    monkeypatch.setattr("tridecode.engine.load_weights", None)
    line = failure("generate", "--model", good, option, value, code=2)
    assert f"argument {option}: " in line and repr(value) in line and "tridecode generate --help" in line


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("--devise", "--device"),
        ("--nope", ""),
        ("--sampling", ""),
        ("--maxtokens", "--max-tokens"),
        ("--topp", "--top-p"),
        ("--tempersture", "--temperature"),
        ("--max", "--max-seq-len or --max-rank or --max-queue"),
        ("--ouput", "--output"),
        ("--sead", "--seed"),
    ],
)
def test_only_a_near_option_is_suggested(failure, typed, meant):
    for command in ("generate", "chat", "info") if typed == "--devise" else ("generate",):
        line = failure(command, typed, code=2)
        assert line == (
            f"tridecode: error: unrecognized arguments: {typed}{f'; did you mean {meant}?' if meant else ''} "
            f"(see tridecode {command} --help)\n"
        )


@pytest.mark.parametrize(
    "argv, named",
    [
        (("genrate", "hi"), "there is no command genrate; did you mean generate?"),
        (("Chat",), "there is no command Chat; did you mean chat?"),
        (("hcat", "--device", "cpu"), "did you mean chat?"),
        (("hepl",), "did you mean --help?"),
        (("chat", "Qwen/Qwen3-4B"), "did you mean --model Qwen/Qwen3-4B?"),
        (("Qwen/Qwen3-4B",), "did you mean --model Qwen/Qwen3-4B?"),
        (("serve", "./model"), "unrecognized arguments: ./model; did you mean --model ./model?"),
        (("info", "bundled"), "did you mean --model bundled?"),
        (("info", "a/b", "c"), "unrecognized arguments: a/b c (see"),
        (("generate", "hi", "--nope"), "unrecognized arguments: --nope (see"),
        (("generate", "--prompt", "explain", "this"), "one is 'this'; put a prompt of several words in quotes"),
        (("generate", "--prompt-ids", "1,2", "3"), "there are two prompts, one is '3'"),
        (("chat", ""), "the question is empty"),
        (("generate", " "), "the question is empty"),
        (("--verison",), "--verison"),
        (("info", "x\x1b[2J"), "x␛[2J"),
    ],
)
def test_invalid_questions(failure, argv, named):
    line = failure(*argv, code=2)
    assert named in line and "\x1b" not in line


@pytest.mark.parametrize(
    "option, digits",
    [
        ("--seed", 5000),  # Python refuses to read a number with this many digits.
        ("--seed", 4000),
        ("--stop-token-ids", 4000),
        ("--n", 20),
    ],
)
def test_long_number_is_shortened_in_the_message(failure, option, digits):
    line = failure("generate", "--device", "cpu", "--prompt", "x", option, "9" * digits, code=2)
    assert option in line and "99" in line and len(line) < 500


@pytest.mark.parametrize(
    "options, fix",
    [
        (("--quantize-head", "keep"), "use it with --quantize int4"),
        (("--speculate", "off", "--speculate-ngram", "4:2"), "is drafted with --speculate off; leave one of them out"),
        (("--speculate-ngram", "4:2", "--kv-dtype", "fp8"), "--speculate-ngram does not work beside --kv-dtype fp8"),
        (("--speculate", "ngram", "--kv-dtype", "fp8"), "--speculate ngram does not work beside --kv-dtype fp8"),
        (("--speculate", "ngram", "--weights-offload", "1"), "does not work beside --weights-offload; use --speculate"),
        (
            ("--batch-invariant", "--chunk-tokens", "100"),
            "--chunk-tokens must be a multiple of 64 with --batch-invariant",
        ),
        (("--kv-ring", "2"), "use it with --kv-offload"),
        (("--max-seq-len", "100000"), "--max-seq-len must be an integer from 1 to the model's limit of 512"),
        (("--device", "cuda:999"), "cuda:999"),
        (("--prompt-graph-sizes", "16", "--no-prompt-graphs"), "captured with --graph full_decode_only; leave one"),
        (
            ("--prompt-graph-sizes", "16", "--prompt-graph-max-tokens", "2048"),
            "cannot be used with --prompt-graph-max-tokens",
        ),
    ],
)
def test_engine_options_with_missing_or_contradicting_options(failure, good, options, fix):
    assert fix in failure("generate", "--prompt", "x", "--model", good, *options)


def test_prompt_longer_than_the_context(failure, good):
    line = failure("generate", "--model", good, "--device", "cpu", "--max-seq-len", "16", "--prompt", "word " * 5)
    assert "the context holds 16: shorten it or raise --max-seq-len" in line
    line = failure("generate", "--model", good, "--device", "cpu", "--max-seq-len", "16", "--prompt", "word " * 4000)
    assert "tokens or more, the context holds 16: shorten it or raise --max-seq-len" in line
    ids = ",".join(["7"] * 600)
    assert "600" in failure("generate", "--model", good, "--device", "cpu", "--prompt-ids", ids, "--json")


def test_empty_prompt(failure, good, monkeypatch):
    for argv in (["--prompt", ""], ["--prompt", " \n"], ["--prompt", "", "--raw"], ["--prompt-ids", ""]):
        assert "empty" in failure("generate", "--model", good, "--device", "cpu", *argv)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "empty" in failure("generate", "--model", good, "--json")
    monkeypatch.setattr("sys.stdin", None)  # Some service managers start programs with a closed stdin.
    assert "empty" in failure("generate", "--model", good)


def test_token_id_outside_the_vocabulary(failure, good):
    for token in (VOCAB_SIZE, -1, 10**30):
        line = failure("generate", "--model", good, "--device", "cpu", f"--prompt-ids=5,{token}")
        assert str(token) in line and f"0 to {VOCAB_SIZE - 1}" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test needs a machine without a GPU")
@pytest.mark.parametrize("options", [("--device", "cuda"), ("--device", "cuda:3"), ("--backend", "triton")])
def test_missing_gpu_is_refused(failure, good, options):
    assert "GPU" in failure("generate", "--prompt", "x", "--model", good, *options)
    assert re.search("; use --(device cpu|backend torch)$", failure("generate", "--prompt", "x", *options))
    assert "GPU" in failure("info", "--model", good, *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test needs a machine without a GPU")
def test_bench_without_a_gpu(failure):
    for command in (("bench", "decode"), ("profile",), ("tune",)):
        line = failure(*command)
        assert "needs an NVIDIA GPU" in line and line.endswith("see tridecode doctor\n")
