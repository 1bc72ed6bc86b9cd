"""Commands that users of ollama and llama.cpp type first. Each works or names the right command."""

import re

import pytest

from tridecode.arguments import nearest
from tridecode.cli.options import CONFIGURED, Url
from tridecode.cli.parser import make_parser
from tridecode.errors import ParameterError

pytestmark = pytest.mark.usefixtures("state")


@pytest.mark.parametrize(
    "typed, command",
    {
        "--prompt hi": "generate --prompt hi",
        "--temperature 0 --prompt hi": "generate --temperature 0 --prompt hi",
        "--verbose --prompt=hi": "--verbose generate --prompt=hi",
        "--model a/b --port 1": "serve --model a/b --port 1",
        "--model a/b": "chat --model a/b",
        "--url 127.0.0.1:8123": "chat --url http://127.0.0.1:8123",
        "run a/b": "chat --model a/b",
        "run llama3": "chat --model llama3",
        "run a/b Why?": "chat --model a/b Why?",
        "run bundled Why? --seed 3": "chat --model bundled Why? --seed 3",
        "run bundled --verbose": "chat --model bundled --verbose",
        "chat -c 0": "chat",
        "serve -c 4096 --ctx-size 0": "serve",
        "list": "models",
        "ls": "models",
        "models ls": "models list",
        "pull a/b": "models download a/b",
        "rm a/b": "models remove a/b",
        "show a/b": "info --model a/b",
        "list three rivers": "chat list three rivers",
        "run a marathon": "chat run a marathon",
        "show me a river": "chat show me a river",
        "stop the clocks": "chat stop the clocks",
        "create a poem": "chat create a poem",
        "generate -n64 -p x": "generate --max-tokens 64 --prompt x",
        "generate -n=64 -m./dir -p x": "generate --max-tokens 64 --model ./dir --prompt x",
    }.items(),
)
def test_guess_works(typed, command):
    typed, meant = (vars(make_parser().parse_args(each.split())) for each in (typed, command))
    for each in (typed, meant):
        for name in ("refuse", "configuration", "typed"):
            each.pop(name, None)
    same = {"ls": "list", "pull": "download", "rm": "remove"}
    assert typed | {"action": same.get(typed.get("action"), typed.get("action"))} == meant | {
        "action": meant.get("action")
    }


