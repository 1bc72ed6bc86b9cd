"""Tests of the commands generate and info, and of exit codes, streams and completion of all commands."""

import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoints import write_tiny
from models import CUDA, planned, use_h100
from safetensors.torch import load_file

from tridecode import Engine, SamplingParams, __version__
from tridecode.checkpoint.load import load_config
from tridecode.cli.explain import explain
from tridecode.cli.info import describe_prompts, prompt_facts
from tridecode.cli.main import set_up_logging
from tridecode.cli.options import engine_options
from tridecode.cli.parser import make_parser
from tridecode.cli.terminal import Output, counted, speed_line
from tridecode.errors import NO_CHAT, ParameterError, PromptError
from tridecode.models.presets import PRESETS
from tridecode.plan.memory import plan_memory
from tridecode.results import OutputChunk, Result, Timings, Usage
from tridecode.step.workspace import named_tensors

ROOT = Path(__file__).parents[2]
GREEDY = ("--temperature", "0", "--max-tokens", "12", "--device", "cpu")


def test_help_and_version_answer_without_torch():
    program = (
        "import sys; from tridecode.cli import main\n"
        "for argv in (['--version'], ['--help'], ['chat', '--help'], ['info', '--nonsense']):\n"
        "    try: main(argv)\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tridecode {__version__}\n")
    args = [make_parser().parse_args(argv.split()) for argv in ("--verbose info", "info --verbose", "info")]
    assert [each.verbose for each in args] == [True, True, False]


def test_no_arguments_show_help_with_examples(run):
    code, out, err = run()
    assert (code, err) == (0, "") and out.count("\n  tridecode ") + out.count("| tridecode ") == 3
    for example in out.split("examples:\n")[1].splitlines():
        words = shlex.split(example.split("tridecode", 1)[1].split("    ")[0])
        assert make_parser().parse_args(words).command in ("chat", words[0])
    code, out, _ = run("generate", "--help")
    assert code == 0 and "Exit codes: 0 done" in out and "141" in out


@pytest.mark.parametrize(
    "argv, question",
    [
        (["Why is the sky blue?"], "Why is the sky blue?"),
        (["--verbose", "sky?"], "sky?"),
        (["what", "is", "a", "river"], "what is a river"),
        (["chat", "hello"], "hello"),
        (["hello", "--seed", "3"], "hello"),
        (["--model", "a/b", "hi"], "hi"),
        (["- a list"], "- a list"),
        (["and/or?"], "and/or?"),
        (["chat"], None),
        (["--device=cpu"], None),
    ],
)
def test_question_without_command_starts_chat(argv, question):
    args = make_parser().parse_args(argv)
    assert (args.command, args.question) == ("chat", question)


def test_question_without_terminal_prints_only_the_answer(piped):
    code, out, err = piped("", "Hello", "--max-tokens", 4, "--temperature", 0)
    assert code == 0 and out.count("\n") == 1 and err.count(" tok/s") == 1
    for question in ((), ("-",)):
        assert piped("Hello\n", *question, "--max-tokens", 4, "--temperature", 0)[1] == out


COMPLETIONS = {
    "ch": "chat",
    "doc": "doctor",
    "chat --th": "--think",
    "chat --think ''": "on off hide",
    "chat --model tests/kern": "tests/kernels",
    "chat --model Qw": "Qwen/Qwen3-4B",
    "serve --model bun": "bundled",
    "conf": "config",
    "generate --output cli.": "cli.py",
    "sess": "sessions",
    "sessions ren": "rename",
    "chat --session ri": "rivers",
    "sessions delete ri": "rivers",
}


