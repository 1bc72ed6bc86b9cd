"""The slash commands, with a scripted engine."""

import base64
import stat
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from chats import as_messages

from tridecode import SamplingParams
from tridecode.cli.chat import local
from tridecode.cli.chat.clipboard import LARGEST
from tridecode.cli.chat.command import converse
from tridecode.cli.chat.model import Thinking
from tridecode.cli.chat.settings import CHOICES, NAMES
from tridecode.cli.chat.slash import COMMANDS, GROUPS
from tridecode.cli.terminal import Output
from tridecode.errors import PromptError


def test_commands(session):
    chat = session(["/ok"], ["ok"])
    assert chat.handle("/help") and "/clear" in chat.read()[1]
    assert chat.handle("/claer") and "did you mean /clear?" in chat.read()[1]
    assert chat.handle("/HELP") and "/clear" in chat.read()[1]
    assert not chat.handle("/bye") and not chat.handle("/quit"), "/bye or /quit did not end the chat"
    assert chat.handle("/?") and "/clear" in chat.read()[1] and chat.handle("/h") and "/clear" in chat.read()[1]
    assert not chat.engine.prompts and chat.exit_code == 1, "an unknown command in a pipe did not set the exit code"
    assert chat.handle(" /exit") and chat.engine.prompts[0] == as_messages("/exit")
    assert not chat.handle("/exit")


@pytest.mark.parametrize("line", ["/", "/usr/bin is what?", "/zzz", "/2 + 2", "/* a comment */", "/ exit", "/help/me"])
def test_unknown_command_is_not_sent(session, line):
    chat = session(["fine"], interactive=True)
    assert chat.handle(line) and not chat.engine.prompts and chat.exit_code == 0
    shown = chat.read()[1]
    assert f"there is no command {line.split()[0]}; " in shown and "// begins a message with a /" in shown
    assert chat.handle(f"/{line}") and chat.engine.prompts == [as_messages(line)]


def test_words_that_leave(session):
    for word in ("exit", "Quit "):
        chat = session(["fine"], interactive=True)
        assert not chat.handle(word) and not chat.engine.prompts
        assert chat.handle(f" {word}") and chat.engine.prompts == [as_messages(word.strip())]


# line of a user of ollama or llama.cpp: a part of the output
FOREIGN = {
    "/set parameter temperature 0.3": "temperature is 0.3",
    "/set temp 0.3": "temperature is 0.3",
    "/set temperature=0.4": "temperature is 0.4",
    "/set temperature = 0.4": "temperature is 0.4",
    "/set parameter num_predict -1": "max_tokens is none",
    "/set max_tokens -1": "max_tokens is none",
    "/set repeat_penalty 1.1": "repetition_penalty is 1.1",
    "/set stop a=b": 'stop is ["a=b"]',
    "/set system Be brief.": "/system TEXT sets the system turn",
    "/set --system-prompt x": "/system TEXT",
    "/set verbose": "/set stats full shows",
    "/set quiet": "/set stats off hides",
    "/set format json": "--json-schema",
    "/set noformat": "/set json_schema none",
    "/set think": "/think on",
    "/set nothink": "/think off",
    "/set history": "/history",
    "/set model x": "/model NAME",
    "/set parameter num_ctx 4096": "--max-seq-len N",
    "/show": "/stats shows the model",
    "/show info": "/stats shows the model",
    "/list": "tridecode models",
    "/regen": "the conversation has no turns yet",
    "/regen it": "/regen accepts no argument",
    "/read": "/read needs FILE",
    "/clear": "a new conversation begins; the model and the settings stay",
    "/reset": "a new conversation begins",
}


@pytest.mark.parametrize("line", FOREIGN)
def test_first_guesses_of_other_programs_users(session, line):
    chat = session(interactive=True)
    assert chat.handle(line) and FOREIGN[line] in chat.read()[1]


@pytest.mark.parametrize("word, command", [("help", "/help")])
def test_bare_word_suggests_command(session, word, command):
    chat = session(["fine"], ["fine"], interactive=True)
    assert chat.handle(word) and not chat.engine.prompts
    assert f"did you mean {command}?" in chat.read()[1]
    assert chat.handle(f" {word}") and chat.engine.prompts == [as_messages(word.strip())]
    chat.handle("/edit")
    assert chat.draft == (f" {word.strip()}", True), "the edited message has no space before its slash"
    chat.interactive = False
    assert chat.handle(word) and len(chat.engine.prompts) == 2, "the word was not sent as a message"


