"""Reading of checkpoint files. Only regular files of a limited size are read, because a checkpoint is not trusted."""

import os
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

# The first bytes, in lower case, of files that are often found in place of another one -> the message.
_SIGNATURES = {
    b"version https://git-lfs.": "is a git-lfs pointer, not the file; install git-lfs, run `git lfs pull` in {folder}",
    b"<!doctype html": "is a web page, not the file; download it from an address with /resolve/ instead of /blob/",
    b"gguf": "is a GGUF file; give its own path as the model",
    b"pk\x03\x04": "is a PyTorch or zip file; convert the checkpoint with transformers' save_pretrained",
}


def present(path: Path) -> bool:
    """Return whether a directory entry with this name exists. If it is not a regular file, it is refused later."""
    return os.path.lexists(path)


def open_regular(path: Path, gguf: bool = False) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        gguf: the file may be a GGUF file.

    Raises:
        CheckpointError: it is a directory, a device or a pipe, or its first bytes belong to another kind of file.
    """
    with ExitStack() as refused:
        try:
            # Without O_NONBLOCK, opening a pipe that has no writer would block.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            refused.callback(os.close, descriptor)
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            start = os.pread(descriptor, 64, 0).lower() if regular else b""
        except OSError as error:
            raise unreadable(path, error) from None
        if not regular:
            raise CheckpointError(f"{path}: is not a regular file; download the checkpoint again")
        for signature, text in _SIGNATURES.items():
            if start.startswith(signature) and not (gguf and signature == b"gguf"):
                raise CheckpointError(f"{path}: {text.format(folder=path.parent)}")
        refused.pop_all()
        return os.fdopen(descriptor, "rb")


def read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file, at most `limit`. Raises CheckpointError."""
    with open_regular(path) as file:
        try:
            data = file.read(limit + 1) if (size := os.fstat(file.fileno()).st_size) <= limit else None
        except OSError as error:
            raise unreadable(path, error) from None
        if data is None or len(data) > limit:
            raise CheckpointError(
                f"{path}: larger than {limit >> 20} MiB ({size:,} bytes), which is too large; download it again"
            )
        return data


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file")


def unique(refusal: Callable[[str], Exception]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an object_pairs_hook for JSON. It raises refusal(name) if an object has a name twice."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items = dict(pairs)
        if len(items) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise refusal(next(name for name, count in counts.items() if count > 1))
        return items

    return hook