def test_bash_completes(run, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    for shell in ("zsh", "fish", "tcsh", "bash"):
        code, script, err = run("--print-completion", shell)
        assert (code, err) == (0, "") and "tridecode" in script and "generate" in script
    assert run("--print-completion", "csh")[0] == 2
    (tmp_path / "script").write_text(script)
    for name in ("Qwen--Qwen3-4B", "Qwen--$(touch x)"):
        (tmp_path / "hub" / f"models--{name}").mkdir(parents=True)
    program = (
        "tridecode() { echo rivers; }\n"  # The completion calls `tridecode sessions --names`.
        f"export HF_HUB_CACHE='{tmp_path}/hub'\n"
        f"source '{tmp_path}/script'; complete -p tridecode >/dev/null || exit 1\n"
    )
    for typed in COMPLETIONS:
        program += f"COMP_WORDS=(tridecode {typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()\n"
        program += '_shtab_tridecode; echo "${COMPREPLY[@]}"\n'
    done = subprocess.run([bash, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert dict(zip(COMPLETIONS, done.stdout.splitlines(), strict=True)) == COMPLETIONS


def test_documented_completion_setup_works_in_an_empty_home(tmp_path):
    block = (ROOT / "docs" / "chat.md").read_text().split("## Completion in the shell")[1].split("```")[1]
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith(("$ mkdir", "$ tridecode"))]
    program = "\n".join(["set -e", f"tridecode() {{ '{sys.executable}' '{ROOT}/cli.py' \"$@\"; }}", *lines])
    home = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", program], env=home, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert sorted(found) == ["_tridecode", "tridecode"]


def test_selection_in_contributing_selects_tests():
    file, word = re.search(r"pytest (tests/\S+\.py) -k (\w+)", (ROOT / "CONTRIBUTING.md").read_text()).groups()
    assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(), re.MULTILINE)


def test_checkpoint_defaults_are_shown_unless_overridden(run, piped, tiny, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny, path)
    (path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    few = ("--model", path, "--prompt", "Hello", "--max-tokens", 2, "--device", "cpu")
    assert "generation_config" not in run("generate", *few)[2]
    shown = run("generate", *few, "--verbose")[2]
    assert "temperature 0.6, top_k 20, top_p 0.95 from generation_config.json\n" in shown
    shown = run("generate", *few, "--verbose", "--temperature", 0, "--top-p", 1)[2]
    assert shown.startswith("top_k 20 from generation_config.json\n")
    (path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert "temperature 0.0 from generation_config.json\n" in run("generate", *few, "--verbose")[2]
    greedy = json.loads(run("generate", *few, "--json")[1])["token_ids"]
    err = piped("hello\nagain\n", *few[:2], "--max-tokens", 2)[2]
    assert err.startswith("temperature 0.0 from generation_config.json\n") and err.count("generation_config") == 1
    (path / "generation_config.json").write_text('{"temperature": 5.0}')
    assert json.loads(run("generate", *few, "--json", "--temperature", 0)[1])["token_ids"] == greedy


def test_generate_json_is_one_complete_line(run, tiny):
    options = ("--model", tiny, "--prompt", "Hello", *GREEDY)
    code, out, err = run("generate", *options, "--json")
    assert code == 0 and err == ""
    assert out.endswith("\n") and out.count("\n") == 1
    report = json.loads(out)
    engine = Engine.load(tiny, device="cpu")
    prompt = [{"role": "user", "content": "Hello"}]
    expected = engine.generate(prompt, engine.default_params(temperature=0, max_tokens=12))
    assert report["token_ids"] == list(expected.token_ids) and len(report["token_ids"]) == 12
    assert report["text"] == expected.text
    assert report["finish_reason"] == "length"
    usage = {"prompt_tokens": expected.usage.prompt_tokens, "reused_tokens": 0, "completion_tokens": 12}
    assert report["usage"] == usage | {"drafted": 0, "accepted": 0, "tokens_per_pass": 1.0}
    assert set(report["timings"]) == {"ttft", "decode", "tokens_per_second"} and report["timings"]["ttft"] > 0
    assert isinstance(report["seed"], int) and "error" not in report
    code, out, err = run("generate", *options)
    assert code == 0 and out == report["text"] + "\n", "the streamed text differs from the reported text"
    assert err.startswith("12 tokens · ") and err.count("\n") == 1
    ids = ",".join(map(str, engine.encode(prompt)))
    text = engine.tokenizer.decode(engine.encode(prompt), False)
    for other in (("--prompt-ids", ids), ("--prompt", text, "--raw", "--allow-special")):
        again = json.loads(run("generate", "--model", tiny, "--json", *other, *GREEDY)[1])
        assert again["token_ids"] == report["token_ids"]


def test_generate_speculates_if_enabled(run, tiny):
    """The tiny model soon repeats its own text, so that drafts are accepted."""
    options = ["generate", "--model", tiny, "--json", "--prompt", "a b a b a b a b", *GREEDY, "--max-tokens", 60]
    off, ngram = (json.loads(run(*options, "--speculate", each)[1]) for each in ("off", "ngram"))
    assert ngram["token_ids"] == off["token_ids"] and ngram["text"] == off["text"]
    usage = ngram["usage"]
    assert 0 < usage["accepted"] <= usage["drafted"] and off["usage"]["drafted"] == 0
    passes = usage["completion_tokens"] - usage["accepted"]
    assert usage["tokens_per_pass"] == pytest.approx(usage["completion_tokens"] / passes, abs=1e-3)


def test_failed_answer_exits_1(generate, engine, monkeypatch):
    usage, timings, error = Usage(3, 0, 2), Timings(0.1, 0.1, 10.0), "step 3 gave NaN"

    class Failed:
        text = "Hel"

        def __iter__(self):
            yield OutputChunk(None, self.text, None, "error", usage, timings, error)

        def result(self):
            return Result(self.text, (5, 6), "error", usage, timings, 1, None, error)

    monkeypatch.setattr(engine, "submit", lambda prompt, params: Failed())
    monkeypatch.setattr(Engine, "notes", ["context lowered"])
    line = f"context lowered\ntridecode: error: {error}\n"
    code, out, err = generate("--prompt", "Hello", "--json")
    assert (code, json.loads(out)["error"], out.count("\n"), err) == (1, error, 1, line)
    assert generate("--prompt", "Hello") == (1, "Hel\n", line)
    Failed.text = ""
    assert generate("--prompt", "Hello") == (1, "", line)


def test_info_counts_without_loading(run, tiny, monkeypatch):
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", "pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())
    monkeypatch.setattr("tridecode.engine.load_weights", None)
    monkeypatch.setattr("tridecode.checkpoint.load.safe_open", None)
    code, out, err = run("info", "--model", tiny, "--json", "--device", "cpu", "--max-seq-len", 100)
    report = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert report["model"]["parameters"] == parameters and report["model"]["family"] == "qwen3"
    assert report["memory"]["weights"] == 4 * parameters  # The CPU uses fp32, which has 4 bytes.
    # Factors: K and V, layers, heads, head_dim, bytes of fp32.
    assert report["memory"]["kv_per_token"] == 2 * 2 * 2 * 128 * 4
    assert (report["memory"]["context"], report["memory"]["largest_context"]) == (100, 512)
    assert report["run"] == {
        "device": "cpu", "backend": "torch", "dtype": "float32", "graph": "none", "pdl": False,
        "batch_invariant": False, "speculate": "off", "speculate_ngram": None,
        "speculate_off": "pays on a GPU only, where decode passes are captured and attention is Triton's",
    }  # fmt: skip
    assert report["versions"]["tridecode"] == __version__ and report["versions"]["python"] == sys.version.split()[0]
    code, out, err = run("info", "--model", tiny, "--device", "cpu")
    assert code == 0 and err == ""
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert rows["parameters"].startswith(f"{parameters:,}") and f"tridecode {__version__}" in rows["versions"]


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe-equal"])
def test_info_counts_experts(run, family, tmp_path):
    path = write_tiny(tmp_path, family)
    shapes = {name: tensor.numel() for name, tensor in load_file(path / "model.safetensors").items()}
    experts = sum(size for name, size in shapes.items() if ".experts." in name)
    shared = sum(size for name, size in shapes.items() if ".shared_expert." in name)
    code, out, _ = run("info", "--model", path, "--json", "--device", "cpu")
    report, total = json.loads(out), sum(shapes.values())
    facts = report["experts"]
    count, used, layers = (6, 2, 2) if family == "qwen3-moe" else (4, 1, 2)
    with_shared = int(shared > 0)
    assert (facts["experts"], facts["of_token"]) == (count + with_shared, used + with_shared) and code == 0
    assert facts["layers"] == layers and facts["shared"] == with_shared
    assert facts["active_parameters"] == total - experts * (count - used) // count
    assert facts["bytes"] == 4 * (experts + shared)
    embed = shapes["model.embed_tokens.weight"]
    assert facts["bytes_of_pass"] == 4 * (facts["active_parameters"] - embed)
    rows = dict(line.split(maxsplit=1) for line in run("info", "--model", path)[1].splitlines())
    assert rows["experts"].startswith(f"{used + with_shared} of {count + with_shared}")
    assert "experts" not in run("info", "--model", "bundled")[1]


@pytest.mark.parametrize("left, why", [(None, "no model.safetensors and no"), (2000, "model.safetensors: truncated: ")])
def test_info_reports_missing_checkpoint_files(run, tiny, tmp_path, left, why):
    path = tmp_path / "cut"
    shutil.copytree(tiny, path)
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").unlink()
    if left is not None:
        (path / "model.safetensors").write_bytes(weights[: len(weights) - left])
    code, out, _ = run("info", "--model", path, "--device", "cpu")
    name, verdict = out.splitlines()[0].split(maxsplit=1)
    assert code == 0 and name == "verdict" and verdict.startswith(f"does not run: {path}") and why in verdict
    assert why in json.loads(run("info", "--model", path, "--device", "cpu", "--json")[1])["model"]["problem"]


def test_info_reports_slots_and_their_shared_pool(run, tiny):
    argv = ("info", "--model", tiny, "--device", "cpu", "--max-seq-len", 100)
    alone = json.loads(run(*argv, "--json")[1])["memory"]
    assert (alone["slots"], alone["context"], alone["kv_tokens"]) == (1, 100, 100)
    several = json.loads(run(*argv, "--slots", 8, "--json")[1])["memory"]
    assert (several["slots"], several["context"]) == (8, 100) and several["kv_tokens"] >= 800
    assert several["kv_bytes"] == several["kv_tokens"] * several["kv_per_token"]
    assert several["workspace"] > alone["workspace"]
    fewer = json.loads(run(*argv, "--slots", 8, "--kv-tokens", 300, "--json")[1])["memory"]
    assert fewer["kv_tokens"] == 300
    assert "; 8 slots share 300 positions, " in run(*argv, "--slots", 8, "--kv-tokens", 300)[1]
    assert "; 1 slot has 100 positions, " in run(*argv)[1]


def test_info_reports_prompt_passes(run, tiny):
    argv = ("info", "--model", tiny, "--device", "cpu", "--chunk-tokens", 300)
    report = json.loads(run(*argv, "--json")[1])
    nothing = {"mode": "none", "attention": "torch", "sizes": [], "largest": None, "graphs": 0}
    buffers = report["prompts"].pop("buffers")
    assert report["prompts"] == nothing | {"chunk_tokens": 300, "sharing": True}
    with Engine.load(tiny, device="cpu", chunk_tokens=300) as engine:
        allocated = sum(tensor.nbytes for tensor in named_tensors(engine.model.prompt).values())
    assert buffers == allocated < report["memory"]["workspace"]
    words = "in chunks of up to 300 tokens, launched line by line; common prefixes are read once"
    assert f"\nprompts      {words}; attention by torch; buffers" in run(*argv)[1]
    assert json.loads(run(*argv, "--max-seq-len", 100, "--json")[1])["prompts"]["chunk_tokens"] == 100
    assert "common prefixes are not shared" in run(*argv, "--no-prefix-sharing")[1]
    report = json.loads(run(*argv[:-2], "--batch-invariant", "--json")[1])
    assert report["run"]["batch_invariant"] and report["prompts"]["chunk_tokens"] == 256
    assert "no graph, batch invariant" in run(*argv[:-2], "--batch-invariant")[1]


def test_info_reports_speculation(run, tiny):
    report = json.loads(run("info", "--model", tiny, "--json", "--speculate", "ngram")[1])
    assert report["run"]["speculate"] == "ngram" and report["run"]["speculate_ngram"] == [8, 2]
    argv = ("info", "--model", tiny, "--json", "--speculate", "ngram", "--speculate-ngram")
    assert json.loads(run(*argv, "6:3")[1])["run"]["speculate_ngram"] == [6, 3]
    text = ("info", "--model", tiny, "--device", "cpu")
    several = "\nspeculation  ngram, by the last {} tokens: several tokens a pass where the text repeats\n"
    assert several.format("8 to 2") in run(*text, "--speculate", "ngram")[1]
    assert several.format("4 to 3") in run(*text, "--speculate-ngram", "4:3")[1], (
        "--speculate-ngram did not enable drafts"
    )
    assert "\nspeculation  off\n" in run(*text, "--speculate", "off")[1]
    assert "\nspeculation  off: it pays on a GPU only, where decode passes are captured and" in run(*text)[1]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, ("full", "triton", 2048, 22, "22 passes of 16 to 2,048 tokens captured whole; ")),
        (dict(prompt_attention="flash"), ("piecewise", "flash", 2048, 22, "captured in pieces between attention")),
        (dict(slots=8, batch_invariant=None), ("full", "triton", 2048, 1, "1 pass of 2,048 tokens captured whole")),
        (dict(prompt_graph_max_tokens=64), ("full", "triton", 64, 4, "4 passes of 16 to 64 tokens")),
        (dict(graph="full_decode_only"), ("none", "triton", None, 0, "read once; attention by triton")),
    ],
)
def test_info_reports_prompt_passes_captured_on_a_gpu(options, expected, monkeypatch):
    use_h100(monkeypatch)
    words = [f"--{name.replace('_', '-')}" + f"={value}" * (value is not None) for name, value in options.items()]
    args = make_parser().parse_args(["info", *words])
    monkeypatch.setattr("tridecode.plan.memory.free_memory", lambda device: 40 * 2**30)
    plan = planned(PRESETS["qwen3-4b"], "cuda", **engine_options(args) | {"device": "cuda", "chunk_tokens": 2048})
    facts = prompt_facts(plan)
    mode, attention, largest, count, words = expected
    assert (facts["mode"], facts["attention"], facts["largest"], facts["graphs"]) == (mode, attention, largest, count)
    assert words in describe_prompts(facts) and 200 * 2**20 < facts["buffers"] < 250 * 2**20


