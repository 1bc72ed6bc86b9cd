"""The clipboard, through the terminal: OSC 52 works over SSH too, and needs no program beside it."""

import base64

from ...errors import TridecodeError
from ..terminal import Output, visible

LARGEST = 74_994  # bytes of text: the sequence stays within the 100,000 that terminals take


def copy(text: str, output: Output) -> None:
    """Ask the terminal to put `text` into the clipboard; it does not say whether it did. Raises TridecodeError."""
    if not output.tty or output.console.is_dumb_terminal:
        raise TridecodeError("/copy needs a terminal; /export FILE.md writes the conversation to a file")
    # What is pasted may end in a shell: no control characters.
    data = visible(text).encode("utf-8", "replace")
    if len(data) > LARGEST:
        raise TridecodeError(
            f"the answer has {len(data):,} bytes, terminals take at most {LARGEST:,}; /export FILE.md writes a file"
        )
    output.console.file.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\x07")
    output.console.file.flush()