def test_seeds_of_answers_and_retries(session):
    chat = session(*(["answer"] for _ in range(8)))
    seeds, stream = [], chat.engine.stream
    chat.engine.stream = lambda prompt, params, **more: seeds.append(params.seed) or stream(prompt, params, **more)
    for line in ("one", "two", "/set seed 7", "a", "/retry", "/retry", "b", "/retry"):
        assert chat.handle(line)
    assert seeds[0] != seeds[1] and max(seeds) < 1_000_000 and seeds[2:] == [7, 8, 9, 7, 8] and chat.params.seed == 7
    shown = chat.read()[1]
    assert [line.split("seed ")[1] for line in shown.splitlines() if "tok/s" in line] == list(map(str, seeds))
    assert shown.count("try 2, seed 8\n") == 2 and shown.count("try 3, seed 9\n") == 1
    chat.handle(f"/set seed {2**64 - 1}")
    assert chat.handle("/retry") and "try 3, seed 1\n" in chat.read()[1]
    chat.engine.answers = [["same"]]
    assert chat.handle("/set temperature 0") and chat.handle("/retry")
    assert "every try gives the same answer" in chat.read()[1]


def test_retry_undo_and_edit(session):
    chat = session(["one"], ["two"], ["three"], ["four"], PromptError("no"), ["five"])
    for line in ("/retry", "/undo", "/edit x"):
        assert chat.handle(line) and chat.read()[1] == "tridecode: error: the conversation has no turns yet\n"
    for line in ("a", "b", "/retry"):
        assert chat.handle(line)
    assert chat.engine.prompts[2] == as_messages("a", "one", "b")
    assert chat.handle("/edit c") and chat.engine.prompts[3] == as_messages("a", "one", "c")
    assert chat.handle("/retry")
    assert chat.conversation.turns == (("a", "one"), ("c", "four")), "a failed answer replaced the previous answer"
    assert chat.handle("/undo") and chat.conversation.turns == (("a", "one"),)
    assert "removed 'c'; 1 turn left" in chat.read()[1]
    assert chat.handle("/edit") and "needs TEXT" in chat.read()[1]


def test_retry_and_edit_of_a_turn_that_failed(session):
    chat = session(["one"], PromptError("no"), PromptError("no"), ["two"], PromptError("no"), ["three"], ["four"])
    chat.handle("a"), chat.handle("b"), chat.handle("/retry")
    assert chat.conversation.turns == (("a", "one"),) and chat.engine.prompts[2] == as_messages("a", "one", "b")
    chat.handle("/edit c")
    assert chat.conversation.turns == (("a", "one"), ("c", "two")), "the edited message replaced an answered one"
    chat.handle("/edit d"), chat.handle("/retry")
    assert chat.conversation.turns == (("a", "one"), ("d", "three")), "the failed edit of a turn did not replace it"
    chat.handle("/retry")
    assert chat.conversation.turns == (("a", "one"), ("d", "four"))


def test_edit_of_a_failed_turn_keeps_the_turn_before_it(session):
    chat = session(["one"], PromptError("no"), ["two"], interactive=True)
    typed, drafts = ["a", "b", "/edit", "c", "/exit"], []
    converse(chat, SimpleNamespace(read=lambda draft: drafts.append(draft) or typed.pop(0)))
    assert drafts == ["", "", "", "b", ""] and chat.conversation.turns == (("a", "one"), ("c", "two"))


def test_edit_prefills_prompt(session):
    chat = session(["one"], ["two"], interactive=True)
    chat.handle(" /etc/passwd is what?")
    chat.handle("/edit")
    typed, drafts = ["//etc/shadow is what?", "/exit"], []
    reader = SimpleNamespace(read=lambda draft: drafts.append(draft) or typed.pop(0))
    converse(chat, reader)
    assert drafts == [" /etc/passwd is what?", ""]
    assert chat.conversation.turns == (("/etc/shadow is what?", "two"),)


def test_system(session):
    chat = session(["one"], ["two"], ["three"])
    system = [{"role": "system", "content": "Be brief."}]
    chat.handle("/system Be brief.")
    chat.handle("a")
    chat.handle("/clear")
    chat.handle("b")
    assert chat.engine.prompts == [system + as_messages("a"), system + as_messages("b")]
    chat.handle("/system")
    assert "system: Be brief." in chat.read()[1]
    chat.handle("/system -")
    assert chat.read()[1] == "the system turn is removed\n"
    chat.handle("c")
    assert chat.engine.prompts[2] == as_messages("b", "two", "c")
    chat = session(raw=True)
    assert chat.handle("/system x") and "--raw" in chat.read()[1] and chat.conversation.system is None