@pytest.mark.parametrize("command", [("info",), ("generate", "--prompt", "x")])
def test_too_many_slots_or_positions_fail_with_one_line(run, tiny, monkeypatch, command):
    # The program must check the options before it loads weights.
    monkeypatch.setattr("tridecode.engine.load_weights", None)
    argv = (*command, "--model", tiny, "--device", "cpu", "--slots", 4)
    code, out, err = run(*argv, "--kv-tokens", 10**6)
    assert (code, out, err.count("\n")) == (1, "", 1) and "--kv-tokens: 4 slots of 512 positions can have at" in err
    plan = plan_memory(load_config(tiny), torch.float32, torch.device("cpu"), 64)
    free = int(replace(plan, slots=5).needed(500) / (1 - plan.headroom))
    monkeypatch.setattr("tridecode.plan.memory.free_memory", lambda device: free)
    code, out, err = run(*argv[:-2], "--slots", 64, "--max-seq-len", 500)
    assert code == (0 if command == ("info",) else 1)
    if command == ("info",):
        memory = json.loads(run(*argv[:-2], "--slots", 64, "--max-seq-len", 500, "--json")[1])["memory"]
        assert memory["context"] == 0 and memory["problem"].startswith("not enough memory")
    assert "not enough memory on cpu: 64 slots with" in out + err and "slots fit" in out + err
    assert (out + err).count("not enough") == 1


