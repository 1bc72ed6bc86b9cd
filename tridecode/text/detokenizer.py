"""Streaming conversion of token ids to text.

The bytes of tokens are decoded as UTF-8 incrementally: a character is returned with the token that has its last byte.
"""

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError

_MAX_DECODER_STEPS = 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in the alphabet of byte-level BPE.

    A printable byte is represented by the character with the same code. Other bytes are represented by characters that
    begin at U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# A table for str.translate. Characters outside the alphabet become U+FFFF, which cannot be encoded as Latin-1.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for char, byte in _byte_alphabet().items()}


class TokenBytes:
    """The bytes of each token, computed as the tokenizer's decoder specifies.

    Supported are the decoders of byte-level BPE (ByteLevel) and of SentencePiece (Metaspace, or Replace with
    ByteFallback).

    Args:
        source: path of the tokenizer's file, for error messages.

    Attributes:
        special: ids of the special tokens.

    Raises:
        CheckpointError: the decoder is not supported.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: Path | str = "tokenizer.json"):
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._byte_level = self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self._drop_first = ""  # A string that is removed from the beginning of the first token of a text.
        self._drop_all = False  # Whether the string is removed from the whole token instead.
        self._cache: dict[int, bytes] = {}
        decoder = tokenizer.decoder
        state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        for step in steps:
            if not self._accept(step):
                raise CheckpointError(
                    f"{source}: decoder {json.dumps(step)[:100]} is not supported; expected that of byte-level BPE "
                    "(ByteLevel) or of SentencePiece (Metaspace, or ByteFallback and Replace by a string of at most "
                    "the same length)"
                )
        if len(steps) > _MAX_DECODER_STEPS:
            raise CheckpointError(
                f"{source}: the decoder has {len(steps)} steps; at most {_MAX_DECODER_STEPS} are supported"
            )
        if self._byte_level and len(steps) > 1:
            raise CheckpointError(f"{source}: ByteLevel must be the only decoder, got {len(steps)} decoders")

    def _accept(self, step: dict) -> bool:
        """Configure this object for one decoder step; return whether the step is supported."""
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass  # The step joins tokens, which Detokenizer always does.
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
        """Return the bytes of a token. For an id that is not in the tokenizer, return the bytes of U+FFFD.

        Args:
            token: token id.
            first: whether the token is the first one of a text. If so, its prefix space is removed.
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
        """Whether every text can be encoded without the unknown token."""
        return self._byte_level or self._byte_fallback

    def size(self, token: int) -> int:
        """Return the number of bytes of a token."""
        return len(self._bytes(token))

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # The id is padding of the embedding matrix. U+FFFD shows that the model generated such an id.
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
    """An incremental decoder for one stream of tokens.

    Call `push` with each token id and `flush` at the end. The returned parts together are the whole text. At most the
    3 bytes of an incomplete character are held back. Bytes that are not UTF-8 become U+FFFD.

    Args:
        prompt_ids: token ids that precede the stream. With them, the stream keeps its prefix space, and completes a
            character that is incomplete at the end of the prompt.
        skip_special: whether special tokens are omitted from the text.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int] = (), skip_special: bool = True):
        self._token_bytes = token_bytes
        self._hidden = token_bytes.special if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        if any(token not in self._hidden for token in prompt_ids):
            for token in prompt_ids[-8:]:  # A UTF-8 character has at most 4 bytes, so it has at most 4 tokens.
                self.push(token)
            self._first = False

    def push(self, token: int) -> str:
        """Return the text that `token` completes, or "" if a character is still incomplete."""
        if token in self._hidden:
            return ""
        data = self._token_bytes(token, self._first)
        self._first = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return U+FFFD if the stream ends within a character, else ""."""
        return self._utf8.decode(b"", final=True)
