"""The saved sessions as a list, and what is done with one by its name."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from ...errors import brief
from ...text.thinking import CLOSE, OPEN
from ..terminal import counted, did_you_mean, one_line
from . import session
from .conversation import Conversation
from .session import SessionError

NAMED = 28  # columns of a name; longer ones stand out of their column
TITLE = 16  # columns that a title has beside the rest at least; in a narrower window it has a line of its own
YEAR = 300 * 24 * 3600  # seconds after which the year is shown in place of the hour
MARKDOWN = (".md", ".markdown")
UNITS = ("B", "kB", "MB")


@dataclass(frozen=True)
class Saved:
    """time: seconds since the epoch at which it was saved last; size: bytes. conversation: None if it is damaged."""

    path: Path
    time: float
    size: int
    conversation: Conversation | None

    @property
    def turns(self) -> str:
        return counted(len(self.conversation.turns), "turn") if self.conversation else "damaged"

    @property
    def title(self) -> str:
        return title(self.conversation) if self.conversation else "cannot be read"

    @property
    def date(self) -> str:
        recent = abs(time.time() - self.time) < YEAR
        return time.strftime("%b %d %H:%M" if recent else "%b %d  %Y", time.localtime(self.time))

    def json(self) -> str:
        """One line for programs; turns is null if it is damaged."""
        talk = self.conversation
        found = {"name": self.path.stem, "title": talk and self.title, "turns": talk and len(talk.turns)}
        found |= {"saved": int(self.time), "bytes": self.size, "path": str(self.path)}
        return json.dumps(found)


def saved() -> list[Saved]:
    """All of them, the one that was saved last first."""
    found = []
    for path in reversed(session.files()):
        try:
            state = path.stat()
        except OSError:  # deleted meanwhile
            continue
        try:
            conversation = session.read(path)
        except SessionError:
            conversation = None
        found.append(Saved(path, state.st_mtime, state.st_size, conversation))
    return found


def names() -> list[str]:
    """Of all sessions, the one that was saved last first."""
    try:
        return [path.stem for path in reversed(session.files())]
    except SessionError:
        return []


def lines(found: Sequence[Saved], width: int | None) -> list[str]:
    """The list in `width` columns, None for as many as it takes: a line for each, in a narrow window three."""
    shown, longest = [], min(max((len(one.path.stem) for one in found), default=0), NAMED)
    for one in found:
        facts = f"{one.path.stem:<{longest}}  {one.date}  {one.turns:>9}  {size(one.size):>7}  "
        title = one_line(one.title)
        if width is None or len(facts) + TITLE <= width:
            shown.append(fitted(facts + title, width))
        else:
            shown.append(fitted(one.path.stem, width))
            shown += (fitted(f"  {text}", width) for text in (f"{one.date} · {one.turns} · {size(one.size)}", title))
    return shown


def fitted(text: str, width: int | None) -> str:
    if width is None or cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def size(nbytes: int) -> str:
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 10 else 1}f} {UNITS[unit]}"


def existing(name: str) -> Path:
    """The file of a session that is there. Raises SessionError."""
    path = session.named(name)
    if not os.path.lexists(path):
        fix = did_you_mean(name, names()) or "tridecode sessions lists those that are"
        raise SessionError(f"there is no session {name}; {fix}")
    return path


def rename(old: str, new: str) -> None:
    """Raises SessionError, also where `new` is there already."""
    session.Store(existing(old), "").rename(new)


def delete(chosen: Sequence[str]) -> None:
    """All of them or, where one is not there, none. Raises SessionError."""
    for path in dict.fromkeys([existing(name) for name in chosen]):
        with session.failing(path):
            path.unlink()


def markdown(conversation: Conversation) -> str:
    """Without its model it is not known whether answers begin inside a think block; only if all look so they do."""
    answers = [answer for _, answer in conversation.turns]
    return conversation.markdown(bool(answers) and all(CLOSE in said and OPEN not in said for said in answers))


def export(text: str, file: Path) -> None:
    """Write Markdown to a file that is not there yet. Raises SessionError."""
    if file.suffix.lower() not in MARKDOWN:
        raise SessionError(f"{file}: a conversation is exported as Markdown; the name must end in .md")
    if os.path.lexists(file):
        raise SessionError(f"{file} exists already; choose another name")
    session.write(file, text)


def title(conversation: Conversation) -> str:
    """The one that it was given, or its first words."""
    return conversation.title or (brief(conversation.turns[0][0], 60) if conversation.turns else "")
