"""The API key of a server and its clients."""

import os

from ..errors import ParameterError
from .inputs import read_file
from .terminal import Output

VARIABLE = "TRIDECODE_API_KEY"


def api_key(path: str | None, output: Output) -> str | None:
    """Return the API key: the only line of the file, or the environment variable VARIABLE if there is no file.

    Raises PromptError or ParameterError.
    """
    if path is None:
        key = os.environ.get(VARIABLE, "").strip()
        if not key:
            return None
    else:
        key = read_file(path, output, 10_000).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ParameterError(f"{path or VARIABLE}: expected one line of printable ASCII characters, the API key")
    return key
