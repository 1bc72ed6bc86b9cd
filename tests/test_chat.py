"""The chat: piped, with an engine that follows a script, and in a real terminal."""

import io
import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import write_tiny, write_tokenizer

from tridecode import Engine, SamplingParams, commands
from tridecode.commands import session as sessions
from tridecode.commands.chat import Chat, converse, one_interrupt
from tridecode.commands.conversation import Conversation
from tridecode.commands.display import Thinking, opens_thinking
from tridecode.commands.lines import PlainReader, join_blocks, unfinished, unquoted
from tridecode.commands.settings import NAMES
from tridecode.commands.slash import COMMANDS
from tridecode.commands.terminal import Output
from tridecode.errors import PromptError
from tridecode.results import Piece, Timings, Usage

ROOT = Path(__file__).parent.parent
# One thread: on a busy machine torch's threads wait for each other in small steps.
ENVIRONMENT = os.environ | {"TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Where this test's history and sessions go."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tridecode"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("chat") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model without stop tokens and with a long context: it talks until it is stopped."""
    path = write_tiny(tmp_path_factory.mktemp("chat") / "endless", "qwen3", max_position_embeddings=60_000)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return path


@pytest.fixture
def piped(capsys, monkeypatch):
    """Run `chat` on lines from a pipe; returns exit code, stdout, stderr."""

    def piped(text, *argv):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = commands.main(["chat", "--device", "cpu", *map(str, argv)])
        return code, *capsys.readouterr()

    return piped


class Script:
    """An engine whose answers are given: each a list of texts, an exception, or a pair of texts and finish_reason."""

    name, capacity, notes, backend, graph = "script", 100, (), "triton", "full"
    device = SimpleNamespace(type="cpu")
    tokenizer = SimpleNamespace(encode=list, encode_chat=lambda messages: "".join(m["content"] for m in messages))

    def __init__(self, *answers):
        self.answers, self.prompts = list(answers), []

    def default_params(self, **given):
        return SamplingParams(**given)

    def stream(self, prompt, params):
        self.prompts.append(prompt)
        answer = self.answers.pop(0)
        if isinstance(answer, PromptError):  # raised by the call itself, as the engine does
            raise answer
        texts, finish = answer if isinstance(answer, tuple) else (answer, "stop")
        return self._pieces(texts, finish)

    def _pieces(self, texts, finish):
        for text in texts:
            if isinstance(text, BaseException):
                raise text
            yield Piece(1, text)
        usage, error = Usage(10, 4, len(texts)), "step 2 gave NaN" if finish == "error" else None
        yield Piece(None, "", None, finish, usage, Timings(0.25, 0.5, 8.0), error)


def said(*turns):
    """Chat messages of alternating turns, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


@pytest.fixture
def session(capsys):
    """A Chat on a Script; `session.read()` returns what it wrote to stdout and stderr."""

    def make(*answers, raw=False, params=None, **options):
        chat = Chat(Script(*answers), params or SamplingParams(), Output(), Conversation(raw), **options)
        chat.read = lambda: tuple(capsys.readouterr())
        return chat

    return make


def test_a_line_is_a_turn(piped, tiny):
    code, out, err = piped("hello\n\nagain", "--model", tiny, "--max-tokens", 6, "--temperature", 0)
    assert code == 0
    notes = err.splitlines()
    assert notes[0] == "running on the CPU" and err.count("running on the CPU") == 1
    speeds = [line for line in notes if line.startswith("6 tokens · ")]
    assert len(speeds) == 2, "an empty line is no turn"
    assert " 0 of 14 prompt tokens reused" in speeds[0]
    engine = Engine.load(tiny, device="cpu")
    params = engine.default_params(temperature=0, max_tokens=6)
    first = engine.generate(said("hello"), params)
    second = engine.generate(said("hello", first.text, "again"), params)
    assert out == f"{first.text}\n{second.text}\n"
    reused, total = speeds[1].split(" · ")[-2].split(" of ")
    assert int(reused) >= 14 and int(total.split()[0]) == second.usage.prompt_tokens


def test_end_of_input_and_exit(piped, tiny):
    assert piped("", "--model", tiny)[:2] == (0, "")
    code, out, err = piped("/exit\nhello\n", "--model", tiny)
    assert (code, out) == (0, "") and "tokens" not in err


def test_a_prompt_that_does_not_fit_ends_its_turn_only(piped, tiny):
    text = "hello\n" + "word " * 100 + "\nagain\n"
    code, out, err = piped(text, "--model", tiny, "--max-tokens", 4, "--temperature", 0, "--max-seq-len", 60)
    errors = [line for line in err.splitlines() if line.startswith("tridecode: error")]
    assert code == 1 and len(errors) == 1
    assert "60" in errors[0] and errors[0].endswith("the turn is not kept")
    assert err.count("4 tokens · ") == 2


def test_a_model_without_a_template_is_refused_before_the_first_turn(piped, tmp_path):
    path = write_tiny(tmp_path / "base", "llama")
    write_tokenizer(path, chat_template=None)
    code, out, err = piped("hello\nagain\n", "--model", path)
    assert (code, out) == (1, "") and err.count("tridecode: error") == 1 and "--raw" in err.splitlines()[-1]
    assert piped("hello\n", "--model", path, "--raw", "--max-tokens", 2)[0] == 0


def test_what_is_kept(session):
    chat = session(["Hi", " there"], PromptError("too long"), (["Half"], "error"), ["Yes"], ["New"])
    for line in ("hello", "much too long", "what", "and now"):
        assert chat.handle(line)
    assert chat.engine.prompts[-1] == said("hello", "Hi there", "and now")
    chat.handle("/clear")
    chat.handle("fresh")
    assert chat.engine.prompts[-1] == said("fresh")
    out, err = chat.read()
    assert out == "Hi there\nHalf\nYes\nNew\n"
    assert "tridecode: error: too long; the turn is not kept\n" in err
    assert "tridecode: error: step 2 gave NaN; the turn is not kept\n" in err


def test_raw_turns_continue_one_text(session):
    chat = session([" there"], [" was"], raw=True)
    chat.handle("  Hello")
    chat.handle("Once")
    assert chat.engine.prompts == ["  Hello", "  Hello there\nOnce"]


def test_the_line_after_an_answer(session):
    chat = session(["a", "b"], (["c"] * 20, "length"), (["d"] * 90, "length"), params=SamplingParams(max_tokens=20))
    chat.handle("one")
    speed = "2 tokens · 8.0 tok/s · first token after 0.25 s · 4 of 10 prompt tokens reused"
    assert chat.read()[1] == f"{speed} · context 12 / 100\n"
    chat.handle("two")
    assert chat.read()[1].startswith("the answer was cut: max_tokens (20) was reached\n20 tokens")
    chat.handle("three")
    assert chat.read()[1].startswith("the answer was cut: the context of 100 tokens is full\n90 tokens")


def test_commands(session):
    chat = session(["/ok"], ["ok"])
    assert chat.handle("/help") and "/clear" in chat.read()[1]
    assert chat.handle("/claer") and "did you mean /clear?" in chat.read()[1]
    assert chat.handle("/zzz") and chat.read()[1] == "there is no command /zzz; /help lists them\n"
    assert not chat.engine.prompts
    assert chat.handle("/usr/bin is what?") and chat.handle(" /exit")
    assert [prompt[-1]["content"] for prompt in chat.engine.prompts] == ["/usr/bin is what?", "/exit"]
    assert not chat.handle("/exit")


def test_an_interrupted_answer_is_kept(session):
    chat = session(["Half", KeyboardInterrupt()], [KeyboardInterrupt()], ["fine"], interactive=True)
    for line in ("one", "two", "three"):
        assert chat.handle(line)
    assert chat.engine.prompts[1:] == [said("one", "Half", "two"), said("one", "Half", "three")]
    out, err = chat.read()
    assert out == "Half\nfine\n"
    assert "stopped after 1 token and" in err and err.count("the turn is not kept") == 1


def test_more_interrupts_lose_nothing(session, monkeypatch):
    chat = session(["Half", KeyboardInterrupt()], ["fine"], interactive=True)
    note = chat.output.note

    def interrupted_note(message):
        os.kill(os.getpid(), signal.SIGINT)
        note(message)

    stream = chat.engine.stream
    monkeypatch.setattr(chat.output, "note", interrupted_note)
    monkeypatch.setattr(chat.engine, "stream", lambda *args: interrupting(stream(*args)))
    assert chat.handle("one")
    chat.output.note, chat.engine.stream = note, stream
    assert chat.handle("two")
    assert chat.engine.prompts[1] == said("one", "Half", "two")


def interrupting(pieces):
    """The pieces, with a real Ctrl-C where the script has one."""
    try:
        yield from pieces
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_a_piped_chat(session):
    with pytest.raises(KeyboardInterrupt):
        session([KeyboardInterrupt()]).handle("one")


def test_out_of_memory_ends_its_turn_only(session):
    chat = session([RuntimeError("CUDA out of memory")], ["fine"])
    assert chat.handle("one") and chat.handle("two")
    assert chat.engine.prompts[1] == said("two")
    assert "CUDA out of memory" in chat.read()[1]


def test_impatience_is_one_interrupt():
    seen = 0
    before = signal.getsignal(signal.SIGINT)
    with one_interrupt(True):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            seen += 1
            os.kill(os.getpid(), signal.SIGINT)
    assert seen == 1 and signal.getsignal(signal.SIGINT) is before


def test_a_conversation_does_not_keep_what_it_only_asked():
    conversation = Conversation(raw=False)
    assert conversation.prompt("x") == conversation.prompt("x") == said("x")


def test_retry_undo_and_edit(session):
    chat = session(["one"], ["two"], ["three"], ["four"], PromptError("no"), ["five"])
    for line in ("/retry", "/undo", "/edit x"):
        assert chat.handle(line) and chat.read()[1] == "nothing was said yet\n"
    for line in ("a", "b", "/retry"):
        assert chat.handle(line)
    assert chat.engine.prompts[2] == said("a", "one", "b")
    assert chat.handle("/edit c") and chat.engine.prompts[3] == said("a", "one", "c")
    assert chat.handle("/retry")
    assert chat.conversation.turns == (("a", "one"), ("c", "four")), "an answer that fails replaces none"
    assert chat.handle("/undo") and chat.conversation.turns == (("a", "one"),)
    assert "took back 'c'; 1 turn left" in chat.read()[1]
    assert chat.handle("/edit") and "needs TEXT" in chat.read()[1]


def test_edit_puts_the_message_into_the_prompt(session):
    chat = session(["one"], ["two"], interactive=True)
    chat.handle(" /etc/passwd is what?")
    chat.handle("/edit")
    typed, drafts = ["/etc/shadow is what?", "/exit"], []
    reader = SimpleNamespace(read=lambda draft: drafts.append(draft) or typed.pop(0))
    assert converse(chat, reader) == 0
    assert drafts == [" /etc/passwd is what?", ""]
    assert chat.conversation.turns == (("/etc/shadow is what?", "two"),)


def test_the_system_turn(session):
    chat = session(["one"], ["two"], ["three"])
    system = [{"role": "system", "content": "Be brief."}]
    chat.handle("/system Be brief.")
    chat.handle("a")
    chat.handle("/clear")
    chat.handle("b")
    assert chat.engine.prompts == [system + said("a"), system + said("b")]
    chat.handle("/system")
    assert "system: Be brief." in chat.read()[1]
    chat.handle("/system -")
    chat.handle("c")
    assert chat.engine.prompts[2] == said("b", "two", "c")
    chat = session(raw=True)
    assert chat.handle("/system x") and "--raw" in chat.read()[1] and chat.conversation.system is None


@pytest.mark.parametrize("typed, name, value", [
    ("temperature 0", "temperature", 0),
    ("top-p 0.5", "top_p", 0.5),
    ("--top_k 3", "top_k", 3),
    ("seed 7", "seed", 7),
    ("seed none", "seed", None),
    ("stop ###", "stop", ("###",)),
    ('stop ["a", "\\n"]', "stop", ("a", "\n")),
    ("stop 7", "stop", ("7",)),
    ("stop none", "stop", ()),
    ("stop_token_ids 1, 2", "stop_token_ids", (1, 2)),
    ('logit_bias {"5": -3.5}', "logit_bias", {5: -3.5}),
    ("ignore_eos on", "ignore_eos", True),
    ("max_tokens 5", "max_tokens", 5),
    ("min_p default", "min_p", 0.0),
])
def test_set(session, typed, name, value):
    chat = session(params=SamplingParams(seed=1, min_p=0.3))
    assert chat.handle(f"/set {typed}")
    assert getattr(chat.params, name) == value
    assert chat.read()[1].startswith(f"{name} is ")


@pytest.mark.parametrize("typed, says", [
    ("temperature warm", "temperature must be a number from 0 to 100, got 'warm'"),
    ("temperature NaN", "temperature must be"),
    ("temperature true", "temperature must be"),
    ("temperature", "needs a value; it is 1.0"),
    ("temprature 1", "did you mean temperature?"),
    ("xyz 1", "/set shows all"),
    ("top_p [1]", "top_p must be"),
    ("stop_token_ids a", "stop_token_ids"),
    ("stop []", None),
    ('stop [""]', "non-empty"),
    ("logit_bias 5", "logit_bias must be like"),
    ("ignore_eos maybe", "on or off"),
    ("seed " + "9" * 5000, "seed must be"),
    ("top_k " + "[" * 2000, "top_k must be"),
])
def test_set_refuses(session, typed, says):
    chat = session()
    assert chat.handle(f"/set {typed}") and chat.params == SamplingParams()
    shown = chat.read()[1]
    assert shown.count("\n") == 1 and (says or "stop is []") in shown


def test_set_alone_shows_every_option(session):
    chat = session(params=SamplingParams(stop=["x"]))
    assert chat.handle("/set")
    lines = chat.read()[1].splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert 'stop                 ["x"]' in lines and "seed                 none" in lines


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
    whole = "# Conversation\n\n## User\n\na\n\n## Assistant\n\none\n\n## User\n\nb\n\n## Assistant\n\ntwo\n"
    assert (tmp_path / "talk.md").read_text() == whole
    notes.write_text("mine")
    chat.read()
    for command, says in (
        (f"/save {notes}", "not a session"),
        (f"/load {notes}", "not a session"),
        (f"/load {tmp_path / 'absent'}", "no such file"),
        (f"/load {tmp_path}", "not a file"),
        ("/load ~nobody-at-all/\0", "no such file"),
        ("/save a\0b", "null"),
        (f"/save {tmp_path / 'no' / 'where'}", "No such file"),
        (f"/export {tmp_path / 'talk.md'}", "exists already"),
        (f"/export {notes}", "must end in .md"),
        ("/export", "needs FILE.md"),
        ("/save", "needs FILE"),
        ("/undo it", "takes nothing"),
    ):
        assert chat.handle(command)
        shown = chat.read()[1]
        assert says in shown and shown.count("\n") == 1, (command, shown)
    assert notes.read_text() == "mine" and len(chat.conversation.turns) == 2


def test_every_command_is_in_the_help(session):
    chat = session()
    chat.handle("/help")
    lines = chat.read()[1].splitlines()
    assert [line.split()[0] for line in lines[: len(COMMANDS)]] == list(COMMANDS)


def test_stats(session):
    chat = session(["a", "b"])
    chat.handle("/stats")
    assert "no answer yet" in chat.read()[1]
    chat.handle("x")
    chat.handle("/stats")
    shown = chat.read()[1]
    for part in ("script on", "backend triton, graph full", "1 turn, 1 of", "context 12 / 100", "2 tokens in 1 answer"):
        assert part in shown


def test_a_turn_that_does_not_fit_is_refused(session):
    chat = session(["x" * 60], ["fine"])
    assert chat.handle("one") and chat.handle("y" * 60)
    shown = chat.read()[1]
    assert "this turn needs 123 tokens, the context holds 100" in shown and "--overflow drop-oldest" in shown
    assert chat.handle("two"), "the conversation goes on"
    assert chat.engine.prompts[1] == said("one", "x" * 60, "two")


def test_overflow_can_end_the_chat(session):
    chat = session(["x" * 60], overflow="stop")
    assert chat.handle("one") and not chat.handle("y" * 60)
    assert chat.exit_code == 1 and "needs 123 tokens, the context holds 100" in chat.read()[1]
    assert chat.conversation.turns == (("one", "x" * 60),)


def test_overflow_can_drop_the_oldest_turns(session):
    chat = session(["a" * 20], ["b" * 20], ["c" * 20], ["d"], ["e"], overflow="drop-oldest")
    chat.handle("/system Sys")
    for line in ("one", "two", "six"):
        chat.handle(line)
    assert "no longer sent" not in chat.read()[1]
    chat.handle("z" * 40)
    assert chat.engine.prompts[-1] == [{"role": "system", "content": "Sys"}, *said("six", "c" * 20, "z" * 40)]
    note = "112 tokens do not fit in the context of 100: turns 1 to 2 are no longer sent to the model"
    assert note in chat.read()[1]
    assert len(chat.conversation.turns) == 4, "they stay in the conversation"
    chat.handle("y" * 30)
    assert chat.engine.prompts[-1][1:] == said("z" * 40, "d", "y" * 30)
    assert "97 tokens do not fit in the context of 100 with room for the answer (12): turn 3 is" in chat.read()[1]
    chat.handle("w" * 98)
    assert "this turn alone needs 101 tokens, the context holds 100" in chat.read()[1]
    assert chat.conversation.dropped == 3 and len(chat.conversation.turns) == 5


def test_tokens_are_counted_only_where_they_could_be_too_many(session):
    counted = []
    chat = session(["a"], ["b"], ["c"], ["d"])
    chat.engine.capacity = 10_000
    chat.engine.tokenizer = SimpleNamespace(encode_chat=lambda messages: counted.append(len(messages)) or [0])
    for line in ("one", "two", "x" * 3000, "/system Sys", "four"):
        chat.handle(line)
    assert counted == [1, 5, 8], "the first, one that is long, and one after the system turn changed"


def test_blocks():
    lines = ["one\n", '"""two\n', "\n", '/three"""\n', '"""four"""\r\n', '"""five\n', "six"]
    assert list(join_blocks(lines)) == ["one", '"""two\n\n/three"""', '"""four"""', '"""five\nsix']
    assert unquoted('"""two\n\n/three"""') == "two\n\n/three" and unquoted('"""five\nsix') == "five\nsix"
    assert unquoted("one") is None and unquoted('""""""') == ""
    assert unfinished('"""') and unfinished('"""a') and unfinished('"""\n""') and not unfinished('"""a""" ')


def test_a_block_is_never_a_command(session):
    chat = session(["one"])
    assert chat.handle('"""\n/exit\nnow\n"""') and chat.engine.prompts == [said("/exit\nnow")]


def test_turns_are_saved_as_they_are_complete(session, state):
    store = sessions.Store(sessions.named("work"), "m")
    chat = session(["one"], (["Half"], "error"), ["two"], ["three"], store=store)
    chat.handle("a")
    chat.handle("b")
    assert sessions.read(store.path).turns == (("a", "one"),)
    chat.handle("/undo")
    assert sessions.read(store.path).turns == ()
    chat.handle("c")
    first = store.path
    chat.handle("/clear")
    assert "stays in session work" in chat.read()[1]
    chat.handle("d")
    assert sessions.read(first).turns == (("c", "two"),) and sessions.read(store.path).turns == (("d", "three"),)
    assert sessions.last_path() == store.path != first


def test_a_session_that_cannot_be_saved_goes_on(session, state):
    state.mkdir(parents=True)
    (state / "sessions").write_text("in the way")
    chat = session(["one"], ["two"], store=sessions.Store(sessions.named("work"), "m"))
    assert chat.handle("a") and chat.handle("b")
    assert chat.engine.prompts[1] == said("a", "one", "b")
    assert chat.read()[1].count("tridecode: error: the session is not saved: ") == 2


def test_resume_and_named_sessions(piped, tiny, state):
    few = ("--model", tiny, "--max-tokens", 3, "--temperature", 0)
    code, _, err = piped("", *few, "--resume")
    assert code == 1 and "no session to continue" in err and err.count("\n") == 1
    assert piped("hello\n", *few)[0] == 0 and not (state / "sessions").exists(), "pipes keep nothing unless asked"
    assert piped("hello\n", *few, "--session", "work", "--system", "Be brief.")[0] == 0
    code, _, err = piped("/system\nagain\n", *few, "--resume")
    assert code == 0 and "session work: continuing 1 turn, the last was 'hello'" in err and "Be brief." in err
    saved = sessions.read(sessions.named("work"))
    assert [user for user, _ in saved.turns] == ["hello", "again"] and saved.system == "Be brief."
    code, _, err = piped("", *few, "--session", "work", "--raw")
    assert code == 1 and "leave out --raw" in err
    file = sessions.named("work")
    file.write_bytes(file.read_bytes()[:50])
    for option in (["--resume"], ["--session", "work"]):
        code, _, err = piped("more\n", *few, *option)
        assert code == 1 and "not a session" in err and err.count("\n") == 1
    assert len(file.read_bytes()) == 50
    code, _, err = piped("", *few, "--session", "../x")
    assert code == 1 and "session name" in err


READY = "\x1b[?2004h"  # the prompt is there and reads keys
STREAMS = r"\x1b\[\?2004l[^\n]*\n[^\x1b]*[^\s\x1b]{30}"  # the prompt is gone, and text comes


@pytest.fixture
def terminal(state):
    """Start a chat in a pseudo-terminal; `child.screen` is all that it showed."""
    pexpect = pytest.importorskip("pexpect")
    children = []

    def terminal(*argv):
        child = pexpect.spawn(
            sys.executable,
            ["cli.py", "chat", "--device", "cpu", *map(str, argv)],
            cwd=str(ROOT),
            env=ENVIRONMENT | {"XDG_STATE_HOME": str(state.parent)},
            encoding="utf-8",
            codec_errors="replace",  # the terminal's ^C may come in the middle of a character
            timeout=30,
            dimensions=(50, 200),
        )
        children.append(child)
        child.screen = child.logfile_read = io.StringIO()
        child.expect_exact("/help lists the commands")
        child.expect_exact(READY)
        return child

    yield terminal
    for child in children:
        child.close(force=True)
        assert "Traceback" not in child.screen.getvalue() and "Exception" not in child.screen.getvalue()


def leaves(child, code=0):
    child.expect(pytest.importorskip("pexpect").EOF)
    child.close()
    assert child.exitstatus == code


def test_in_a_terminal(endless, terminal):
    child = terminal("--model", endless, "--seed", 3, "--temperature", 0.7, "--plain")
    child.send("half a line")
    child.expect_exact("e\x1b")
    child.sendintr()
    child.expect_exact("leaves")
    child.expect_exact(READY)
    for line in ("hello", "again"):
        child.send(f"{line}\r")
        child.expect(STREAMS)  # it streams: this model never ends its answer by itself
        began = time.monotonic()
        child.sendintr()
        child.expect(r"stopped after (\d+) tokens? and [\d.]+ s; kept in the conversation")
        assert int(child.match[1]) > 0 and time.monotonic() - began < 2
        child.expect_exact(READY)
    child.send("/stats\r")
    child.expect_exact("2 turns, 2 of them sent to the model")
    child.expect_exact(READY)
    time.sleep(1)  # a Ctrl-C right after an answer was stopped was meant for that answer
    child.sendintr()
    child.expect_exact("leaves")
    child.sendintr()
    leaves(child)
    controls = {chr(code) for code in range(32)} - set("\r\n\t\x1b\x07\x08")
    assert not set(child.screen.getvalue()) & controls, "the model's control characters"


def test_markdown_in_a_terminal(endless, terminal, state):
    child = terminal("--model", endless, "--seed", 3)
    child.send("hello\r")
    child.expect_exact("\x1b[?2004l")
    child.expect(r"[^\s\x1b]{20}")
    time.sleep(0.5)
    began = time.monotonic()
    child.sendintr()
    child.expect(r"stopped after \d+ tokens? and [\d.]+ s; kept in the conversation")
    assert time.monotonic() - began < 2
    child.expect_exact(READY)
    time.sleep(1)
    child.sendeof()
    leaves(child)
    assert child.screen.getvalue().count("\x1b[?25l") <= child.screen.getvalue().count("\x1b[?25h"), "cursor hidden"
    (file,) = (state / "sessions").iterdir()
    assert len(sessions.read(file).turns[0][1]) > 20


class Answer:
    """Where an answer is shown."""

    def __init__(self):
        self.shown = []
        self.finish = self.abort = lambda: self.shown.append("|")
        self.push = self.shown.append


@pytest.mark.parametrize("pieces, opened, hide, out, answer", [
    (["<thi", "nk>\n", "Let me ", "see.\n</think>", "\n\nYes"], False, False, "Let me see.\n", "Yes"),
    (["Let me ", "see.", "</think>\n\nYes"], True, False, "Let me see.\n", "Yes"),
    (["<think>", "Let me ", "see.", "</think>Yes"], False, True, "", "Yes"),
    (["<think>", "Let", " me \x1b[2J"], False, False, "Let me ␛[2J\n", ""),
    (["Yes <think>", " no"], False, False, "", "Yes <think> no"),
    (["<think>\n\n</think>\n\n", "Yes"], False, False, "", "Yes"),
])
def test_thinking_is_shown_apart(capsys, pieces, opened, hide, out, answer):
    shows = Answer()
    display = Thinking(Output(), shows, opened, hide)
    for piece in pieces:
        display.push(piece)
    display.finish()
    display.abort()
    read = capsys.readouterr()
    assert read.out == out and "".join(shows.shown) == answer + "||"
    assert ("thought for " in read.err) == (bool(out) or hide)


def test_templates_that_begin_the_thinking():
    for text, opens in (("<|im_start|>assistant\n<think>\n", True), ("assistant\n", False)):
        tokenizer = SimpleNamespace(encode_chat=lambda messages: [1], decode=lambda ids, skip_special, t=text: t)
        assert opens_thinking(tokenizer) == opens


def test_killed_in_the_middle_of_an_answer(endless, terminal, state):
    child = terminal("--model", endless, "--seed", 3, "--max-tokens", 5, "--plain")
    child.send("first\r")
    child.expect_exact("5 tokens")
    child.expect_exact(READY)
    child.send("/set max_tokens none\r")
    child.expect_exact("max_tokens is none")
    child.send("second\r")
    child.expect(STREAMS)
    child.kill(signal.SIGKILL)
    child.wait()
    saved = sessions.read(next((state / "sessions").iterdir()))
    assert [user for user, _ in saved.turns] == ["first"]


def test_lines_are_edited(terminal, state):
    child = terminal("--max-tokens", 2, "--temperature", 0)

    def ask(keys):
        child.send(keys)
        child.expect_exact("context ")
        child.expect_exact(READY)

    ask("\x1b[200~pasted one\n/exit\nthree\n\x1b[201~\r")
    ask("alt\x1b\renter\r")
    ask('"""quoted\r/exit\r"""\r')
    child.send("/syx\x7f\t Be brief.\r")
    child.expect_exact("the system turn is set")
    child.expect_exact(READY)
    child.send("/edit\r")
    child.expect_exact("/exit")
    child.sendintr()
    child.expect_exact("leaves")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    saved = sessions.read(file)
    users = [user for user, _ in saved.turns]
    assert users[:3] == ["pasted one\n/exit\nthree", "alt\nenter", "quoted\n/exit"]
    assert saved.system == "Be brief.", "completed from /sy"
    history = state / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600

    child = terminal("--max-tokens", 2, "--resume")
    assert f"session {file.stem}: continuing {len(users)} turns" in child.screen.getvalue()
    child.send("\x1b[A\r")  # /edit, the last line of the chat before
    child.expect_exact("/exit")
    child.send("\x1b\rmore\r")
    child.expect_exact("context ")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    assert len(sessions.read(file).turns) == len(users) and sessions.read(file).turns[-1][0].endswith("\nmore")


@pytest.mark.parametrize("typed, asked", [
    ([KeyboardInterrupt, KeyboardInterrupt], 0),
    ([KeyboardInterrupt, "one", KeyboardInterrupt, EOFError], 1),
    (["one", "/exit", "two"], 1),
])
def test_only_two_interrupts_in_a_row_leave(session, monkeypatch, typed, asked):
    keys = iter(typed)

    def type_next(prompt):
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", type_next)
    chat = session(["fine"], interactive=True)
    assert converse(chat, PlainReader()) == 0
    assert len(chat.engine.prompts) == asked
    assert next(keys, None) == ("two" if "two" in typed else None)