@pytest.mark.skipif(
    not (ROOT / "tridecode" / "bundled" / "config.json").is_file(),
    reason="this checkout does not contain the bundled model",
)
def test_the_bundled_model_loads_by_the_name_that_info_prints(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("info", "--model", "bundled", "--json")
    assert code == 0 and json.loads(run("info", "--json")[1])["model"] == json.loads(out)["model"]
    assert "in the package" in run("info", "--model", "bundled")[1]
    with Engine.load(json.loads(out)["model"]["name"], device="cpu") as engine:
        assert engine.name == "bundled" and "bundled" in repr(engine)


def test_readme_python_examples_print_the_documented_output(capsys):
    section = (ROOT / "README.md").read_text().split("From Python:")[1]
    _, example, between, shown, _, several, _, answers, *_ = re.split(r"```(?:python|text)?\n", section)
    assert between.strip() == "On a CPU it prints:"
    scope = {}
    for code, output in ((example, shown), (several, answers)):
        exec(code, scope)
        assert CUDA or capsys.readouterr().out == output  # In bf16 another run may sample other words.
    assert scope["chunk"].finish_reason and scope["result"].text
    assert scope["logits"].shape == (len(scope["ids"]), 4096)


@pytest.mark.parametrize(
    "error, line",
    [
        (KeyError("x"), "tridecode: error: KeyError: 'x' (--verbose shows the traceback)\n"),
        (RuntimeError("a\nb\x1b[2J"), "tridecode: error: RuntimeError: a b␛[2J (--verbose shows the traceback)\n"),
        (OSError(28, "No space left on device"), "tridecode: error: No space left on device\n"),
        (MemoryError(), "tridecode: error: out of memory on this machine; shorten the input or end other programs\n"),
    ],
)
def test_unexpected_error_is_one_line(run, monkeypatch, error, line):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(Engine, "load", fail)
    assert run("generate", "--prompt", "x") == (1, "", line)
    code, out, err = run("--verbose", "generate", "--prompt", "x")
    assert (code, out) == (1, "") and "Traceback" in err and err.endswith(line)


def test_ctrl_c_exits_130(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "load", interrupted)
    code, out, err = run("generate", "--prompt", "x")
    assert (code, out, err.strip()) == (130, "", "")


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_closed_streams(run, tiny, monkeypatch, stream):
    monkeypatch.setattr(sys, stream, None)
    argv = ("generate", "--model", tiny, *GREEDY, *(() if stream == "stdin" else ("--prompt", "Hello")))
    assert run(*argv)[0] == (1 if stream == "stdin" else 0)
    assert getattr(sys, stream) is not None


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_speed_line_fits_the_terminal(width):
    for seed, scale in product((None, 999_999, 2**64 - 1), (1, 1000, 131_072)):
        usage, timings = Usage(scale, scale - 1, scale), Timings(123.45, 1.0, 11_433.0)
        line = speed_line(usage, timings, 2 * scale, seed, width)
        assert line.startswith(f"{scale:,} token") and len(line) <= max(width, 31)
        if width == 80 and seed != 2**64 - 1:
            assert (seed is None or f" · seed {seed}" in line) and " · first " in line and " · context " in line
        whole = speed_line(usage, timings, 2 * scale, seed)
        assert f"{scale - 1:,} of {scale:,} reused · context {2 * scale:,} / " in whole


def test_numbers_have_thousands_separators():
    assert " tok/pass" in speed_line(Usage(5, 0, 60, 40, 30), Timings(0.1, 1.0, 59.0))
    line = speed_line(Usage(123456, 1000, 2345), Timings(0.1, 0.1, 12345.6), 131072)
    assert line.startswith("2,345 tokens · 12,346 tok/s · first token 0.10 s · 1,000 of 123,456 reused · context 125,")
    assert counted(1, "turn") == "1 turn" and counted(300_000, "turn") == "300,000 turns"
    assert counted(1, "pass") == "1 pass" and counted(2, "pass") == "2 passes" and counted(3, "launch") == "3 launches"


def test_errors_name_options_on_the_command_line_and_arguments_in_python():
    names = ("stop", "top_p", "n", "seed")
    for text, shown in (
        ("max_seq_len must be from 1 to 512, got 600", "--max-seq-len must be from 1 to 512, got 600"),
        ("it is full: shorten it or raise max_seq_len", "it is full: shorten it or raise --max-seq-len"),
        ('device cuda:1 is absent; use device="cpu"', "device cuda:1 is absent; use --device cpu"),
        ("stop: every entry must be a string", "--stop: every entry must be a string"),
        ("n must be at most 3", "--n must be at most 3"),
        ("graph_sizes: must be ascending, with graph full", "--graph-sizes: must be ascending, with graph full"),
        ("slots must be from 1 to 64; kv_tokens is full", "--slots must be from 1 to 64; --kv-tokens is full"),
        ("the device must stop; --top-p is my_top_p_file", "the device must stop; --top-p is my_top_p_file"),
        ("unknown model; a seed must be sown", "unknown model; a seed must be sown"),
        (f"there is no template; {NO_CHAT}", "there is no template; use --raw"),
    ):
        assert explain(PromptError(text), names) == shown
    assert explain(PromptError("top_p must be 1 in /set and in JSON lines")).startswith("top_p must")
    with pytest.raises(ParameterError, match="^max_seq_len must be"):
        Engine.load(max_seq_len=0)
    with pytest.raises(ParameterError, match="^top_p must be"):
        SamplingParams(top_p=7)


def test_logging_is_silent_without_verbose(run, monkeypatch, tiny):
    def load(*args, **kwargs):
        logging.getLogger("tridecode").warning("a note")
        raise KeyError("stop")

    monkeypatch.setattr(Engine, "load", load)
    assert "a note" not in run("generate", "--prompt", "x")[2]
    assert "tridecode: WARNING: a note" in run("generate", "--prompt", "x", "--verbose")[2]


def test_loading_shows_progress_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    set_up_logging(verbose=False)
    log = logging.getLogger("tridecode")
    with Output().loading() as progress:
        progress.weights(50, 100)
        progress.refresh()
        progress.kernels(3, 40)
        progress.refresh()
        log.info("compiling the kernels")
        log.warning("shown elsewhere")
    log.info("after")
    shown = screen.getvalue()
    assert "loading" in shown and "50/100 bytes" in shown and "compiling the kernels" in shown
    assert "3/40 kernels" in shown
    assert "elsewhere" not in shown and "after" not in shown
