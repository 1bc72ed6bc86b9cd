"""The destination of --output: a file that is written whole or not at all, or a device or pipe."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import ParameterError
from .files import replacing
from .terminal import Output, Visible

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr|fd/(\d{1,9}))|/proc/self/fd/(\d{1,9})")


@contextmanager
def text_sink(path: str | None, output: Output) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes to stdout, or to a file. When the file is complete, it replaces `path`.

    Until then, and if an error occurs, an older file stays unchanged. Devices and pipes are written directly.
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
    """Return the function that writes to `file`, with `flush` at once. A terminal gets no control characters."""
    shown = Visible() if file.isatty() else str

    def write(text: str) -> None:
        with naming(path):
            file.write(shown(text))
            if flush:
                file.flush()

    return write


def open_special(path: str) -> TextIO | None:
    """Open a path that is not a regular file; return None for a regular file, or if there is no file yet.

    The path is a device, a pipe, or the name of an open descriptor, such as /dev/fd/63, which a shell writes for
    >(command). The file of a descriptor is not opened again, because that would empty it.
    """
    if match := _DESCRIPTOR.fullmatch(path):
        name = match[2] or match[3] or ("1" if match[1] == "stdout" else "2")
        return open(os.dup(int(name)), "w", encoding="utf-8", newline="\n")
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return None
    except FileNotFoundError:
        return None
    return open(path, "w", encoding="utf-8", newline="\n")


@contextmanager
def naming(path: str):
    """Change file system errors so that they name `path` and not a temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"--output cannot be written ({error.strerror})", path) from None


def new_directory(path: str) -> Path:
    """Return the path of a directory that does not exist, or is empty. Raises ParameterError for other paths."""
    out = Path(path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ParameterError(f"{out}: must be a new or an empty directory")
    return out