@pytest.mark.parametrize(
    "typed, name, value",
    [
        ("temperature 0", "temperature", 0),
        ("top-p 0.5", "top_p", 0.5),
        ("--top_k 3", "top_k", 3),
        ("seed 7", "seed", 7),
        ("seed none", "seed", None),
        ("stop ###", "stop", ("###",)),
        ('stop ["a", "\\n"]', "stop", ("a", "\n")),
        ("stop 7", "stop", ("7",)),
        ("stop [END]", "stop", ("[END]",)),
        ('stop "', "stop", ('"',)),
        ('stop "[\\"a"', "stop", ('["a',)),
        ("stop none", "stop", ()),
        ("stop_token_ids 1, 2", "stop_token_ids", (1, 2)),
        ('logit_bias {"5": -3.5}', "logit_bias", {5: -3.5}),
        ("logit_bias 5=-3.5", "logit_bias", {5: -3.5}),
        ("logit_bias none", "logit_bias", {}),
        ("regex [0]", "regex", "[0]"),
        ('regex "[0]"', "regex", "[0]"),
        ('choice ["yes", "no"]', "choice", ("yes", "no")),
        ("choice yes", "choice", ("yes",)),
        ("ignore_eos on", "ignore_eos", True),
        ("max_tokens 5", "max_tokens", 5),
        ("min_p default", "min_p", 0.0),
    ],
)
def test_set(session, typed, name, value):
    chat = session(params=SamplingParams(seed=1, min_p=0.3))
    assert chat.handle(f"/set {typed}")
    assert getattr(chat.params, name) == value
    assert chat.read()[1].startswith(f"{name} is ")


@pytest.mark.parametrize(
    "typed, message",
    [
        ("temperature warm", "temperature must be a number from 0 to 100, got 'warm'"),
        ("temperature NaN", "temperature must be"),
        ("temperature true", "temperature must be"),
        ("temperature", "needs a value; the current value is 1.0"),
        ("overflow", "needs a value; the current value is error"),
        ("logprobs 3", "there is no option logprobs"),
        ("temprature 1", "did you mean temperature?"),
        ("xyz 1", "/set shows all"),
        ("top_p [1]", "top_p must be"),
        ("stop_token_ids a", "stop_token_ids: every entry must be a token id"),
        ("stop_token_ids [1, 2", "stop_token_ids: every entry must be a token id"),
        ("stop []", None),
        ('stop [""]', "non-empty"),
        ("logit_bias 5", "logit_bias must be"),
        ("ignore_eos maybe", "ignore_eos must be"),
        ("seed " + "9" * 5000, "seed must be"),
        ("top_k " + "[" * 2000, "top_k must be"),
    ],
)
def test_set_rejects_invalid_values(session, typed, message):
    chat = session()
    assert chat.handle(f"/set {typed}") and chat.params == SamplingParams()
    shown = chat.read()[1]
    assert shown.count("\n") == 1 and (message or "stop is []") in shown


def test_set_shows_values(session):
    chat, schema = session(params=SamplingParams(stop=["x"]), stats="short"), '{"type": "string"}'
    for line, words in (
        ("/set stats off", "stats is off\n"),
        ("/set stats default", "stats is short\n"),
        ("/set overflow stop", "overflow is stop\n"),
        ("/set overflow default", "overflow is error\n"),
        ("/set --stats none", "tridecode: error: stats must be one of full, short, off or default, got 'none'\n"),
        (f"/set json_schema {schema}", f"json_schema is {schema}\n"),
    ):
        assert chat.handle(line) and chat.read()[1] == words
    assert chat.handle("/set")
    lines = chat.read()[1].splitlines()
    assert [line.split()[0] for line in lines] == [*NAMES, *CHOICES]
    assert 'stop                 ["x"]' in lines and "seed                 none" in lines
    assert f"json_schema          {schema}" in lines
    assert chat.handle("/set json_schema none") and chat.read()[1] == "json_schema is none\n"


def test_set_stats(session):
    speed = "2 tokens · 8.0 tok/s"
    whole = f"{speed} · first token 0.25 s · 4 of 10 reused · context 12 / 100\n"
    chat = session(*(["a", "b"] for _ in range(3)), params=SamplingParams(temperature=0), stats="full")
    for mode, shown in (("full", whole), ("short", f"{speed}\n"), ("off", "")):
        chat.handle(f"/set stats {mode}")
        assert chat.read()[1] == f"stats is {mode}\n"
        chat.handle("/undo"), chat.read()
        chat.handle("one")
        assert chat.read()[1] == shown