@pytest.mark.parametrize(
    "typed, named",
    {
        "run": "run needs a model: tridecode run DIR_OR_ID; tridecode models lists the cache",
        "run --seed 3": "run needs a model: tridecode run DIR_OR_ID; tridecode models lists the cache",
        "chat -m": "--model needs a value: --model DIR_OR_ID",
        "chat --system --seed 3": "--system needs a value: --system TEXT",
        "generate --quantize": "--quantize needs a value: --quantize fp8, int8 or int4",
        "-v": "did you mean --verbose or --version?",
        "bench": "bench needs a name first: decode, batch,",
        "bench -m a/b": "like tridecode bench decode --model DIR_OR_ID",
        "config set seed 3": "config only shows the settings; edit ",
        "show": "show needs a model: tridecode show DIR_OR_ID",
        "pull": "pull needs a model: tridecode pull ID",
        "rm": "rm needs a model: tridecode rm ID",
        "stop bundled": "there is no command stop; Ctrl-C ends a chat or a server",
        "create": "there is no command create",
        "cp a b": "there is no command cp",
        "push": "there is no command push",
        "signin": "there is no command signin; hf auth login",
        "signout": "there is no command signout",
        "resume": "use tridecode chat --resume",
        "load qwen3": "use tridecode chat --model DIR_OR_ID",
        "llama-cli -m a/b -p hi": "use tridecode chat",
        "llama-server --port 1": "use tridecode serve",
        "llama-bench -m a/b": "use tridecode bench",
        "llama-tokenize a b c": "there is no command llama-tokenize",
        "cli": "use tridecode chat",
        "tokenize": "there is no command tokenize",
        "perplexity": "there is no command perplexity",
        "embedding": "there is no command embedding",
        "server": "use tridecode serve",
        "server -m a/b --port 80": "there is no command server; use tridecode serve",
        "start --port 80": "use tridecode serve",
        "ps": "use tridecode info",
        "start": "use tridecode serve",
        "generat --prompt hi": "did you mean generate?",
        "srve --port 1": "did you mean serve?",
        "Chat": "did you mean chat?",
        "erve": "did you mean serve?",
        "sesions list": "did you mean sessions?",
        "modles": "did you mean models?",
        "models remov a/b": "did you mean remove?",
        "chat --prompt hi": "tridecode generate has this option",
        "chat --port 80": "tridecode serve has this option",
        "serve --resume": "tridecode chat has this option",
        "chat --think of": "did you mean off?",
        "chat --temprature 0": "did you mean --temperature?",
        "run bundled --format json": "did you mean tridecode generate --json?",
        "generate -ngl 99 -p hi": "unrecognized arguments: -ngl; tridecode does not need -ngl: leave it out (see",
        "chat -cnv -fa --color": "tridecode does not need -cnv, -fa or --color: leave them out",
        "-cb": "unrecognized arguments: -cb; tridecode does not need",
        "generate -no-cnv": "did you mean tridecode generate?",
        "info -ctk q8_0": "unrecognized arguments: -ctk q8_0; did you mean --kv-dtype?",
        "chat -cl": "did you mean tridecode models?",
        "chat -mu http://a": "unrecognized arguments: -mu; did you mean --model?",
        "chat -hff x.gguf": "unrecognized arguments: -hff; did you mean --model?",
        "chat -f x.txt": "did you mean tridecode generate < FILE?",
        "chat -j x": "did you mean tridecode generate --json-schema?",
        "generate -j x": "did you mean --json-schema?",
        "generate --prompt-cache x": "did you mean tridecode chat --session NAME?",
        "chat --continue": "did you mean --resume?",
        "chat -p --json-schema-file a -st": "tridecode does not need -st: leave it out; tridecode generate has -p; did "
        "you mean tridecode generate --json-schema for --json-schema-file?",
        "generate -s 1 -p hi": "unrecognized arguments: -s; did you mean --seed N or --system TEXT?",
        "chat -sy x": "unrecognized arguments: -sy",
        "chat a/b": "did you mean --model a/b?",
        "serve a/b": "did you mean --model a/b?",
        "model-q4.gguf": "did you mean --model model-q4.gguf?",
        "serve model-q4.gguf": "did you mean --model model-q4.gguf?",
        "llama3:8b": "names of models have no such tags here; give a Hugging Face id, like Qwen/Qwen3-4B",
        "demo/tiny:latest": "no such tags here; give a Hugging Face id, like demo/tiny",
        "demo/tiny:Q4_K_M": "did you mean --model demo/tiny:Q4_K_M?",
        "https://huggingface.co/a/b": "did you mean --model https://huggingface.co/a/b?",
    }.items(),
)
def test_guess_names_the_right_command(run, typed, named):
    code, out, err = run(*typed.split())
    assert (code, out) == (2, "") and err.count("\n") == 1 and named in err


def test_quoted_question_that_begins_with_another_program(run):
    assert make_parser().parse_args(["llama-cli is what?"]).question == "llama-cli is what?"


@pytest.mark.parametrize("option, default", {"temperature": 1, "top-k": 0, "top-p": 1, "min-p": 0}.items())
def test_default_of_a_sampling_option_is_the_models(run, option, default):
    text = " ".join(run("chat", "--help-all")[1].split())
    assert re.search(rf"--{option} \w [^-]*\(default: the model's, or {default}\)", text)


def test_help_and_version_are_commands_too(run):
    assert run("help") == run("--help") and run("version") == run("--version")


def test_distant_words_are_not_suggested(run):
    commands = [*make_parser()._subparsers._group_actions[0].choices, "/set", "/stats", "--stop"]
    for word in ("zebra", "/foo", "hello", "test", "--loop", "--verbosity-level", "what"):
        assert nearest(word, commands) is None
    assert "did you mean" not in run("chat", "--zebra")[2] + run("sessions", "show", "zebra")[2]


@pytest.mark.parametrize(
    "typed, url",
    [
        ("127.0.0.1:8123", "http://127.0.0.1:8123"),
        ("localhost:8123/v1/", "http://localhost:8123"),
        ("[::1]:80", "http://[::1]:80"),
        ("gpu-box", "http://gpu-box"),
        (" https://a.example/v1/chat/completions ", "https://a.example"),
        ("http://a/base/v1", "http://a/base"),
    ],
)
def test_url_needs_no_scheme(typed, url):
    assert Url().parse(typed) == url


@pytest.mark.parametrize("typed", ["", "ftp://a", "tcp://10.0.0.1:80", "http://", ":80", "a:99999", "a?b"])
def test_unusable_url_is_refused(typed):
    with pytest.raises(ParameterError):
        Url().parse(typed)


# ---- help


