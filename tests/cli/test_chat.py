"""Chats in a pipe, and with a scripted engine."""

import asyncio
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
from chats import as_messages
from checkpoints import write_tiny, write_tokenizer

from tridecode import Engine, SamplingParams
from tridecode.cli.chat import saving, settings
from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.command import converse
from tridecode.cli.chat.conversation import Conversation
from tridecode.cli.chat.display import Display
from tridecode.cli.chat.lines import PlainReader, join_blocks, unfinished, unquoted
from tridecode.cli.chat.local import opens_thinking
from tridecode.cli.signals import one_interrupt
from tridecode.cli.terminal import Output
from tridecode.errors import PromptError
from tridecode.text.thinking import ThinkSplitter
from tridecode.text.tokenizer import ChatPrompt


def test_line_is_turn(piped, tiny):
    code, out, err = piped("hello\n\nagain", "--model", tiny, "--max-tokens", 6, "--temperature", 0)
    assert code == 0
    notes = err.splitlines()
    assert notes[0] == "running on the CPU" and err.count("running on the CPU") == 1
    speeds = [line for line in notes if line.startswith("6 tokens · ")]
    assert len(speeds) == 2, "an empty line was sent as a turn"
    assert " 0 of 14 reused" in speeds[0]
    engine = Engine.load(tiny, device="cpu")
    params = engine.default_params(temperature=0, max_tokens=6)
    first = engine.generate(as_messages("hello"), params)
    second = engine.generate(as_messages("hello", first.text, "again"), params)
    assert out == f"{first.text}\n{second.text}\n"
    reused, total = speeds[1].split(" · ")[-2].split(" of ")
    assert int(reused) >= 14 and int(total.split()[0]) == second.usage.prompt_tokens


def test_quiet_hides_notes_only(piped, tiny):
    few = ("--model", tiny, "--max-tokens", 2, "--temperature", 0, "--quiet")
    assert piped("hello\n", *few)[::2] == (0, "the answer was cut: max_tokens (2) was reached\n")
    assert "2 tokens" in piped("hello\n", *few, "--stats", "short")[2]
    assert piped("x " * 3000, *few, "--max-seq-len", 60)[2].startswith("tridecode: error: "), "the error was not shown"


def test_end_of_input_and_exit(piped, tiny):
    assert piped("", "--model", tiny)[:2] == (0, "")
    code, out, err = piped("/exit\nhello\n", "--model", tiny)
    assert (code, out) == (0, "") and "tokens" not in err


@pytest.fixture
def pipe(monkeypatch):
    """Make stdin a pipe, and return its other end."""
    read, write = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(write, "w") as end:
        monkeypatch.setattr("sys.stdin", stdin)
        yield end


@pytest.mark.parametrize("data, message", [("", "Hello"), ("a diff\n", "Hello\na diff")], ids=["empty", "text"])
def test_piped_text_follows_the_question(run, pipe, state, data, message):
    pipe.write(data)
    pipe.close()
    code, out, err = run("chat", "Hello", "--device", "cpu", "--max-tokens", 2, "--session", "work")
    assert code == 0 and out.count("\n") == 1
    assert [user for user, _ in sessions.read(sessions.named("work")).turns] == [message]


def test_open_pipe_is_noted_before_the_model_is_loaded(run, pipe, state, monkeypatch):
    monkeypatch.setattr("tridecode.cli.inputs.STDIN_NOTE_DELAY", 0.05)
    note = Output.note
    monkeypatch.setattr(Output, "note", lambda *args, **options: (note(*args, **options), pipe.close()))
    code, out, err = run("chat", "Hello", "--model", "/nowhere")
    waiting, error = err.splitlines()
    assert code == 1 and waiting.startswith("waiting for stdin, which is open and sends no data; </dev/null")
    assert error.startswith("tridecode: error: /nowhere: no such directory")


