"""Session files: one JSON file per conversation, readable only by its owner and replaced atomically."""

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
LARGEST = 64 << 20  # Maximum bytes of a session file.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")


class SessionError(TridecodeError):
    """A session file cannot be read or written."""


@contextmanager
def failing(path: Path, fix: str = ""):
    """Convert file system errors, and ValueErrors of names that contain NUL, to SessionError within a `with` block."""
    try:
        yield
    except OSError as error:
        raise SessionError(f"{path}: {error.strerror}{fix}") from None
    except ValueError as error:
        raise SessionError(f"{str(path)!r}: {error}") from None


def state_dir() -> Path:
    """Return the directory that contains the history and the sessions.

    Only its owner can read it. Raises SessionError.
    """
    fix = "; set XDG_STATE_HOME to a writable directory"
    try:
        path = Path(platformdirs.user_state_dir("tridecode", appauthor=False))
    except RuntimeError:
        raise SessionError(f"the user has no home directory{fix}") from None
    with failing(path, fix):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def sessions_dir() -> Path:
    """Return the directory of the session files."""
    return state_dir() / "sessions"


def named(name: str) -> Path:
    """Return the file of the session `name`. Raises SessionError if a new session cannot have this name."""
    if not _NAME.fullmatch(name):
        if existing := next((path for path in files() if path.stem == name), None):
            return existing
        raise SessionError(f"session name {name!r} is invalid; use at most 80 letters, digits, '.', '_' and '-'")
    return sessions_dir() / f"{name}.json"


def new_path() -> Path:
    """Return a file name for a new session, made of the time and a random suffix."""
    return sessions_dir() / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.json"


def files() -> list[Path]:
    """Return the files of all sessions in the order in which they were saved."""
    entries_by_time, directory = [], sessions_dir()
    with failing(directory), suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):  # The link may be broken.
                if entry.name.endswith(".json") and entry.is_file():
                    entries_by_time.append((entry.stat().st_mtime_ns, directory / entry.name))
    return [path for _, path in sorted(entries_by_time)]


def last_path() -> Path:
    """Return the file of the session that was saved last. Raises SessionError if there is none."""
    paths = files()
    if not paths:
        raise SessionError(f"there is no session to continue in {sessions_dir()}; chat without --resume starts one")
    return paths[-1]


def dumps(conversation: Conversation, model: str) -> str:
    """Return the text of a session file."""
    turns = [{"user": user, "assistant": answer} for user, answer in conversation.turns]
    content = {"format": FORMAT, "version": VERSION, "model": model, "raw": conversation.raw}
    if conversation.title is not None:
        content["title"] = conversation.title
    if conversation.settings:
        content["settings"] = conversation.settings
    # The text is ASCII, so that lone surrogates in typed text can be written and read again.
    return json.dumps(content | {"system": conversation.system, "turns": turns}, indent=1) + "\n"


def loads(text: str | bytes) -> Conversation:
    """Return the conversation in the text of a session file. Raises ValueError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON, or it is incomplete") from None
    if not is_session(content):
        raise ValueError("it is JSON, but not a session")
    return parse(content)


def is_session(content) -> bool:
    """Return whether a JSON value contains the format name of session files."""
    return isinstance(content, dict) and content.get("format") == FORMAT


def parse(content: dict) -> Conversation:
    """Return the conversation in the JSON object of a session. Raises ValueError."""
    version = content.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"its version is {json.dumps(version)[:20]}, but this program reads version {VERSION}")
    raw, turns, texts = content.get("raw"), content.get("turns"), (content.get("system"), content.get("title"))
    if not isinstance(raw, bool) or not isinstance(turns, list) or not all(isinstance(t, str | None) for t in texts):
        raise ValueError("raw, system, title or turns is missing or of the wrong type")
    pairs = []
    for number, turn in enumerate(turns, 1):
        user, assistant = (turn.get("user"), turn.get("assistant")) if isinstance(turn, dict) else (None, None)
        if not isinstance(user, str) or not isinstance(assistant, str):
            raise ValueError(f"turn {number} needs the texts user and assistant")
        pairs.append((user, assistant))
    model, settings = content.get("model"), content.get("settings")
    return Conversation(
        raw,
        texts[0],
        tuple(pairs),
        title=texts[1],
        settings=settings if isinstance(settings, dict) else {},
        model=model if isinstance(model, str) else None,
    )


def read(path: Path) -> Conversation:
    """Return the conversation of a session file. Raises SessionError with a message of one line."""
    try:
        if not path.is_file():
            raise SessionError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        if path.stat().st_size > LARGEST:
            raise SessionError(f"{path}: not a session ({path.stat().st_size:,} bytes, at most {LARGEST:,} are read)")
        return loads(path.read_bytes())
    except OSError as error:
        raise SessionError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # Python also raises ValueError for a name that contains NUL.
        raise SessionError(f"{path}: not a session that can be continued ({error}); it is left as it is") from None


def write(path: Path, text: str) -> None:
    """Replace a file atomically, readable only by its owner. Raises SessionError."""
    with failing(path), replacing(path, private=True, errors="replace") as file:
        file.write(text)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return inode, time and size of a file, which change when a program writes it; None if there is no file."""
    try:
        stat_result = path.stat()
    except (OSError, ValueError):  # Python raises ValueError for a name that contains NUL.
        return None
    return stat_result.st_ino, stat_result.st_mtime_ns, stat_result.st_size


class Store:
    """The file to which a conversation is saved after each turn. It exists while the conversation has turns."""

    def __init__(self, path: Path):
        self.path = path
        self.saved: Conversation | None = None  # The contents of the file.
        self._seen: tuple | None = None  # The stamp of the file after the last access by this object.

    @property
    def name(self) -> str:
        """The name of the session: its file's name without the suffix."""
        return self.path.stem

    def load(self) -> Conversation:
        """Return the conversation of the file. Raises SessionError."""
        self.saved = read(self.path)
        self._seen = stamp(self.path)
        return self.saved

    def holds(self, conversation: Conversation) -> bool:
        """Return whether the file contains `conversation`. No file contains a conversation without turns."""
        return bool(conversation.turns) and conversation == self.saved

    def save(self, conversation: Conversation, model: str) -> str:
        """Save the conversation, and the name of its model. Without turns, remove the file.

        Return a line to show, or "". Raises SessionError; the file is then unchanged.
        """
        if conversation == self.saved or (self.saved is None and not conversation.turns):
            return ""
        note = ""
        if stamp(self.path) not in (None, self._seen):
            busy = self.name
            self.begin_new()
            note = f"session {busy} was changed by another program; this conversation continues in {self.name}"
        if not conversation.turns:
            with failing(self.path):
                self.path.unlink(missing_ok=True)
            self.saved, self._seen = None, None
            return note
        with failing(self.path.parent):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(self.path, dumps(conversation, model))
        self.saved, self._seen = conversation, stamp(self.path)
        return note

    def rename(self, name: str) -> None:
        """Rename the session, even if it has no file yet. Raises SessionError."""
        path = named(name)
        if os.path.lexists(path):
            raise SessionError(f"session {name} exists already; choose another name, or delete that one first")
        if os.path.lexists(self.path):
            with failing(self.path):
                self.path.rename(path)
        self.path = path

    def begin_new(self) -> None:
        """Save to a new file from now on. The old file is kept."""
        self.path, self.saved, self._seen = new_path(), None, None
