"""Token ids to text, one at a time, as bytes: a character is shown when its last byte has arrived."""

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError

_MOST_STEPS = 16  # of a decoder
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes are themselves, the others characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# For str.translate: other characters become one that Latin-1 lacks.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for char, byte in _byte_alphabet().items()}


class TokenBytes:
    """The bytes of each token, by a tokenizer's decoder: of byte-level BPE (ByteLevel) or of SentencePiece (Metaspace,
    or Replace with ByteFallback).

    Args:
        source: its file, for messages.

    Raises:
        CheckpointError: the decoder is another one.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: Path | str = "tokenizer.json"):
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._byte_level = self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self._drop_first = ""  # text that is removed from the front of a text's first token
        self._drop_all = False  # or from anywhere in that token
        self._cache: dict[int, bytes] = {}
        decoder = tokenizer.decoder
        state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        for step in steps:
            if not self._accept(step):
                raise CheckpointError(
                    f"{source}: decoder {json.dumps(step)[:100]} is not supported; expected that of byte-level BPE "
                    "(ByteLevel) or of SentencePiece (Metaspace, or Replace, with nothing longer, and ByteFallback)"
                )
        if len(steps) > _MOST_STEPS:
            raise CheckpointError(f"{source}: its decoder has {len(steps)} steps; at most {_MOST_STEPS} are supported")
        if self._byte_level and len(steps) > 1:
            raise CheckpointError(f"{source}: decoder ByteLevel must stand alone, got {len(steps)} decoders")

    def _accept(self, step: dict) -> bool:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass  # the bytes of tokens are joined anyway
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if 0 < len(old) >= len(new):
                self._replace.append((old, new))
            case {"type": "Metaspace", "replacement": old}:
                self._replace.append((old, " "))
                if step.get("prepend_scheme", "always") != "never":
                    self._drop_first, self._drop_all = " ", True
            case {"type": "Strip", "content": text, "start": start, "stop": 0} if start <= 1:
                self._drop_first = text * start
            case _:
                return False
        return True

    def __call__(self, token: int, first: bool = False) -> bytes:
        """Return the bytes of `token`, U+FFFD for an id that the tokenizer lacks.

        Args:
            first: it is the first token of a text, and loses its prefix space.
        """
        if token not in self._cache:
            self._cache[token] = self._bytes(token)
        data = self._cache[token]
        if first and self._drop_first and token not in self._added:
            prefix = self._drop_first.encode()
            data = data.replace(prefix, b"") if self._drop_all else data.removeprefix(prefix)
        return data

    @property
    def lossless(self) -> bool:
        """Whether no text becomes the unknown token."""
        return self._byte_level or self._byte_fallback

    def size(self, token: int) -> int:
        return len(self._bytes(token))

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # a row that pads the embedding; it must be visible that the model chose it
            return "\ufffd".encode()
        if self._byte_level:
            try:
                return text.translate(_TO_LATIN_1).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replace:
            text = text.replace(old, new)
        return text.encode()


class Detokenizer:
    """The text of a stream of tokens: `push` each id, `flush` at the end. The parts together are the whole text.

    It holds at most the 3 bytes of an unfinished character. Bytes that are not UTF-8 become U+FFFD.

    Args:
        prompt_ids: the text continues theirs: it keeps its prefix space and finishes their last character.
        skip_special: special tokens have no text.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int] = (), skip_special: bool = True):
        self._token_bytes = token_bytes
        self._hidden = token_bytes.special if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        if any(token not in self._hidden for token in prompt_ids):
            for token in prompt_ids[-8:]:  # more tokens than a character has
                self.push(token)
            self._first = False

    def push(self, token: int) -> str:
        """Return the text that `token` completes, "" while its character lacks bytes."""
        if token in self._hidden:
            return ""
        data = self._token_bytes(token, self._first)
        self._first = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return the bytes of an unfinished character as U+FFFD."""
        return self._utf8.decode(b"", final=True)
