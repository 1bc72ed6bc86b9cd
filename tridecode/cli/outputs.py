"""Where a command's --output goes: a file that is whole or absent, or what is no regular file, written directly."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from .files import replacing
from .terminal import Output, visible

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr|fd/(\d{1,9}))|/proc/self/fd/(\d{1,9})")


@contextmanager
def text_sink(path: str | None, output: Output) -> Iterator[Callable[[str], None]]:
    """Yields the function that writes: to stdout, or to a file that takes the name `path` once everything is in it.

    Until then, and if something fails, a file of that name stays what it was. What is no regular file (/dev/null, a
    pipe) is written directly.
    """
    if path is None:
        yield output.text
        return
    with ExitStack() as files:
        with naming(path):
            file = files.enter_context(open_special(path) or replacing(Path(path)))
        yield writer(file, path)
        with naming(path):
            files.close()


def writer(file: TextIO, path: str, flush: bool = False) -> Callable[[str], None]:
    """The function that writes to `file`, with `flush` at once; a terminal gets no control characters."""
    shows = file.isatty()

    def write(text: str) -> None:
        with naming(path):
            file.write(visible(text) if shows else text)
            if flush:
                file.flush()

    return write


def open_special(path: str) -> TextIO | None:
    """The open descriptor that `path` names (/dev/fd/63, as a shell writes >(command)), or the device or pipe.

    None where there is a regular file, or nothing yet. A descriptor's file is not opened anew: that would empty it.
    """
    if found := _DESCRIPTOR.fullmatch(path):
        name = found[2] or found[3] or ("1" if found[1] == "stdout" else "2")
        return open(os.dup(int(name)), "w", encoding="utf-8", newline="\n")
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return None
    except FileNotFoundError:
        return None
    return open(path, "w", encoding="utf-8", newline="\n")


@contextmanager
def naming(path: str):
    """Within, an error of the file system names `path` and not a temporary file, or nothing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"--output cannot be written ({error.strerror})", path) from None
