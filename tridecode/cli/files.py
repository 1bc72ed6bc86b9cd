"""Files that are written whole or not at all."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path, private: bool = False, errors: str = "strict") -> Iterator[TextIO]:
    """Yield a text file. When it is complete and on the disk, it replaces `path`, or the target of the link `path`.

    Until then, and if an error occurs, an older file stays unchanged. If its directory does not permit a replacement,
    the older file is overwritten then.

    Args:
        private: only the owner may read it; otherwise it has the mode of the file that it replaces.
        errors: the argument of the same name of `open`.
    """
    target = Path(os.path.realpath(path))
    if exists := target.exists():
        open(target, "a").close()  # This call raises an error if the file is not writable.
    place = target.with_name(f".tridecode-{secrets.token_hex(6)}.tmp")
    mode = 0o600 if private else 0o666
    create = partial(open, mode="x", encoding="utf-8", errors=errors, newline="\n", opener=partial(os.open, mode=mode))
    try:
        file = create(place)
    except OSError:  # The directory is not writable.
        if not exists:
            raise
        place = Path(tempfile.gettempdir(), place.name)
        file = create(place)
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        if target.is_file() and not private:
            place.chmod(target.stat().st_mode & 0o7777)
        try:
            place.replace(target)
        except OSError:  # The directory is on another file system, is sticky, or the file is a mount point.
            if not exists:
                raise
            shutil.copyfile(place, target)
            place.unlink()
    except BaseException:
        with suppress(OSError):  # The program has already reported the full disk.
            file.close()
        place.unlink(missing_ok=True)
        raise
