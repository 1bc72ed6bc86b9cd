"""Conversations on disk: one JSON file each, readable by its owner only, replaced as a whole or not at all."""

import json
import os
import re
import secrets
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from ...errors import TridecodeError
from ..files import replacing
from .conversation import Conversation

FORMAT, VERSION = "tridecode session", 1
LARGEST = 64 << 20  # bytes; nothing that was typed or answered is longer
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")


class SessionError(TridecodeError):
    """A session file cannot be read or written."""


@contextmanager
def failing(path: Path, fix: str = ""):
    """Within, an error of the file system, or of a name with a NUL, is a SessionError."""
    try:
        yield
    except OSError as error:
        raise SessionError(f"{path}: {error.strerror}{fix}") from None
    except ValueError as error:
        raise SessionError(f"{str(path)!r}: {error}") from None


def state_dir() -> Path:
    """Where history and sessions live; only its owner may look into it."""
    path = Path(platformdirs.user_state_dir("tridecode", appauthor=False))
    with failing(path, "; set XDG_STATE_HOME to a directory that can be written"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def sessions_dir() -> Path:
    return state_dir() / "sessions"


def named(name: str) -> Path:
    """The file of the session `name`. One that is there may be called anything."""
    if not _NAME.fullmatch(name):
        if found := next((path for path in files() if path.stem == name), None):
            return found
        raise SessionError(f"session name {name!r}: use letters, digits, '.', '_' and '-', at most 80")
    return sessions_dir() / f"{name}.json"


def new_path() -> Path:
    return sessions_dir() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.json"


def files() -> list[Path]:
    """Of all sessions, the one that was saved last at the end."""
    found, where = [], sessions_dir()
    with failing(where), suppress(FileNotFoundError), os.scandir(where) as entries:
        for entry in entries:
            with suppress(OSError):  # a link that leads nowhere
                if entry.name.endswith(".json") and entry.is_file():
                    found.append((entry.stat().st_mtime_ns, where / entry.name))
    return [path for _, path in sorted(found)]


def last_path() -> Path:
    """The session that was saved last."""
    found = files()
    if not found:
        raise SessionError(f"there is no session to continue in {sessions_dir()}; chat without --resume starts one")
    return found[-1]


def dumps(conversation: Conversation, model: str) -> str:
    turns = [{"user": user, "assistant": answer} for user, answer in conversation.turns]
    content = {"format": FORMAT, "version": VERSION, "model": model, "raw": conversation.raw}
    if conversation.title is not None:
        content["title"] = conversation.title
    # ASCII only: whatever was typed, lone surrogates too, can be written and read again.
    return json.dumps(content | {"system": conversation.system, "turns": turns}, indent=1) + "\n"


def loads(text: str | bytes) -> Conversation:
    """The conversation in a session's text; ValueError says what is wrong with it."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON, or only a part of it") from None
    if not is_session(content):
        raise ValueError("it is JSON, but no session")
    return parse(content)


def is_session(content) -> bool:
    """Whether a JSON value is meant as a session."""
    return isinstance(content, dict) and content.get("format") == FORMAT


def parse(content: dict) -> Conversation:
    """The conversation in a session's JSON; ValueError says what is wrong with it."""
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"its version is {json.dumps(version)[:20]}, this program reads {VERSION}")
    raw, turns, texts = content.get("raw"), content.get("turns"), (content.get("system"), content.get("title"))
    if not isinstance(raw, bool) or not isinstance(turns, list) or not all(isinstance(t, str | None) for t in texts):
        raise ValueError("raw, system, title or turns is missing or of the wrong type")
    pairs = []
    for number, turn in enumerate(turns, 1):
        user, assistant = (turn.get("user"), turn.get("assistant")) if isinstance(turn, dict) else (None, None)
        if not isinstance(user, str) or not isinstance(assistant, str):
            raise ValueError(f"turn {number} needs the texts user and assistant")
        pairs.append((user, assistant))
    return Conversation(raw, texts[0], tuple(pairs), title=texts[1])


def read(path: Path) -> Conversation:
    """Raises SessionError with one line; the file is never touched."""
    try:
        if not path.is_file():
            raise SessionError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        if path.stat().st_size > LARGEST:
            raise SessionError(f"{path}: not a session ({path.stat().st_size:,} bytes, at most {LARGEST:,} are read)")
        return loads(path.read_bytes())
    except OSError as error:
        raise SessionError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a name with a NUL too
        raise SessionError(f"{path}: not a session that can be continued ({error}); it is left as it is") from None


def write(path: Path, text: str) -> None:
    """All of it or nothing, for the owner only. Raises SessionError."""
    with failing(path), replacing(path, private=True, errors="replace") as file:
        file.write(text)


class Store:
    """The file that a conversation is saved to after each turn. It begins to exist with the first turn."""

    def __init__(self, path: Path, model: str):
        self.path, self.model = path, model
        self.saved: Conversation | None = None  # what the file holds
        self._seen = None  # the file as this program left it

    @property
    def name(self) -> str:
        return self.path.stem

    def load(self) -> Conversation:
        self.saved = read(self.path)
        self._seen = self._state()
        return self.saved

    def save(self, conversation: Conversation) -> str:
        """Returns a line to show, mostly none. Raises SessionError, and the file is as it was."""
        if conversation == self.saved or (self.saved is None and not conversation.turns):
            return ""
        note = ""
        if self._state() not in (None, self._seen):
            busy = self.name
            self.begin_new()
            note = f"session {busy} was changed by another program; this conversation goes on in {self.name}"
        with failing(self.path.parent):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(self.path, dumps(conversation, self.model))
        self.saved, self._seen = conversation, self._state()
        return note

    def rename(self, name: str) -> None:
        """The same session under another name, also one that has no file yet. Raises SessionError."""
        path = named(name)
        if os.path.lexists(path):
            raise SessionError(f"session {name} exists already; choose another name, or delete that one first")
        if os.path.lexists(self.path):
            with failing(self.path):
                self.path.rename(path)
        self.path = path

    def begin_new(self) -> None:
        """What is saved next goes to a file of its own; the file so far stays."""
        self.path, self.saved, self._seen = new_path(), None, None

    def _state(self):
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
