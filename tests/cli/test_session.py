"""Session files: round trips, permissions, and refusal of damaged files."""

import json
import os
import stat

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tridecode.cli.chat import session
from tridecode.cli.chat.conversation import Conversation

TALK = Conversation(False, "Be brief.", (("Hello", "Hi"), ("zwei\nZeilen \ud800", "日本 <|im_end|>")))
texts = st.text(max_size=20)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("state")


@quick
@given(st.booleans(), st.none() | texts, st.lists(st.tuples(texts, texts), max_size=4))
def test_round_trip(raw, system, turns):
    talk = Conversation(raw, system, tuple(turns))
    assert session.loads(session.dumps(talk, "model")) == talk
    dropped = Conversation(raw, system, tuple(turns), dropped=len(turns))
    assert session.loads(session.dumps(dropped, "model")).turns == talk.turns


def test_file_permissions(state):
    store = session.Store(session.named("work"))
    assert store.save(Conversation(), "m") == "" and not state.joinpath("sessions").exists(), (
        "a conversation without turns was saved"
    )
    assert store.save(TALK, "m") == ""
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    assert os.listdir(store.path.parent) == ["work.json"], "a temporary file remained"
    again = session.Store(session.named("work"))
    assert again.load() == TALK
    again.save(TALK.without_last(), "m")
    assert session.read(store.path) == TALK.without_last()


def test_last_path(state):
    with pytest.raises(session.SessionError, match="no session to continue"):
        session.last_path()
    for at, name in enumerate(["b", "c", "a"]):
        store = session.Store(session.named(name))
        store.save(TALK, "m")
        os.utime(store.path, (at, at))
    (session.sessions_dir() / "gone.json").symlink_to(state / "absent.json")
    (session.sessions_dir() / "directory.json").mkdir()
    assert session.last_path().stem == "a", "a broken link or a directory was selected"


def test_invalid_names():
    for name in ("", "../up", ".hidden", "a/b", "a b", "x" * 81, "a\0b", "ä"):
        with pytest.raises(session.SessionError, match="session name"):
            session.named(name)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
FIELDS = {
    "format": st.just(session.FORMAT) | VALUES,
    "version": st.just(session.VERSION) | VALUES,
    "raw": st.booleans() | VALUES,
    "system": st.none() | texts | VALUES,
    "turns": st.lists(st.fixed_dictionaries({"user": texts | VALUES, "assistant": texts}) | VALUES, max_size=3)
    | VALUES,
}


def opened(path, content: bytes):
    """Return the conversation in a file with this content, or None if it is refused. Check that it is unchanged."""
    path.write_bytes(content)
    store = session.Store(path)
    try:
        found = store.load()
    except session.SessionError as error:
        found = None
        assert str(path) in str(error) and "\n" not in str(error)
        # A chat that ignores the damaged file saves to a new file.
        assert "continues in" in store.save(TALK, "m") and store.path != path and session.read(store.path) == TALK
    assert path.read_bytes() == content
    return found


WHOLE = session.dumps(TALK, "m")


@quick
@example(b"[" * 100_000)
@example(WHOLE.replace('"version": 1', '"version": 2').encode())
@example(WHOLE.replace('"version": 1', '"version": true').encode())
@example(WHOLE.replace('"assistant"', '"assistent"', 1).encode())
@example(WHOLE.replace('"Hi"', "7").encode())
@given(
    st.binary()
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.integers(0, len(WHOLE) - 3).map(lambda length: WHOLE[:length].encode("utf-8", "replace"))
)
def test_any_other_file_is_refused(tmp_path, content):
    assert opened(tmp_path / "other.json", content) is None


@settings(quick, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4))
def test_damaged_files_are_read_or_refused(tmp_path, changes):
    content = bytearray(WHOLE.encode())
    for at, byte in changes:
        content[at] = byte
    found = opened(tmp_path / "damaged.json", bytes(content))
    if found is not None:  # The damaged byte is inside a string.
        assert len(found.turns) == 2 and session.loads(session.dumps(found, "m")) == found


@settings(quick, max_examples=150)
@given(st.fixed_dictionaries(FIELDS) | st.fixed_dictionaries({}, optional=FIELDS))
def test_any_fields_are_read_or_refused(tmp_path, content):
    found = opened(tmp_path / "fields.json", json.dumps(content).encode())
    if found is not None:
        expected = content["raw"], content.get("system"), len(content["turns"])
        assert (found.raw, found.system, len(found.turns)) == expected
        assert session.loads(session.dumps(found, "m")) == found


def test_non_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path, "not a file"), (tmp_path / "pipe", "not a file"), (tmp_path / "no", "no such file")):
        with pytest.raises(session.SessionError, match=why):
            session.read(path)
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(session.LARGEST + 1)
    with pytest.raises(session.SessionError, match="not a session"):
        session.read(tmp_path / "huge")


def test_failed_write_keeps_file(tmp_path, monkeypatch):
    store = session.Store(tmp_path / "talk.json")
    store.save(TALK, "m")
    before = store.path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(session.SessionError, match="No space left"):
        store.save(TALK.plus("more", "text"), "m")
    assert store.path.read_bytes() == before and os.listdir(tmp_path) == ["talk.json"]
    monkeypatch.undo()
    store.save(TALK.plus("more", "text"), "m")
    assert session.read(store.path) == TALK.plus("more", "text")


def test_concurrent_chats_do_not_overwrite():
    one, two = (session.Store(session.named("work")) for _ in range(2))
    one.save(TALK, "m")
    assert two.load() == TALK
    one.save(TALK.plus("from", "one"), "m")
    assert "changed by another program" in two.save(TALK.plus("from", "two"), "m")
    assert session.read(session.named("work")) == TALK.plus("from", "one")
    assert two.path != one.path and session.read(two.path) == TALK.plus("from", "two")


def test_empty_conversation_removes_its_file():
    one, two = (session.Store(session.named("work")) for _ in range(2))
    one.save(TALK, "m"), two.load()
    two.save(TALK.plus("from", "two"), "m")
    assert "changed by another program" in one.save(Conversation(), "m") and two.path.exists()
    assert two.save(Conversation(), "m") == "" and not two.path.exists() and session.files() == []
    assert two.save(Conversation(), "m") == "" and two.save(TALK, "m") == "" and session.read(two.path) == TALK


def test_unwritable_state_directory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(session.SessionError, match="XDG_STATE_HOME"):
        session.last_path()
