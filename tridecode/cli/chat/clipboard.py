"""The clipboard, set by the escape sequence OSC 52, which also works over SSH and needs no other program."""

import base64

from ...errors import TridecodeError
from ..terminal import Output, visible

LARGEST = 74_994  # Maximum bytes of text. The encoded sequence stays below the 100,000 bytes that terminals accept.


def copy(text: str, output: Output) -> None:
    """Request that the terminal copies `text` to the clipboard. The terminal does not report success.

    Raises:
        TridecodeError: stdout is not a terminal, or the text is too long.
    """
    if not output.tty or output.console.is_dumb_terminal:
        raise TridecodeError("/copy needs a terminal; /export FILE.md writes the conversation to a file")
    # The user may paste the text into a shell, so control characters are replaced.
    data = visible(text).encode("utf-8", "replace")
    if len(data) > LARGEST:
        raise TridecodeError(
            f"the answer has {len(data):,} bytes, terminals take at most {LARGEST:,}; /export FILE.md writes a file"
        )
    output.console.file.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    output.console.file.flush()