def options(text: str) -> list[str]:
    """Return the lines of options in a help text, without descriptions."""
    return [line.strip().split("  ")[0] for line in text.splitlines() if re.match(r"  -", line)]


@pytest.mark.parametrize("command", CONFIGURED)
def test_help_shows_common_options_on_one_line_each(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(command, "--help")
    usage, *rest = out.splitlines()
    assert code == 0 and usage.startswith(f"usage: tridecode {command} [OPTIONS]") and rest[0] == ""
    lines = [line for line in rest if line.startswith("  ") and not line.startswith(("  Defaults ", "  At most "))]
    for line in lines:
        assert re.match(r"  (-\S|QUESTION).*?  \S", line) and len(line) <= 80, "an option takes several lines"
    assert "--help-all" in out and not {"--graph", "--kv-offload", "--chunk-tokens"} & set(out.split())


@pytest.mark.parametrize("command", CONFIGURED)
def test_help_all_shows_all_options_and_those_of_the_engine_last(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    short, full = (options(run(command, f"--{name}")[1]) for name in ("help", "help-all"))
    assert full[: len(short)] == short and len(full) > len(short) + 10
    actions = make_parser()._subparsers._group_actions[0].choices[command]._actions
    known = {name for action in actions for name in action.option_strings}  # without synonyms of other programs
    shown = {name for line in full for name in re.findall(r"-[-a-z]+", line.split(" {")[0])}
    assert {name for name in known if name != "--verbose"} <= shown


@pytest.mark.parametrize("typed", ["doctor", "info", "sessions rm", "sessions delete", "models pull", "bench decode"])
def test_help_and_errors_of_an_alias_show_its_own_name(run, typed):
    assert run(*typed.split(), "--help")[1].startswith(f"usage: tridecode {typed} ")
    assert f"(see tridecode {typed} --help)" in run(*typed.split(), "a", "b", "--nonsense")[2]


# ---- files of options


def test_schema_in_place_of_a_file(run):
    code, out, err = run("generate", "hi", "--json-schema", '{"type": "boolean"}', "--max-tokens", 5, "--device", "cpu")
    assert code == 0 and out.strip() in ("true", "false"), err
    code, _, err = run("generate", "hi", "--json-schema", ' {"type": ')
    assert code == 1 and "--json-schema must be plain JSON" in err and "set by" not in err


def test_gbnf_is_named(run, tmp_path):
    (tmp_path / "a.gbnf").write_text('root ::= "yes" | "no"\n')
    code, _, err = run("generate", "hi", "--grammar", tmp_path / "a.gbnf", "--device", "cpu")
    assert code == 1 and "Lark's syntax, not GBNF" in err


@pytest.mark.parametrize(
    "option, text, why",
    [
        ("--json-schema", '{"a": ', "must be plain JSON"),
        ("--json-schema", "[1]", "must be a JSON object"),
        ("--json-schema", "", "must be plain JSON"),
        ("--grammar", "start: (", ""),
        ("--grammar", "", "must be a non-empty string"),
    ],
)
def test_error_in_a_file_names_the_file(run, tmp_path, option, text, why):
    file = tmp_path / "the file"
    file.write_text(text)
    code, out, err = run("generate", "hi", option, file)
    assert (code, out) == (1, "") and err.startswith(f"tridecode: error: {option}") and why in err
    assert err.endswith(f"({option} is set by {file})\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "typed, command",
    {
        "": "generate",
        "--verbose": "--verbose generate",
        "--seed 3": "generate --seed 3",
        "--seed 3 Summarize:": "generate --seed 3 Summarize:",
        "--session work": "chat --session work",
        "--port 1": "serve --port 1",
        "Summarize:": "chat Summarize:",
    }.items(),
    ids=repr,
)
def test_text_from_a_pipe_is_a_prompt(monkeypatch, typed, command):
    monkeypatch.setattr("tridecode.cli.parser.stdin_is_file", lambda: True)
    typed, meant = (vars(make_parser().parse_args(each.split())) for each in (typed, command))
    assert typed["command"] == meant["command"] and typed.get("question") == meant.get("question")
    assert typed.get("seed") == meant.get("seed") and typed["verbose"] == meant["verbose"]


def test_words_before_and_after_a_command(run):
    assert run("help", "chat") == run("chat", "--help")
    assert run("config", "show") == run("config")


def test_completion_option_fits_a_narrow_window(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run("--help")
    assert "--print-completion SHELL\n" in out and max(map(len, out.splitlines())) <= 40
