"""Text files in messages of the chat."""

import os
import re
from pathlib import Path

from ...errors import TridecodeError
from ..inputs import clean, decoded, read_bytes
from ..terminal import counted


def attach(chat, rest: str) -> bool:
    """Run /file: add a file to a message, or to the next message. Return False to end the chat.

    Args:
        chat: A talk.Chat.
        rest: The path, which may contain spaces, in quotation marks if a message with spaces follows it.
    """
    path, message = rest, ""
    if quoted := re.match(r"""(["'])(.+?)\1\s*""", rest):
        path, message = quoted[2], rest[quoted.end() :]
    elif not is_file(rest):
        path, _, message = rest.partition(" ")
    data = read_bytes(os.path.expanduser(path), None, "the path of a text file")
    text = clean("".join(decoded(iter([data]), path)), path, chat.output)
    if "\0" in text:
        raise TridecodeError(f"{path}: not a text file; only text can be a part of a message")
    chat.attached += text if chat.conversation.raw else f"\n\n{fenced(os.path.basename(path), text)}"
    if message:
        return chat.ask(chat.with_files(message.strip()))
    chat.output.note(f"{path}, {counted(len(text), 'character')}, is sent with the next message")
    return True


def is_file(path: str) -> bool:
    """Return whether a path, which may begin with ~, is an existing file."""
    try:
        return Path(path).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # The name is too long, its user is unknown, or it contains NUL.
        return False


def fenced(name: str, text: str) -> str:
    """Return a text under its file's name, between fences that are longer than each fence in it."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}"
