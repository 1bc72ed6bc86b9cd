"""What a terminal sends beside keys: mouse reports, answers to questions, colours in pasted text. It is dropped."""

import re

from prompt_toolkit.input.ansi_escape_sequences import ANSI_SEQUENCES
from prompt_toolkit.input.vt100_parser import Vt100Parser

PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
LONGEST = 4096  # characters that may wait for a sequence's end

# An old mouse report, CSI, SS3, OSC, and DCS or APC as terminals send them. Alt and a letter begin like some of these,
# so no more is taken for one than has to be.
_SEQUENCE = re.compile(
    r"\x1b(?:\[M.{3}|\[\[.|\[(?![M[])[0-?]*[ -/]*[@-~]|O[!-~]"
    r"|\]\d+;[^\x07\x1b]*(?:\x07|\x1b\\)|(?:P[\d!$+=>?]|_G)[^\x07\x1b]*\x1b\\)",
    re.S,
)
_BEGUN = re.compile(
    r"\x1b(?:\[M.{0,2}|\[\[?|\[[0-?]*[ -/]*|O"
    r"|\]\d*|\]\d+;[^\x07\x1b]*\x1b?|P|_|(?:P[\d!$+=>?]|_G)[^\x07\x1b]*\x1b?)?\Z",
    re.S,
)
_PASTE_ENDS = re.compile(r"\x1b(?:\[(?:2(?:01?)?)?)?\Z")


class Parser(Vt100Parser):
    """Keys from what a terminal sends. A pasted text stays as it is; a sequence that is no key is dropped."""

    ahead = False  # whether what comes next was typed before the prompt was there

    def __init__(self, feed_key_callback):
        super().__init__(feed_key_callback)
        self._held, self._pasting = "", False

    def feed(self, data: str) -> None:
        if self.ahead:  # while nobody edits, the kernel keeps a Ctrl-D as NUL, which else is Ctrl-Space
            data, self.ahead = data.replace("\0", "\x04"), False
        data, self._held = self._held + data, ""
        while data:
            data = self._paste(data) if self._pasting else self._keys(data)

    def flush(self) -> None:
        """Nothing came for a while: what was held are keys, such as Escape alone."""
        held, self._held = self._held, ""
        super().feed(held)
        super().flush()

    def _keys(self, data: str) -> str:
        """Feed `data` up to a sequence's end; returns the rest."""
        begin = data.find("\x1b")
        if begin < 0:
            begin = len(data)
        super().feed(data[:begin])
        data = data[begin:]
        if found := _SEQUENCE.match(data):
            if found[0] in ANSI_SEQUENCES:
                super().feed(found[0])
                self._pasting = found[0] == PASTE
            return data[found.end() :]
        if _BEGUN.match(data) and len(data) <= LONGEST:
            self._held = data
            return ""
        super().feed(data[:1])
        return data[1:]

    def _paste(self, data: str) -> str:
        head, end, rest = data.partition(PASTE_END)
        self._pasting = not end
        if not end and (begun := _PASTE_ENDS.search(head, max(len(head) - len(PASTE_END), 0))):
            head, self._held = head[: begun.start()], begun[0]
        super().feed(head + end)
        return rest
