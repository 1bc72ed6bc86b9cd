"""Turns that do not fit in the context: errors, dropped turns and suggested fixes."""

from types import SimpleNamespace

import pytest
from chats import as_messages

from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.conversation import Conversation
from tridecode.cli.chat.display import open_fence
from tridecode.cli.chat.overflow import Overflow, fit
from tridecode.cli.chat.turn import cut_note
from tridecode.errors import TooLong


def test_too_long_turn_is_refused(session):
    chat = session(["x" * 60], ["fine"], ["fine"])
    assert chat.handle("one") and chat.handle("y" * 60)
    shown = chat.read()[1]
    assert "this turn needs 123 tokens, the context holds 100" in shown and "/set overflow drop-oldest" in shown
    assert chat.handle("two"), "the chat ended"
    assert chat.engine.prompts[1] == as_messages("one", "x" * 60, "two")
    assert chat.handle("/set overflow oldest") and "must be one of error, drop-oldest, stop" in chat.read()[1]
    assert chat.handle("/set overflow drop-oldest") and chat.read()[1] == "overflow is drop-oldest\n"
    assert chat.handle("y" * 40) and chat.engine.prompts[2] == as_messages("two", "fine", "y" * 40)
    assert "turn 1 is no longer sent" in chat.read()[1]


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
    assert chat.engine.prompts[-1] == [{"role": "system", "content": "Sys"}, *as_messages("six", "c" * 20, "z" * 40)]
    note = "112 tokens do not fit in the context of 100: turns 1 to 2 are no longer sent to the model"
    assert note in chat.read()[1]
    assert len(chat.conversation.turns) == 4, "the conversation lost turns that the prompt omits"
    chat.handle("y" * 30)
    assert chat.engine.prompts[-1][1:] == as_messages("z" * 40, "d", "y" * 30)
    assert "97 tokens do not fit in the context of 100 with room for the answer (12): turn 3 is" in chat.read()[1]
    chat.handle("w" * 98)
    message = "this message and the system turn alone need 101 tokens, the context holds 100; shorten it or remove"
    assert message in chat.read()[1]
    assert chat.conversation.dropped == 3 and len(chat.conversation.turns) == 5


def test_tokens_are_counted_only_near_capacity(session):
    counted = []
    chat = session(["a"], ["b"], ["c"], ["d"])
    chat.model.capacity = 10_000
    chat.engine.tokenizer = SimpleNamespace(encode_chat=lambda messages, context: counted.append(len(messages)) or [0])
    for line in ("one", "two", "x" * 3000, "/system Sys", "four"):
        chat.handle(line)
    assert counted == [1, 5, 8], "the chat counted tokens at the wrong turns"


def characters(prompt) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


@pytest.mark.parametrize(
    "largest, choice, fix",
    [
        (100, "error", "; shorten it"),
        (1000, "drop-oldest", "; shorten it or start the chat with --max-seq-len 240"),
        (200, "error", "; shorten it or start the chat with --max-seq-len 200"),
        (1000, "stop", "; the chat ends"),
    ],
)
def test_too_long_message_suggests_fix(largest, choice, fix):
    """The suggestions do not include /undo and /clear, which would not help."""
    talk = Conversation(turns=(("hello", "hi"),))
    with pytest.raises(Overflow) as error:
        fit(talk, "y" * 120, characters, 100, choice, None, largest)
    assert str(error.value).endswith(f"the context holds 100{fix}") and "/clear" not in str(error.value)
    with pytest.raises(Overflow, match="shorten it or remove the system turn"):
        fit(Conversation(False, "x" * 90), "y" * 20, characters, 100, "error", None, 100)


def test_lower_bound_of_length_is_reported():
    def count(prompt):
        raise TooLong(300, 100, is_lower_bound=True)

    with pytest.raises(Overflow, match="alone needs 300 tokens or more, .* --max-seq-len 900"):
        fit(Conversation(), "y", count, 100, "error", None, 900)
    with pytest.raises(Overflow, match="alone needs 300 tokens or more"):
        fit(Conversation(turns=(("a", "b"),)), "y", count, 100, "drop-oldest", None, 100)


