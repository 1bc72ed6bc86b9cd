"""Selection of the reader of messages: a line editor, or plain input if the terminal cannot show an editor."""

import os
from collections.abc import Callable

from .lines import PlainReader


def shows_editor() -> bool:
    """Return whether the terminal can show a line editor."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def open_reader(complete: Callable, output):
    """Return a line editor if the terminal can show one, otherwise a plain reader.

    Args:
        complete: The completion of the Tab key, see completion.completed.
    """
    if shows_editor():
        try:
            from .keyboard import Keyboard

            return Keyboard(complete, output)
        except Exception as error:
            output.note(f"the line editor cannot start ({type(error).__name__}: {error}); using plain line input")
    return PlainReader(output.keys)