def test_endless_line_is_refused(piped, monkeypatch):
    monkeypatch.setattr("tridecode.cli.inputs.LARGEST", 1_000_000)
    code, out, err = piped("Hello\n" + "0" * 2_000_000, "--max-tokens", 2)
    assert code == 1 and out.count("\n") == 1
    assert err.splitlines()[-1].startswith("tridecode: error: stdin: a line longer than 1,000,000 characters")
    monkeypatch.setattr("tridecode.cli.inputs.READ_SIZE", 2)
    assert piped("Hello\nHello", "--max-tokens", 2)[1].count("\n") == 2


def test_byte_order_marks_are_removed(piped):
    code, out, err = piped("\ufeff/set seed 7\n\ufeff/exit\n", "--max-tokens", 2)
    assert code == 0 and "seed is 7\n" in err and out == "", "a byte order mark was read as a character"


def test_missing_template_is_refused_at_start(piped, tmp_path):
    path = write_tiny(tmp_path / "base", "llama")
    write_tokenizer(path, chat_template=None)
    code, out, err = piped("hello\nagain\n", "--model", path)
    assert (code, out) == (1, "") and err.count("tridecode: error") == 1 and "--raw" in err.splitlines()[-1]
    assert piped("hello\n", "--model", path, "--raw", "--max-tokens", 2)[0] == 0


def test_failed_turns_are_not_kept(session):
    chat = session(["Hi", " there"], PromptError("too long"), (["Half"], "error"), ["Yes"], ["New"])
    for line in ("hello", "much too long", "what", "and now"):
        assert chat.handle(line)
    assert chat.engine.prompts[-1] == as_messages("hello", "Hi there", "and now")
    chat.handle("/clear")
    chat.handle("fresh")
    assert chat.engine.prompts[-1] == as_messages("fresh")
    out, err = chat.read()
    assert out == "Hi there\nHalf\nYes\nNew\n"
    assert "tridecode: error: too long; the turn is not kept\n" in err
    assert "tridecode: error: step 2 gave NaN; the turn is not kept\n" in err


def test_raw_turns_are_concatenated(session):
    chat = session([" there"], [" was"], raw=True)
    chat.handle("  Hello")
    chat.handle("Once")
    assert chat.engine.prompts == ["  Hello", "  Hello there\nOnce"]


def test_statistics_line(session):
    params = SamplingParams(temperature=0, max_tokens=20)
    chat = session(["a", "b"], (["c"] * 20, "length"), (["d"] * 91, "length"), params=params)
    chat.handle("one")
    speed = "2 tokens · 8.0 tok/s · first token 0.25 s · 4 of 10 reused"
    assert chat.read()[1] == f"{speed} · context 12 / 100\n"
    chat.handle("two")
    assert chat.read()[1].startswith("the answer was cut: max_tokens (20) was reached\n20 tokens")
    chat.handle("three")
    shown = chat.read()[1]
    assert shown.startswith("the answer was cut: the context of 100 tokens is full\n91 tokens")
    assert shown.endswith("context 100 / 100\n"), "the line shows a wrong number of context tokens"


def test_interrupted_answer_is_kept(session):
    chat = session(["Half", KeyboardInterrupt()], [KeyboardInterrupt()], ["fine"], interactive=True)
    for line in ("one", "two", "three"):
        assert chat.handle(line)
    assert chat.engine.prompts[1:] == [as_messages("one", "Half", "two"), as_messages("one", "Half", "three")]
    out, err = chat.read()
    assert out == "Half\nfine\n"
    assert "stopped after 1 token and" in err and err.count("the turn is not kept") == 1


