"""Key sequences of terminals in the form that prompt_toolkit knows.

A terminal may report a key with modifiers as CSI code;modifiers u (kitty's protocol) or as CSI 27;modifiers;code ~
(xterm's modifyOtherKeys). Source: https://sw.kovidgoyal.net/kitty/keyboard-protocol.
"""

import re
from collections.abc import Callable

from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyPress

SHIFT, ALT, CONTROL, SUPER_HYPER_META = 1, 2, 4, 8 + 16 + 32
ENTER, NEW_LINE = "\r", "\x1b\r"  # The second is Alt-Enter.
RELEASED = "3"
PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
# Keys of the number pad, which kitty's protocol reports with codes of their own from 57399 on.
PAD = [
    *"0123456789./*-+",
    ENTER,
    *"=,",
    *(f"\x1b[{end}" for end in ("D", "C", "A", "B", "5~", "6~", "H", "F", "2~", "3~")),
]
SEQUENCE = re.compile(r"\x1b\[(?:M...|([0-?]*)[ -/]*([@-~]))|\x1bO(.)", re.DOTALL)
INCOMPLETE = re.compile(r"\x1b(?:\[(?:M.{0,2}|[0-?]*[ -/]*)|O)?\Z", re.DOTALL)


class KeyParser(Vt100Parser):
    """A parser that knows the keys with modifiers of all terminals, and drops all other sequences."""

    def __init__(self, feed_key_callback: Callable[[KeyPress], None]):
        super().__init__(feed_key_callback)
        self._incomplete, self._pastes = "", False

    def feed(self, data: str) -> None:
        """Parse text from the terminal. The text of a paste stays as it is."""
        data, self._incomplete = self._incomplete + data, ""
        while data:
            inside = self._pastes
            text, mark, data = data.partition(PASTE_END if inside else PASTE)
            self._pastes = inside != bool(mark)
            if inside:
                super().feed(text + mark)
                continue
            if not mark and (cut := INCOMPLETE.search(text)):
                text, self._incomplete = text[: cut.start()], text[cut.start() :]
            super().feed(SEQUENCE.sub(known, text) + mark)

    def flush(self) -> None:
        """Parse the beginning of a sequence that has no end, such as the Escape key."""
        text, self._incomplete = self._incomplete, ""
        super().feed(text)
        super().flush()


def known(match: re.Match) -> str:
    """Return the key of a match of SEQUENCE as a sequence that prompt_toolkit knows; "" if there is none."""
    sequence, parameters, end = match[0], match[1] or "", match[2]
    if match[3] == "M":  # Enter of the number pad.
        return ENTER
    fields = [field.split(":") for field in parameters.split(";")]
    if end == "~" and fields[0] == ["27"] and len(fields) == 3:
        fields, end = [fields[2], fields[1]], "u"
    modifiers = fields[1] if len(fields) > 1 else [""]
    if modifiers[1:] == [RELEASED]:
        return ""
    mask = int(modifiers[0]) - 1 if modifiers[0].isdecimal() else 0
    mask &= SHIFT | ALT | CONTROL | SUPER_HYPER_META  # The others are Caps Lock and Num Lock.
    if mask & SUPER_HYPER_META:
        return ""
    if end == "u" and fields[0][0].isdecimal():
        return character(int(fields[0][0]), mask)
    if end and len(fields) > 1:
        number = fields[0][0]
        sequence = f"\x1b[{number};{mask + 1}{end}" if mask else f"\x1b[{'' if number == '1' else number}{end}"
    return sequence if sequence in ANSI_SEQUENCES else ""


def character(code: int, mask: int) -> str:
    """Return the text that a terminal sends by default for the key of a character with modifiers; "" if none."""
    text = PAD[code - 57399] if 0 <= code - 57399 < len(PAD) else chr(code) if code < 57344 else ""
    if text == ENTER:
        return NEW_LINE if mask else ENTER
    if text == "\t":
        return "\x1b[Z" if mask & SHIFT else text
    if mask & SHIFT:
        text = text.upper()
    if mask & CONTROL and text not in ("\x1b", "\x7f"):
        text = chr(ord(text.upper()) & 0x1F) if re.fullmatch(r"[ @-_a-z]", text) else ""
    return "\x1b" * bool(mask & ALT and text) + text
