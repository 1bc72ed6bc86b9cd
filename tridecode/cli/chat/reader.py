"""Who reads what is typed: a line editor, or plain input where a terminal can show none."""

import os
from collections.abc import Callable

from .lines import PlainReader


def shows_editor() -> bool:
    """Whether the terminal can show a line editor."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def open_reader(complete: Callable, output):
    """A line editor where the terminal can show one; complete: what its Tab does, see completion.completed."""
    if shows_editor():
        try:
            from .keyboard import Keyboard

            return Keyboard(complete, output)
        except Exception as error:
            output.note(f"there is no line editor here ({type(error).__name__}: {error}); plain line input")
    return PlainReader(output.keys)
