"""The result file of a batch.

It is locked while a batch runs, and a batch can be resumed. No other file is overwritten.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

from ...errors import PromptError
from ..outputs import naming, open_special, text_sink, writer
from ..terminal import Output

RENAME_FIX = "give --output another name, or move this file away"
Answered = Callable[[int, str], bool]
LONGEST = 64 << 20  # Maximum bytes of a line.
# The beginning of every line, also of an incomplete line.
_HEAD = re.compile(rb'\{"index": (\d{1,18}), "input": "([0-9a-f]{16})"')
_CUT_HEAD = re.compile(rb'\{"index": \d{1,18}, "input": "[0-9a-f]{0,16}')
_EMPTY_HEAD = b'{"index": 0, "input": "'


@contextmanager
def open_results(
    path: str | None, answered: Answered, output: Output
) -> Iterator[tuple[set[int], Callable[[str], None]]]:
    """Yield the indices of the input that the file answers, and the function that appends a line to it.

    Failed lines, and a last line that was cut off, are removed from the file.

    Args:
        answered: answered(index, key) returns whether the input has that line.

    Raises:
        PromptError: the file has other content, or another process writes it. The file is unchanged.
    """
    if path is None:
        yield set(), output.text
        return
    with ExitStack() as files:
        with naming(path):
            special = open_special(path)
        if special is not None:
            files.callback(close, special)
            yield set(), writer(special, path, flush=True)
            return
        file = files.enter_context(locked(path))
        indices = {index for _, index in entries(file, answered, path)}
        if None in indices:
            with text_sink(path, output) as write:
                for line, index in entries(file, answered, path):
                    if index is not None:
                        write(line.decode())
            close(file)  # This unlocks the file, which text_sink may have overwritten in place.
            file = files.enter_context(locked(path))
        yield {index for index in indices if index is not None}, writer(file, path, flush=True)


@contextmanager
def locked(path: str) -> Iterator[TextIO]:
    """Yield the file, open for reading and appending. Raises PromptError if another process has locked it."""
    with naming(path):
        file = open(path, "a+", encoding="utf-8", newline="\n")
    try:
        busy = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = True
        except OSError:  # The file system has no locks.
            pass
        # The previous holder of the lock may have replaced the file.
        if busy or not (os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno()))):
            raise PromptError(f"{path}: another process writes to it; wait until it ends, or choose another --output")
        yield file
    finally:
        close(file)


def close(file: TextIO) -> None:
    """Close the file without reporting an error."""
    with suppress(OSError):  # The program has already flushed every line.
        file.close()


def entries(file: TextIO, answered: Answered, path: str) -> Iterator[tuple[bytes, int | None]]:
    """Yield each line with the index of the input that it answers, or None.

    The index is None for a failed answer, and for a last line that was cut off.

    Raises:
        PromptError: a line is not a result of this command for this input.
    """
    file.seek(0)
    offset, data = 0, file.buffer
    for number, line in enumerate(iter(lambda: data.readline(LONGEST), b""), 1):
        if line.endswith(b"\n"):
            yield line, answered_by(line, answered, f"{path}: line {number:,}")
        else:
            start = line.rstrip(b"\0")
            if start and not is_cut_off(start, answered, number == 1):
                raise PromptError(f"{path}: its last line is not a result of this command; {RENAME_FIX}")
            if len(start) < len(line):
                raise nul_bytes(path, offset + len(start))
            yield line, None
        offset += len(line)


def nul_bytes(path: str, offset: int) -> PromptError:
    """Return the error for a file that contains NUL bytes from byte `offset` on."""
    return PromptError(
        f"{path}: from byte {offset:,} on it contains NUL bytes, probably after a power failure; "
        f"cut them off with truncate --size={offset}, or {RENAME_FIX}"
    )


def answered_by(line: bytes, answered: Answered, place: str) -> int | None:
    """Return the index of the input line that a line of the results answers, or None for a line to be retried.

    Args:
        answered: called with the index and the key; returns whether the input has that line.
        place: the file and line, for errors.

    Raises:
        PromptError: the line is not a result of this command, or not for this input.
    """
    try:
        head, entry = _HEAD.match(line), json.loads(line)
        if head is None:
            raise ValueError
        index, error = int(head[1]), entry.get("error")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise PromptError(f"{place} is not a result of this command; {RENAME_FIX}") from None
    if isinstance(error, str) and error.startswith(f"line {index + 1}: "):
        return None
    if error is not None or not {"token_ids", "text", "finish_reason"} <= entry.keys():
        raise PromptError(f"{place} is not a result of this command; {RENAME_FIX}")
    if not answered(index, head[2].decode()):
        raise PromptError(f"{place} answers a line that is not in the input; {RENAME_FIX}")
    return index


def is_cut_off(line: bytes, answered: Answered, only: bool) -> bool:
    """Return whether the last line of a file is the beginning of a result.

    If it is the `only` line, it must name a line of the input.
    """
    if head := _HEAD.match(line):
        return not only or answered(int(head[1]), head[2].decode())
    beginning = _CUT_HEAD.fullmatch(line) or _EMPTY_HEAD.startswith(re.sub(rb"\d{1,18}", b"0", line))
    return bool(beginning) and not only