def test_repeated_interrupts_keep_answer(session):
    def interrupting(chunks):
        try:
            yield from chunks
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)

    def interrupted_note(message):
        os.kill(os.getpid(), signal.SIGINT)
        note(message)

    chat = session(["Half", KeyboardInterrupt()], ["fine"], interactive=True)
    note, stream = chat.output.note, chat.engine.stream
    chat.output.note = interrupted_note
    chat.engine.stream = lambda *args, **options: interrupting(stream(*args, **options))
    assert chat.handle("one")
    chat.output.note, chat.engine.stream = note, stream
    assert chat.handle("two")
    assert chat.engine.prompts[1] == as_messages("one", "Half", "two")


def test_interrupt_ends_piped_chat(session):
    with pytest.raises(KeyboardInterrupt):
        session([KeyboardInterrupt()]).handle("one")


def test_one_interrupt_ignores_repeats():
    seen = 0
    before = signal.getsignal(signal.SIGINT)
    with one_interrupt(True):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            seen += 1
            os.kill(os.getpid(), signal.SIGINT)
    assert seen == 1 and signal.getsignal(signal.SIGINT) is before


def test_quoted_blocks():
    lines = ["one\n", '"""two\n', "\n", '/three"""\n', '"""four"""\r\n', '"""five\n', "six"]
    assert list(join_blocks(lines)) == ["one", '"""two\n\n/three"""', '"""four"""', '"""five\nsix']
    assert unquoted('"""two\n\n/three"""') == "two\n\n/three" and unquoted('"""five\nsix') == "five\nsix"
    assert unquoted("one") is None and unquoted('""""""') == ""
    assert list(join_blocks(['"""\n', '"""\n', '""""\n', '""\n', 'a""" \n', '"""\n'])) == [
        '"""\n"""',
        '""""\n""\na""" ',
        '"""',
    ]
    assert unfinished('"""') and unfinished('"""a') and unfinished('"""\n""') and not unfinished('"""a""" ')


def test_a_program_that_begins_with_a_docstring_is_not_a_block():
    program = '"""Doc."""\nimport os\n\n\ndef f():\n    """More."""\n    return 1'
    assert not unfinished(program) and unquoted(program) is None
    assert not unfinished(f'"""{program}"""') and unquoted(f'"""{program}"""') == program
    assert unfinished(f'"""\n{program}'), "the block that contains the program is still open"


def test_block_parsing_is_linear():
    began = time.monotonic()
    (block,) = join_blocks(['"""\n', *["a line of the block\n"] * 200_000, '"""\n'])
    assert len(block) == 200_000 * 20 + 7 and time.monotonic() - began < 15


def test_each_turn_is_saved(session, state):
    store = sessions.Store(sessions.named("work"))
    chat = session(["one"], (["Half"], "error"), ["two"], ["three"], store=store)
    chat.handle("a")
    chat.handle("b")
    assert sessions.read(store.path).turns == (("a", "one"),)
    chat.handle("/undo")
    assert not store.path.exists(), "a session without turns remained"
    chat.handle("c")
    first = store.path
    chat.handle("/clear")
    assert "the previous one is saved; /load work continues it\n" in chat.read()[1]
    chat.handle("d")
    assert sessions.read(first).turns == (("c", "two"),) and sessions.read(store.path).turns == (("d", "three"),)
    assert sessions.last_path() == store.path != first


def test_chat_continues_if_saving_fails(session, state):
    state.mkdir(parents=True)
    (state / "sessions").write_text("in the way")
    chat = session(["one"], ["two"], store=sessions.Store(sessions.named("work")))
    assert chat.handle("a") and chat.handle("b")
    assert chat.engine.prompts[1] == as_messages("a", "one", "b")
    assert chat.read()[1].count("tridecode: error: the session is not saved: ") == 2 and chat.exit_code == 1


