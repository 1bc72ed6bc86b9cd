"""Files of a checkpoint: regular ones, of a bounded size. What a directory holds was written by others."""

import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


def present(path: Path) -> bool:
    """Whether a directory has an entry of this name, of whatever kind: an odd one is refused, not passed over."""
    return os.path.lexists(path)


def open_regular(path: Path) -> BufferedReader:
    """Open for reading; CheckpointError for what is no regular file (a directory, a device, a pipe)."""
    try:
        # A pipe without a writer would block the open itself.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise unreadable(path, error) from None
    os.close(descriptor)
    raise CheckpointError(f"{path}: is no regular file, which it must be; download the checkpoint again")


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file, at most `limit` of them; raises CheckpointError."""
    with open_regular(path) as file:
        try:
            data = file.read(limit + 1) if (size := os.fstat(file.fileno()).st_size) <= limit else None
        except OSError as error:
            raise unreadable(path, error) from None
        if data is None or len(data) > limit:
            raise CheckpointError(
                f"{path}: larger than {limit >> 20} MiB ({size:,} bytes); no such file is, download it again"
            )
        return data


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file")


def unique(refusal: Callable[[str], Exception]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an object_pairs_hook for JSON. It raises refusal(name) if an object has a name twice."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise refusal(name)
            found[name] = value
        return found

    return hook