def test_save_load_and_export(session, tmp_path):
    chat = session(["one"], ["two"])
    chat.handle("a")
    file, notes = tmp_path / "my talk.json", tmp_path / "notes.txt"
    assert chat.handle(f"/save '{file}'") and stat.S_IMODE(file.stat().st_mode) == 0o600
    chat.handle("b")
    chat.handle(f"/save {file}")
    chat.handle("/clear")
    chat.handle(f"/load {file}")
    assert chat.conversation.turns == (("a", "one"), ("b", "two"))
    assert "continuing 2 turns, the last was 'b'" in chat.read()[1]
    chat.handle(f"/export {tmp_path / 'talk.md'}")
    chat.handle(f"/save {tmp_path / 'same.MD'}")
    assert (tmp_path / "same.MD").read_text() == (tmp_path / "talk.md").read_text()
    whole = "# Conversation\n\n## User\n\na\n\n## Assistant\n\none\n\n## User\n\nb\n\n## Assistant\n\ntwo\n"
    assert (tmp_path / "talk.md").read_text() == whole
    notes.write_text("mine")
    chat.read()
    for command, message in (
        (f"/save {notes}", "exists already; choose another name"),
        (f"/save {tmp_path}", "exists already"),
        (f"/load {notes}", "not a session"),
        (f"/load {tmp_path / 'absent'}", "no such file"),
        ("/load absent", "absent: there is no session and no file of this name"),
        (f"/load {tmp_path}", "not a file"),
        ("/load ~nobody-at-all/\0", "no such file"),
        ("/save a\0b", "null"),
        (f"/save {tmp_path / 'no' / 'where'}", "No such file"),
        (f"/export {tmp_path / 'talk.md'}", "exists already"),
        (f"/save {tmp_path / 'talk.md'}", "exists already"),
        (f"/load {tmp_path / 'talk.md'}", "exported Markdown cannot be loaded"),
        (f"/load {tmp_path / 'no.md'}", "no such file"),
        (f"/export {notes}", "must end in .md"),
        ("/export", "needs FILE.md"),
        ("/save", "needs FILE"),
        ("/undo it", "accepts no argument"),
    ):
        assert chat.handle(command)
        shown = chat.read()[1]
        assert message in shown and shown.count("\n") == 1, (command, shown)
    assert notes.read_text() == "mine" and len(chat.conversation.turns) == 2


