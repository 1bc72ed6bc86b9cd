"""The list of saved sessions, and operations on sessions by name."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.filesize import decimal

from ...errors import brief
from ...text.thinking import CLOSE, OPEN
from ..terminal import counted, did_you_mean, one_line
from . import session
from .conversation import Conversation
from .session import SessionError

NAMED = 28  # Columns for names. A longer name shifts the rest of its line.
TITLE = 14  # Minimum columns for a title. In a narrower window, the title is on a separate line.
YEAR = 300 * 24 * 3600  # Age in seconds from which the year is shown instead of the time.
MARKDOWN = (".md", ".markdown")


@dataclass(frozen=True)
class Saved:
    """A session file.

    Attributes:
        time: Time of the last save, in seconds since the epoch.
        size: Size of the file in bytes.
        conversation: Its contents, None if the file is damaged.
    """

    path: Path
    time: float
    size: int
    conversation: Conversation | None

    @property
    def turns(self) -> str:
        """The number of turns for display, or "damaged"."""
        return counted(len(self.conversation.turns), "turn") if self.conversation else "damaged"

    @property
    def title(self) -> str:
        """The title or the first words, or the note that the file cannot be read."""
        return title(self.conversation) if self.conversation else "cannot be read"

    @property
    def date(self) -> str:
        """The time of the last change, with the year for old sessions."""
        recent = abs(time.time() - self.time) < YEAR
        return time.strftime("%b %d %H:%M" if recent else "%b %d  %Y", time.localtime(self.time))

    def json(self) -> str:
        """Return a line of JSON. `title` and `turns` are null if the file is damaged."""
        talk = self.conversation
        fields = {"name": self.path.stem, "title": talk and self.title, "turns": talk and len(talk.turns)}
        fields |= {"saved": int(self.time), "bytes": self.size, "path": str(self.path)}
        return json.dumps(fields)


def saved() -> list[Saved]:
    """Return all sessions, the most recently saved first."""
    entries = []
    for path in reversed(session.files()):
        try:
            state = path.stat()
        except OSError:  # Another program has deleted the file.
            continue
        try:
            conversation = session.read(path)
        except SessionError:
            conversation = None
        entries.append(Saved(path, state.st_mtime, state.st_size, conversation))
    return entries


def names() -> list[str]:
    """Return the names of all sessions, the most recently saved first; [] if they cannot be listed."""
    try:
        return [path.stem for path in reversed(session.files())]
    except SessionError:
        return []


def lines(entries: Sequence[Saved], width: int | None) -> list[str]:
    """Return the list of sessions: a line per session, or three lines in a narrow window.

    Args:
        width: Maximum columns of a line, None for no limit.
    """
    rows, longest = [], min(max((len(entry.path.stem) for entry in entries), default=0), NAMED)
    for entry in entries:
        facts = f"{entry.path.stem:<{longest}}  {entry.date}  {entry.turns:>9}  {decimal(entry.size):>9}  "
        title = one_line(entry.title)
        if width is None or len(facts) + TITLE <= width:
            rows.append(fitted(facts + title, width))
        else:
            rows.append(fitted(entry.path.stem, width))
            details = f"{entry.date} · {entry.turns} · {decimal(entry.size)}"
            rows += (fitted(f"  {text}", width) for text in (details, title))
    return rows


def fitted(text: str, width: int | None) -> str:
    """Cut `text` to `width` columns, with an ellipsis."""
    if width is None or cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def existing(name: str) -> Path:
    """Return the file of an existing session. Raises SessionError."""
    path = session.named(name)
    if not os.path.lexists(path):
        fix = did_you_mean(name, names()) or "tridecode sessions lists all sessions"
        raise SessionError(f"there is no session {name}; {fix}")
    return path


def rename(old: str, new: str) -> None:
    """Rename a session. Raises SessionError, also if `new` exists already."""
    session.Store(existing(old)).rename(new)


def delete(chosen: Sequence[str]) -> None:
    """Delete the sessions, or none of them if one does not exist. Raises SessionError."""
    for path in dict.fromkeys([existing(name) for name in chosen]):
        with session.failing(path):
            path.unlink()


def markdown(conversation: Conversation) -> str:
    """Return a saved conversation as Markdown.

    The model is not loaded, so its template is unknown. The function assumes that answers begin inside a think block if
    all of them close a block that they do not open.
    """
    answers = [answer for _, answer in conversation.turns]
    return conversation.markdown(bool(answers) and all(CLOSE in answer and OPEN not in answer for answer in answers))


def export(text: str, file: Path) -> None:
    """Write Markdown to a new file. Raises SessionError, also if the file exists."""
    if file.suffix.lower() not in MARKDOWN:
        raise SessionError(f"{file}: a conversation is exported as Markdown; the name must end in .md")
    if os.path.lexists(file):
        raise SessionError(f"{file} exists already; choose another name")
    session.write(file, text)


def title(conversation: Conversation) -> str:
    """Return the title that the user set, or the first words of the conversation."""
    return conversation.title or (brief(conversation.turns[0][0], 60) if conversation.turns else "")