def test_tokens_of_a_long_conversation_are_counted_rarely():
    counts = []

    def count(prompt):
        counts.append(tokens := characters(prompt))
        if tokens > 10_000:
            raise TooLong(tokens // 2, 2048, is_lower_bound=True)
        return tokens

    talk = Conversation(turns=(("hello", "hi"),) * 5000)
    with pytest.raises(Overflow, match="17,504 tokens or more, the context holds 2,048; /undo, /clear or /set"):
        fit(talk, "and now?", count, 2048, "error", None, 2048)
    talk, note = fit(talk, "and now?", count, 2048, "drop-oldest", 100, 2048)
    assert len(talk.turns) - talk.dropped == (2048 - 100 - 8) // 7
    assert note.startswith("17,504 tokens or more do not fit") and "turns 1 to 4,723 are no longer sent" in note
    assert len(counts) < 20


def test_fit_keeps_as_many_turns_as_possible():
    for turns in (1, 7, 500):
        talk = Conversation(turns=(("x" * 5000, "y" * 5000),) * turns)
        assert fit(talk, "z", len, 2000, "error", None, 2000) == (talk, "")
        left, note = fit(talk, "z", len, 800, "drop-oldest", None, 2000)
        assert left.dropped == (151 if turns == 500 else 0) and bool(note) == (turns == 500)


QUESTION = "Tell me a short story about a snail."
GREEDY = ("--temperature", 0, "--quiet")


def test_default_overflow_of_a_pipe_is_an_error(piped):
    code, out, err = piped(f"{QUESTION}\n" * 2, *GREEDY, "--max-seq-len", 70)
    assert code == 1 and "this turn needs" in err and out.count("\n") == 1


@pytest.mark.parametrize("kind", [(), ("--raw",)], ids=["chat", "raw"])
def test_cut_answer_is_continued(piped, kind, tmp_path):
    whole = piped(QUESTION, *GREEDY, *kind, "--max-tokens", 30)[1]
    file = tmp_path / "talk.json"
    lines = f"{QUESTION}\n/set max_tokens 22\n/continue\n/save {file}\n"
    code, out, err = piped(lines, *GREEDY, *kind, "--max-tokens", 8)
    assert code == 0 and out.count("\n") == whole.count("\n") + 1
    ((user, answer),) = sessions.read(file).turns
    assert (user, answer) == (QUESTION, whole.removesuffix("\n"))


def test_continue_of_complete_answer(piped):
    code, _, err = piped("/continue\nWhat is 17 + 25?\n/continue\n/history\n", *GREEDY)
    assert code == 0 and err.splitlines() == [
        "tridecode: error: the conversation has no turns yet",
        "the model has nothing to add",
    ]


def test_continue_drops_oldest_turns(piped):
    lines = f"Hello\n{QUESTION}\n/continue\n"
    code, out, err = piped(lines, *GREEDY, "--max-seq-len", 54, "--overflow", "drop-oldest")
    assert code == 0 and "the answer was cut: the context of 54 tokens is full" in err
    assert "turn 1 is no longer sent to the model" in err


def test_continue_is_not_suggested_if_context_is_full(session):
    chat = session(interactive=True, overflow="drop-oldest")
    full = SimpleNamespace(finish_reason="length", usage=SimpleNamespace(prompt_tokens=3, completion_tokens=97))
    chat.conversation = Conversation(turns=(("a", "b"), ("c", "d")))
    assert cut_note(chat, full) == "the answer was cut: the context of 100 tokens is full; /continue continues it"
    chat.conversation = Conversation(turns=(("a", "b"), ("c", "d")), dropped=1)
    assert cut_note(chat, full) == "the answer was cut: the context of 100 tokens is full"
    with pytest.raises(Overflow) as error:
        fit(Conversation(), "y" * 101, characters, 100, "drop-oldest", None, 100, continues=True)
    message = "this message and its answer alone need 101 tokens, the context holds 100; ask for the rest"
    assert str(error.value).startswith(message)
    with pytest.raises(Overflow, match="this message, its answer and the system turn alone need"):
        fit(Conversation(False, "x"), "y" * 101, characters, 100, "error", None, 100, continues=True)


def test_continued_code_block_stays_code():
    for text, fence in (
        ("a\n```python\nx = 1", "```python\n"),
        ("```\nx\n```\nb", ""),
        ("~~~ sh\n```\nx", "~~~ sh\n"),
        ("a ``` b", ""),
    ):
        assert open_fence(text) == fence
