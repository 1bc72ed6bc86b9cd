"""Tests of /file, which adds a text file to a message of the chat."""

import pytest

from tridecode.cli.chat.completion import completed


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "my notes.txt"
    path.write_text("Nile\nRhine\n")
    return path


def users(chat):
    return [user for user, _ in chat.conversation.turns]


TEXT = "my notes.txt:\n```\nNile\nRhine\n```"


@pytest.mark.parametrize("command", ["/file", "/read"])
def test_file_is_sent_with_the_next_message(session, notes, command):
    chat = session("a", "b")
    chat.handle(f"{command} {notes}")
    assert users(chat) == [] and chat.read()[1] == f"{notes}, 11 characters, is sent with the next message\n"
    chat.handle("Which rivers?")
    chat.handle("Why?")
    assert users(chat) == [f"Which rivers?\n\n{TEXT}", "Why?"]


def test_message_may_follow_the_path(session, notes, monkeypatch):
    chat = session("a", "b", "c")
    chat.handle(f'/file "{notes}" Which rivers?')
    (notes.parent / "x").write_text("```\ncode\n```\n")
    monkeypatch.setenv("HOME", str(notes.parent))
    chat.handle("/file ~/x What is it?")
    assert users(chat) == [f"Which rivers?\n\n{TEXT}", "What is it?\n\nx:\n````\n```\ncode\n```\n````"]


def test_several_files_and_a_new_conversation(session, notes):
    chat = session("a", "b")
    chat.handle(f"/file {notes}")
    chat.handle(f"/file {notes}")
    chat.handle("Two?")
    chat.handle(f"/file {notes}")
    chat.read()
    chat.handle("/clear")
    assert "what was added to the next message is removed\n" in chat.read()[1]
    chat.handle("None?")
    assert users(chat) == ["None?"] and chat.engine.prompts[0][-1]["content"] == f"Two?\n\n{TEXT}\n\n{TEXT}"
    chat.handle("/clear")
    assert "is removed" not in chat.read()[1]


def test_raw_text_begins_with_the_file(session, notes):
    chat = session("a", raw=True)
    chat.handle(f"/file {notes}")
    chat.handle("Po")
    assert users(chat) == ["Nile\nRhine\nPo"]


@pytest.mark.parametrize(
    "typed, why", [("nothing", "No such file"), ("image", "contains NUL bytes"), (".", "not a file")]
)
def test_unreadable_file_is_one_line(session, tmp_path, monkeypatch, typed, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    chat = session()
    assert chat.handle(f"/file {typed}") and chat.handle("/file -") and chat.handle("/file")
    first, second, third = [line for line in chat.read()[1].splitlines() if "U+FFFD" not in line]
    assert why in first and "No such file" in second and third.endswith("/file needs FILE [MESSAGE]")
    assert "- for stdin" not in first + second and f"{typed}: " in first and "-: " in second
    assert chat.attached == "" and users(chat) == []


def test_tab_completes_the_path(session, notes, monkeypatch):
    monkeypatch.chdir(notes.parent)
    assert completed("/file my", session()) == (2, ["my notes.txt"])