def test_save_overwrites_only_files_of_its_conversation(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = session(["one"], ["two"])
    chat.handle("a"), chat.read()
    assert chat.handle("/save x") and chat.read()[1] == "saved to x; /load x continues it\n"
    assert chat.handle(f"/save {'y' * 70}") and chat.read()[1] == f"saved to {'y' * 70}\n", "the note is too long"
    first = (tmp_path / "x").read_text()
    (tmp_path / "link").symlink_to("nowhere")
    chat.handle("/clear"), chat.handle("b"), chat.read()
    for name in ("x", "link"):
        assert chat.handle(f"/save {name}")
        assert chat.read()[1] == f"tridecode: error: {name} exists already; choose another name\n"
    assert (tmp_path / "x").read_text() == first and not (tmp_path / "nowhere").exists()
    chat.handle("/load x"), chat.handle("/undo"), chat.read()
    assert chat.handle("/save x") and "saved to x" in chat.read()[1], "the loaded file was not overwritten"
    assert chat.handle("/save x") and "saved to x" in chat.read()[1], "the saved file was not overwritten"
    (tmp_path / "x").write_text("notes of another program")
    assert chat.handle("/save x") and "exists already" in chat.read()[1]


def test_every_command_is_in_the_help(session):
    chat = session()
    chat.thinking = Thinking(possible=True)  # /help lists /think only if the model supports it.
    chat.handle("/help")
    lines = chat.read()[1].splitlines()
    possible = [name for name in COMMANDS if name != "/adapter"]  # The engine has no adapters.
    assert [line.split()[0] for line in lines if line.startswith("  /")] == [*possible, "//"]
    assert [line for line in lines if not line.startswith(" ")] == [*GROUPS, "Keys"]
    assert max(map(len, lines)) <= 80 and "a line that starts with a space is never a command" in lines[-1]


def test_stats(session):
    chat = session(["a", "b"])
    chat.handle("/stats")
    assert "no complete answer yet" in chat.read()[1]
    chat.handle("x")
    chat.handle("/stats")
    shown = chat.read()[1]
    for part in ("script on", "backend triton, graph full", "\n1 turn\n", "context 12 / 100"):
        assert part in shown
    assert ", speculation off\n" in shown
    chat.engine.plan = SimpleNamespace(ngram=(5, 2))
    chat.handle("/stats")
    assert ", speculation ngram 5:2\n" in chat.read()[1]


def test_copy(session, monkeypatch):
    edge = "x" * (LARGEST - 2)
    chat = session(["<think>hm</think>\n\n**Yes**\x1b[2J"], [f"{edge}xx"], [f"{edge}éé"])
    chat.handle("/copy")
    assert "the conversation has no turns yet\n" in chat.read()[1]
    chat.handle("one")
    chat.read()
    assert chat.handle("/copy") and "/copy needs a terminal; /export FILE.md" in chat.read()[1]
    chat.output = as_terminal(monkeypatch)
    chat.handle("/copy")
    out, err = chat.read()
    assert out == f"\x1b]52;c;{base64.b64encode('**Yes**␛[2J'.encode()).decode()}\x07"
    assert err == "asked the terminal to copy the last answer, 11 characters\n"
    chat.plain, chat.model.capacity = True, 10**6
    for line, copied in (("two", True), ("three", False)):
        chat.handle(line)
        chat.read()
        chat.handle("/copy")
        out, err = chat.read()
        assert ("\x1b]52;" in out) == copied and (f"{LARGEST + 2:,} bytes" in err) != copied
        assert len(out) <= 100_000


def test_copy_code_block(session, monkeypatch):
    answer = "First:\n```sh\nls -l\n```\nThen\n- in a list:\n  ~~~\n  a\n\n  b\n  ~~~\n\n    indented\n"
    chat = session([answer], ["no code"])
    chat.output, chat.plain = as_terminal(monkeypatch), True
    chat.handle("x")
    chat.read()
    for line, copied, words in (
        ("/copy 1", "ls -l", "copy block 1 of 2, 5 characters"),
        ("/copy 2", "a\n\nb", "copy block 2 of 2, 4 characters"),
        ("/copy 3", None, "/copy takes the number of a block, not '3': the last answer has 2 blocks of code"),
        ("/copy all", None, "not 'all'"),
    ):
        chat.handle(line)
        out, err = chat.read()
        assert out == ("" if copied is None else f"\x1b]52;c;{base64.b64encode(copied.encode()).decode()}\x07")
        assert words in err
    chat.handle("y")
    chat.read()
    chat.handle("/copy 1")
    assert "the last answer has no block of code" in chat.read()[1]


def test_plain(session, monkeypatch):
    answer = ["**one**"]
    chat = session(answer, answer, answer)
    chat.output = as_terminal(monkeypatch)
    for line, words in (("/plain", "shown as Markdown"), ("/plain on", "plain text"), ("/plain 1", "on or off")):
        assert chat.handle(line) and words in chat.read()[1]
    for line, shown in (("a", "**one**\n"), ("/plain off", ""), ("b", "one\n"), ("/plain on", ""), ("c", "**one**\n")):
        assert chat.handle(line) and chat.read()[0] == shown
    chat = session(raw=True)
    assert chat.handle("/plain off") and "with --raw" in chat.read()[1] and chat.plain


def as_terminal(monkeypatch) -> Output:
    monkeypatch.setenv("TERM", "xterm")
    output = Output()
    output.tty = True
    return output


@pytest.fixture
def gpu(monkeypatch):
    """Simulate a GPU with 40 of 100 GiB free and 4 TB/s, and a decode pass that reads 100 GB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * 2**30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(local, "free_memory", lambda device: 40 * 2**30)
    monkeypatch.setattr(local, "step_bytes", lambda engine, context, steps: 10**11)
    measured = []
    monkeypatch.setattr(local, "measure_read_bandwidth", lambda device, nbytes: measured.append(nbytes) or 4e12)
    local.read_bandwidth.cache_clear()
    yield measured
    local.read_bandwidth.cache_clear()


def test_stats_with_gpu(session, gpu, monkeypatch):
    chat = session(["a", "b"], ["c"])
    chat.engine.device = chat.model.device = torch.device("cuda", 0)
    chat.handle("/stats")
    shown = chat.read()[1]
    assert "GPU memory: 50.0 GiB by this chat, 60.0 of 100.0 GiB in use" in shown and not gpu, (
        "the output is wrong before the first answer"
    )
    for line in ("x", "/stats", "y", "/stats"):
        chat.handle(line)
    # The script sets 8 tokens per second, and a pass reads 100 GB.
    assert chat.read()[1].count("20% of the read bandwidth (4,000 GB/s, 100.00 GB a token)") == 2
    assert gpu == [2**32], "the GPU was not measured exactly once"
    monkeypatch.setattr(local, "free_memory", lambda device: 2**20)
    local.read_bandwidth.cache_clear()
    chat.handle("/stats")
    assert "too little memory is free" in chat.read()[1] and gpu == [2**32]