def test_resume_and_named_sessions(piped, tiny, state):
    few = ("--model", tiny, "--max-tokens", 3, "--temperature", 0)
    code, _, err = piped("", *few, "--resume")
    assert code == 1 and "no session to continue" in err and err.count("\n") == 1
    assert piped("hello\n", *few)[0] == 0 and not (state / "sessions").exists(), (
        "a session was saved without --session or --resume"
    )
    code, _, err = piped("hello\n", *few, "--session", "work", "--system", "Be brief.")
    assert code == 0 and "new session work\n" in err
    code, _, err = piped("/system\nagain\n", *few, "--resume")
    assert code == 0 and "session work: continuing 1 turn, the last was 'hello'" in err and "Be brief." in err
    assert "new session" not in err and "the session used" not in err
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


def test_new_session_names_the_file_of_its_name(piped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk").touch()
    assert "new session talk; /load ./talk continues the file of this name\n" in piped("", "--session", "talk")[2]
    assert not sessions.named("talk").exists()


def test_session_of_another_model_is_noted(piped, tiny):
    few, note = ("--max-tokens", 2), "the session used the model demo/tiny; --model demo/tiny continues with it\n"
    store = sessions.Store(sessions.named("work"))
    store.save(Conversation(turns=(("one", "two"),)), "demo/tiny")
    for option in (["--resume"], ["--session", "work"]):
        assert note in piped("", *few, *option)[2]
    assert "the session used" not in piped("", *few, "--resume", "--model", tiny)[2], "the user chose this model"
    assert note.replace("--", "/") in piped("/load work\n", *few)[2]
    store.save(Conversation(turns=(("one", "three"),)), "bundled")
    assert "the session used" not in piped("", *few, "--resume")[2]


def test_settings_return_with_their_session(piped, session):
    few = ("--max-tokens", 2)
    piped("hello\n/set temperature 0.25\n/set logit_bias 42=-1.5\n", *few, "--session", "work", "--seed", 7)
    saved = {"max_tokens": 2, "seed": 7, "temperature": 0.25, "logit_bias": {"42": -1.5}}
    assert sessions.Store(sessions.named("work")).load().settings == saved
    _, out, err = piped("/set\n", "--resume", "--seed", 8)
    assert "settings of the session: max_tokens 2, temperature 0.25, logit_bias" in err.replace("\n", " ")
    assert re.search(r"temperature +0.25\n", err) and re.search(r'logit_bias +\{"42": -1.5\}\n', err)
    assert re.search(r"seed +8\n", err), "the session replaced an option of the command line"
    assert sessions.Store(sessions.named("work")).load().settings == saved, "without a turn nothing is saved"


def test_settings_of_the_configuration_are_not_saved(session):
    chat = session(["one"], overrides={"temperature": 0.5, "top_k": 3}, configured={"temperature": 0.5})
    chat.handle("a")
    assert chat.conversation.settings == {"top_k": 3}


@pytest.mark.parametrize("setting", [{"temperature": "hot"}, {"top_k": [1]}, {"logit_bias": {"x": 1}}])
def test_damaged_setting_of_a_session_is_reported(session, setting):
    chat = session([])
    chat.conversation = Conversation(settings={**setting, "unknown": 1, "seed": 3})
    settings.restore(chat, ())
    (name,), err = setting, chat.read()[1].replace("\n", " ")
    assert f"{name} of the session is not restored: " in err and "settings of the session: seed 3;" in err
    assert chat.overrides == {"seed": 3}


def test_note_after_leaving(session):
    """Print how to continue the conversation, but only if it is saved."""
    for name, raw, named, options in (
        ("work", False, False, "--resume"),
        ("later", False, True, "--session later"),
        ("last", True, False, "--resume --raw"),
    ):
        chat = session(["one"], raw=raw, store=sessions.Store(sessions.named(name)))
        saving.note_return(chat, named)
        assert chat.read()[1] == "", "a conversation without turns cannot be continued"
        chat.handle("a"), chat.read()
        saving.note_return(chat, named)
        assert chat.read()[1] == f"tridecode chat {options} continues this conversation\n"
        os.utime(chat.store.path, (at := len(sessions.files()), at))
    chat.store = sessions.Store(sessions.named("work"))
    chat.conversation = chat.store.load()
    saving.note_return(chat, False)
    assert "--session work" in chat.read()[1], "--resume would continue another session"
    chat.store = None
    saving.note_return(chat, False)
    assert chat.read()[1] == ""


@pytest.mark.parametrize(
    "chunks, opened, hide, out, answer",
    [
        (["<thi", "nk>\n", "Let me ", "see.\n</think>", "\n\nYes"], False, False, "Let me see.\n", "Yes"),
        (["Let me ", "see.", "</think>\n\nYes"], True, False, "Let me see.\n", "Yes"),
        (["<think>", "Let me ", "see.", "</think>Yes"], False, True, "", "Yes"),
        (["<think>", "Let", " me \x1b[2J"], False, False, "Let me ␛[2J\n", ""),
        (["Yes <think>", " no"], False, False, "", "Yes <think> no"),
        (["<think>\n\n</think>\n\n", "Yes"], False, False, "", "Yes"),
    ],
)
def test_thinking_is_separated(capsys, chunks, opened, hide, out, answer):
    shown = []
    sink = SimpleNamespace(push=shown.append, finish=lambda: shown.append("|"), pause=None, resume=None)
    display = Display(Output(), sink, ThinkSplitter(opened), hide, tags=False)
    for chunk in chunks:
        display.push(chunk)
    display.flush()
    display.finish()
    read = capsys.readouterr()
    assert read.out == out and "".join(shown) == answer + "|"
    assert ("thought for " in read.err) == (bool(out) or hide)


@pytest.mark.parametrize("hide, out", [(True, "Yes\n"), (False, "<think>Hm.</think>Yes\n")], ids=["hide", "on"])
def test_thinking_in_plain_text(session, hide, out):
    chat = session(["<think>", "Hm.", "</think>", "Yes"], plain=True, think="hide" if hide else "on")
    chat.handle("one")
    shown, notes = chat.read()
    assert shown == out and ("thought for 3 tokens" in notes) == hide
    assert chat.conversation.turns[0][1] == "<think>Hm.</think>Yes"


def test_template_that_opens_thinking():
    for tag, opens in (("<think>", True), ("</think>", False), ("", False)):
        tokenizer = SimpleNamespace(prepare_chat=lambda messages, tag=tag: ChatPrompt([1], tag))
        assert opens_thinking(tokenizer) == opens


@pytest.mark.parametrize("when", ["making", "closing"])
def test_interrupt_closes_event_loop(monkeypatch, state, when):
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from tridecode.cli.chat.keyboard import Keyboard

    loops = []

    class Loop(asyncio.SelectorEventLoop):
        def __init__(self):
            loops.append(self)
            self.interrupt("making")
            super().__init__()

        def close(self):
            self.interrupt("closing")
            super().close()

        def interrupt(self, now):
            if now == when:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("asyncio.events.new_event_loop", Loop)
    before = signal.getsignal(signal.SIGINT)
    with create_pipe_input() as keys:
        keyboard = Keyboard((), Output(), keys, DummyOutput())
        keys.send_text("hello\r")
        with pytest.raises(KeyboardInterrupt):
            keyboard.read()
    assert [loop.is_closed() for loop in loops] == [True] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "typed, prompts",
    [
        ([KeyboardInterrupt, KeyboardInterrupt], 0),
        ([KeyboardInterrupt, "one", KeyboardInterrupt, EOFError], 1),
        (["one", "/exit", "two"], 1),
    ],
)
def test_two_consecutive_interrupts_leave(session, monkeypatch, typed, prompts):
    keys = iter(typed)

    def type_next(prompt):
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", type_next)
    chat = session(["fine"], interactive=True)
    converse(chat, PlainReader())
    assert chat.exit_code == 0 and len(chat.engine.prompts) == prompts
    assert next(keys, None) == ("two" if "two" in typed else None)
