"""The chat: piped, with an engine that follows a script, and in a real terminal."""

import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import write_tiny

from tridecode import Engine, SamplingParams, commands
from tridecode.commands.chat import Chat, Conversation, converse, one_interrupt
from tridecode.commands.terminal import Output
from tridecode.errors import PromptError
from tridecode.results import Piece, Timings, Usage

ROOT = Path(__file__).parent.parent
# One thread: on a busy machine torch's threads wait for each other in small steps.
ENVIRONMENT = os.environ | {"TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


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

    name, capacity, notes = "script", 100, ()
    device = SimpleNamespace(type="cuda")

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

    def make(*answers, raw=False, interactive=False):
        chat = Chat(Script(*answers), SamplingParams(), Output(), raw, interactive)
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
    reused, total = speeds[1].split(" · ")[-1].split(" of ")
    assert int(reused) >= 14 and int(total.split()[0]) == second.usage.prompt_tokens


def test_end_of_input_and_exit(piped, tiny):
    assert piped("", "--model", tiny)[:2] == (0, "")
    code, out, err = piped("/exit\nhello\n", "--model", tiny)
    assert (code, out) == (0, "") and "tokens" not in err


def test_a_prompt_that_does_not_fit_ends_its_turn_only(piped, tiny):
    text = "hello\n" + "word " * 100 + "\nagain\n"
    code, out, err = piped(text, "--model", tiny, "--max-tokens", 4, "--temperature", 0, "--max-seq-len", 60)
    errors = [line for line in err.splitlines() if line.startswith("tridecode: error")]
    assert code == 0 and len(errors) == 1
    assert "60" in errors[0] and errors[0].endswith("the turn is not kept")
    assert err.count("4 tokens · ") == 2


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
    chat = session(["a", "b"], (["c"] * 20, "length"), (["d"] * 90, "length"))
    chat.handle("one")
    assert chat.read()[1] == "2 tokens · 8.0 tok/s · first token after 0.25 s · 4 of 10 prompt tokens reused\n"
    chat.handle("two")
    assert chat.read()[1].startswith("the answer was cut: --max-tokens was reached\n20 tokens")
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


def test_in_a_terminal(endless):
    pexpect = pytest.importorskip("pexpect")
    argv = ["cli.py", "chat", "--model", str(endless), "--device", "cpu", "--seed", "3", "--temperature", "0.7"]
    child = pexpect.spawn(
        sys.executable, argv, cwd=str(ROOT), env=ENVIRONMENT, encoding="utf-8", timeout=60, dimensions=(50, 200)
    )
    screen = child.logfile_read = io.StringIO()
    child.expect_exact("running on the CPU")
    child.expect_exact("/help lists the commands")
    child.expect_exact("> ")

    child.sendline("hello")
    child.expect_exact("hello")
    child.expect(r"\S{30}")  # it streams: this model never ends its answer by itself
    child.sendintr()
    child.expect(r"stopped after (\d+) tokens? and [\d.]+ s; kept in the conversation")
    tokens = int(child.match[1])
    assert tokens > 0
    child.expect_exact("> ")

    child.sendline("again")
    child.expect_exact("again")
    child.expect(r"\S{30}")
    child.sendintr()
    child.expect(r"stopped after \d+ tokens?")
    child.expect_exact("> ")

    child.send("half a line")
    child.expect_exact("half a line")
    time.sleep(0.5)  # input() does not see a Ctrl-C while it still handles a key
    child.sendintr()
    child.expect_exact("> ")
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    shown = screen.getvalue()
    assert "Traceback" not in shown and "Exception" not in shown
    assert not set(shown) & {chr(code) for code in range(32)} - set("\r\n\t\x1b\x07"), "the model's control characters"


def test_ctrl_d_leaves_a_terminal(tiny):
    pexpect = pytest.importorskip("pexpect")
    argv = ["cli.py", "chat", "--model", str(tiny), "--device", "cpu"]
    child = pexpect.spawn(sys.executable, argv, cwd=str(ROOT), env=ENVIRONMENT, encoding="utf-8", timeout=60)
    child.expect_exact("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


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
    assert converse(chat) == 0
    assert len(chat.engine.prompts) == asked
    assert next(keys, None) == ("two" if "two" in typed else None)
