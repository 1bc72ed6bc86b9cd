"""Saved sessions: the list, names, titles, and the turns shown when a session is continued."""

import json
import os

import pytest
from chats import as_messages
from rich.cells import cell_len

from tridecode.cli.chat import session as store
from tridecode.cli.chat import sessions
from tridecode.cli.chat.completion import completed
from tridecode.cli.chat.conversation import Conversation

RIVERS = Conversation(turns=(("Name three rivers.", "Nile, Rhine, Po"), ("And a lake?", "Como")))
pytestmark = pytest.mark.usefixtures("state")


def keep(name, talk=RIVERS, at=0):
    path = store.named(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    store.write(path, store.dumps(talk, "m"))
    os.utime(path, (at, at))
    return path


def test_list_is_sorted_newest_first(run):
    keep("old", at=1), keep("new", Conversation(title="Lakes", turns=RIVERS.turns[1:]), at=2)
    keep("bad", at=3).write_text("no session")
    os.utime(store.named("bad"), (3, 3))
    code, out, err = run("sessions")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["bad", "new", "old"]
    assert err == "tridecode chat --resume continues the latest, --session NAME another one\n"
    bad, new, old = out.splitlines()
    assert " damaged " in bad and new.endswith(" Lakes") and " 1 turn " in new
    assert old.endswith(" bytes  Name three rivers.") and " 2 turns " in old and " 1970 " in old
    _, found, err = run("sessions", "--json")
    found = [json.loads(line) for line in found.splitlines()]
    assert [one["turns"] for one in found] == [None, 1, 2] and found[1]["title"] == "Lakes" and found[2]["saved"] == 1
    assert err == "" and run("sessions", "--names") == (0, "bad\nnew\nold\n", "")


def test_empty_list_names_directory(run, state):
    code, out, err = run("sessions")
    assert (code, out) == (0, "") and str(state / "sessions") in err.replace("\n", "") and "no session yet" in err
    assert "--resume" not in err


def test_list_fits_window():
    keep("20261122-043416-3fa1", Conversation(turns=(("日本語 " * 100, "y" * 10_000),) * 40))
    keep("x" * 80, RIVERS)
    for width in (20, 40, 60, 80, 200):
        lines = sessions.lines(sessions.saved(), width)
        assert max(map(cell_len, lines)) <= width
        assert any(line.startswith("20261122-043416-3fa1"[: width - 1]) for line in lines)
        assert len(lines) == (6 if width < 80 else 4 if width < 200 else 2), "the table has a wrong number of lines"


def test_rename(run):
    keep("old"), keep("taken")
    assert run("sessions", "rename", "old", "new")[::2] == (0, "session old is now called new\n")
    assert store.read(store.named("new")) == RIVERS and sessions.names().count("old") == 0
    for argv, message in (
        (("old", "x"), "there is no session old"),
        (("new", "taken"), "session taken exists already"),
        (("new", "a/b"), "session name 'a/b'"),
        (("ne", "x"), "did you mean new?"),
    ):
        code, out, err = run("sessions", "rename", *argv)
        assert (code, out, err.count("\n")) == (1, "", 1) and message in err


def test_session_file_with_any_name(run, piped):
    """The file may come from another program."""
    keep("plain")
    odd = store.named("plain").rename(store.sessions_dir() / "my ü talk.json")
    assert sessions.names() == ["my ü talk"]
    code, _, err = piped("hello\n/load my ü talk\n", "--session", "my ü talk", "--max-tokens", 2)
    assert code == 0 and "my ü talk" in err and len(store.read(odd).turns) == 3
    assert "continuing 3 turns" in err and "the previous one" not in err, (
        "loading the open session announced a previous one"
    )
    assert run("sessions", "rename", "plain", "my b")[0] == 1 and run("sessions", "rename", "my ü talk", "my b")[0] == 1
    assert run("sessions", "rename", "my ü talk", "tame")[0] == 0 and sessions.names() == ["tame"]
    odd.write_text("{}")
    assert run("sessions", "delete", "my ü talk")[0] == 0 and not odd.exists()


def test_unreadable_directory_is_reported(run, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", scandir)
    code, out, err = run("sessions")
    assert (code, out, err.count("\n")) == (1, "", 1) and "sessions: Permission denied" in err


def test_delete_is_all_or_none(run):
    keep("a"), keep("b")
    code, _, err = run("sessions", "delete", "a", "absent")
    assert code == 1 and "there is no session absent" in err and sorted(sessions.names()) == ["a", "b"]
    assert run("sessions", "rm", "a", "b", "a")[::2] == (0, "deleted 2 sessions\n") and sessions.names() == []
    assert run("sessions", "delete")[0] == 2


def test_export_as_markdown(run, tmp_path):
    keep("rivers", Conversation(turns=(("Name one.", "<think>\nhm\n</think>\n\nNile"),)))
    whole = "# Conversation\n\n## User\n\nName one.\n\n## Assistant\n\nNile\n"
    assert run("sessions", "export", "rivers")[:2] == (0, whole)
    file = tmp_path / "rivers.md"
    assert run("sessions", "export", "rivers", file)[:2] == (0, "") and file.read_text() == whole
    code, _, err = run("sessions", "export", "rivers", file)
    assert code == 1 and "exists already" in err
    assert "must end in .md" in run("sessions", "export", "rivers", tmp_path / "rivers.txt")[2]
    keep("opened", Conversation(turns=(("Name one.", "hm\n</think>\n\nNile"),)))
    assert run("sessions", "export", "opened")[1] == whole, "the export differs if the template opens the think block"


def test_title_is_saved(session):
    chat = session(["one"], ["two"], store=store.Store(store.named("work")))
    chat.handle("/title")
    assert "no title yet" in chat.read()[1]
    chat.handle("Name three rivers.")
    chat.handle("/title My   rivers")
    assert store.read(store.named("work")).title == "My   rivers"
    assert sessions.lines(sessions.saved(), 80)[0].endswith("  My rivers")
    chat.handle("and lakes")
    assert store.read(store.named("work")).title == "My   rivers"
    chat.handle("/title -")
    assert store.read(store.named("work")).title is None and "the title is Name three rivers." in chat.read()[1]
    chat.handle("/title x"), chat.handle("/clear")
    assert chat.conversation.title is None


def test_message_in_a_description_has_no_escapes(session):
    chat = session(["one"])
    chat.handle("It's a \U0001f469\u200d\U0001f467")
    assert chat.describe() == "continuing 1 turn, the last was 'It's a \U0001f469\u200d\U0001f467'"


def test_sessions_command(session):
    chat = session(["one"], store=store.Store(store.named("work")), interactive=True)
    chat.handle("Hello")
    keep("rivers"), keep("b")
    chat.read()
    for line, message in (
        ("/sessions", "this is session work"),
        ("/sessions rename play", "session work is now called play"),
        ("/sessions rename b c", "session b is now called c"),
        ("/sessions rename rivers", "session rivers exists already"),
        ("/sessions delete play", "begin another with /clear"),
        ("/sessions delete c", "deleted 1 session"),
        ("/sessions remove c", "accepts no argument, rename [OLD] NEW, or delete NAME"),
        ("/sessions delete d", "there is no session d"),
    ):
        assert chat.handle(line) and message in chat.read()[1]
    chat.engine.answers = [["two"]]
    chat.handle("again")
    chat.read()
    assert sorted(sessions.names()) == ["play", "rivers"] and len(store.read(store.named("play")).turns) == 2
    assert chat.handle("/sessions") and chat.read()[1].splitlines()[0].startswith("play ")


def test_load_session_by_name(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rivers").write_text("no session")
    keep("rivers")
    chat = session(["one"], ["two"], store=store.Store(store.named("work")), interactive=True)
    chat.handle("Hello")
    chat.read()
    assert chat.handle("/load rivers")
    out, err = chat.read()
    assert out == "> Name three rivers.\nNile, Rhine, Po\n\n> And a lake?\nComo\n"
    assert "continuing 2 turns" in err and "the previous one is saved; /load work continues it\n" in err
    chat.handle("more")
    assert chat.engine.prompts[-1] == as_messages(*sum(RIVERS.turns, ()), "more")
    assert len(store.read(store.named("rivers")).turns) == 3 and len(store.read(store.named("work")).turns) == 1
    assert chat.handle("/load ./rivers") and "not a session" in chat.read()[1], (
        "a path was accepted as the name of a session"
    )
    piped = session(["one"])
    piped.handle("/load rivers"), piped.handle("more again")
    assert piped.read()[0] == "one\n" and len(store.read(store.named("rivers")).turns) == 3, (
        "the chat in a pipe changed the saved session"
    )


def test_history(session):
    chat = session(["one\ntwo"], ["<think>hm</think>Yes"])
    assert chat.handle("/history") and "the conversation has no turns yet" in chat.read()[1]
    chat.handle('"""a\nb"""'), chat.handle("c")
    chat.read()
    for line, shown in (
        ("/history", "> a\n… b\none\ntwo\n\n> c\nYes\n"),
        ("/history 1", "> c\nYes\n"),
        ("/history 9", "> a\n… b\none\ntwo\n\n> c\nYes\n"),
    ):
        assert chat.handle(line) and chat.read()[0] == shown
    for wrong in ("0", "x", "-1", "1.5"):
        assert chat.handle(f"/history {wrong}") and "accepts a number of turns" in chat.read()[1]


def test_continued_conversation_shows_last_turns(session):
    for lengths, shown in (
        ([10, 10, 10], 3), ([200, 1500, 400], 2), ([5000], 1), ([10, 5000], 1), ([5000, 10], 1), ([], 0)
    ):  # fmt: skip
        keep("long", Conversation(turns=tuple(("q", "x" * (n - 1)) for n in lengths)))
        chat = session(interactive=True)
        chat.handle("/load long")
        out, err = chat.read()
        assert out.count("> q\n") == shown
        assert (f"{len(lengths) - shown} earlier turn" in err) == (shown < len(lengths))


def cached(tmp_path, monkeypatch, name: str, *weights: str) -> None:
    """Put a model into the Hugging Face cache of this test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / f"models--{name}" / "snapshots" / "abc"
    place.mkdir(parents=True)
    for file in ("config.json", *weights):
        (place / file).touch()


def test_tab_completes_sessions_paths_and_words(session, tmp_path, monkeypatch):
    keep("rivers")
    chat = session()
    place = tmp_path / "place"
    (place / "rooms").mkdir(parents=True)
    (place / "Qwerty").mkdir()
    cached(tmp_path, monkeypatch, "Qwen--Qwen3-4B", "model.safetensors")
    cached(tmp_path, monkeypatch, "Qwen--Qwen3-8B")  # This directory contains no weights.
    for name in ("river talk.json", ".hidden", "rooms/blue.md"):
        (place / name).touch()
    monkeypatch.chdir(place)
    for typed, found in (
        ("/ti", (3, ["/title "])),
        ("/un", (3, ["/undo"])),
        ("/load ri", (2, ["rivers", "river talk.json"])),
        ("/load river t", (7, ["river talk.json"])),
        ("/save rooms/", (6, ["rooms/blue.md"])),
        ("/save ro", (2, ["rooms/"])),
        ("/export .h", (2, [".hidden"])),
        ("/sessions re", (2, ["rename "])),
        ("/sessions delete r", (1, ["rivers"])),
        ("/think h", (1, ["hide"])),
        ("/think o", (1, ["on", "off"])),
        ("/model Qw", (2, ["Qwen/Qwen3-4B", "Qwerty/"])),
        ("/model b", (1, ["bundled"])),
        ("/set temp", (4, ["temperature "])),
        ("/set overflow d", (1, ["drop-oldest", "default"])),
        ("/set stats ", (0, ["full", "short", "off", "default"])),
        ("/set ignore_eos o", (1, ["on", "off"])),
        ("/set top_k ", (0, ["default"])),
        ("/nothing h", (1, [])),
        ("/load \0", (1, [])),
        ("hello", (0, [])),
        ("//sy", (0, [])),
    ):
        assert completed(typed, chat) == found, typed
    assert completed("/load ", chat) == (0, ["rivers", "Qwerty/", "river talk.json", "rooms/"])
    model = chat.model
    model.options, model.models, model.counts = {"top_p", "seed"}, ["a-model", "another"], False
    assert completed("/set to", chat) == (2, ["top_p "]), "completion lists options that the server does not support"
    assert completed("/model ", chat) == (0, ["a-model", "another"])
    assert completed("/set overflow ", chat) == (0, ["error", "default"])


def test_show_prints_a_session_or_the_last_one(run):
    keep("old", at=1), keep("new", Conversation(turns=(("Hi", "Hello!"),)), at=2)
    assert run("sessions", "show", "old") == run("sessions", "export", "old")
    assert run("sessions", "show")[1] == run("sessions", "export", "new")[1] and "Hello!" in run("sessions", "show")[1]
    assert run("sessions", "list") == run("sessions", "ls") == run("sessions")
    assert run("sessions", "list", "--names")[1] == run("sessions", "--names")[1] == "new\nold\n"
    assert run("sessions", "show", "newt")[0] == 1 and "did you mean new?" in run("sessions", "show", "newt")[2]
