"""Streaming conversion of token ids to text.

The bytes of tokens are decoded as UTF-8 incrementally: a character is returned with the token that has its last byte.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import tokenizers

from ..errors import CheckpointError
from .encoder import steps

_MAX_DECODER_STEPS = 16
_BYTE_TOKEN = re.compile(rb"<0x([0-9A-F]{2})>")


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


def _byte_level(data: bytes) -> bytes:
    """Return the bytes that characters of the byte-level alphabet represent. Leave other text as it is."""
    try:
        return data.decode().translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeError:
        return data


def _byte_fallback(data: bytes) -> bytes:
    """Return the byte that a token like <0x0A> represents. Leave other text as it is."""
    byte = _BYTE_TOKEN.fullmatch(data)
    return bytes([int(byte[1], 16)]) if byte else data


def _replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    return data.replace(old, new)


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict]:
    """Return the steps of the tokenizer's decoder, corrected by the form of the vocabulary.

    Some published files combine a byte-level vocabulary with a decoder for SentencePiece, or the reverse, or lack a
    decoder. The normalizer and the pre-tokenizer decide, because the vocabulary was trained on their output.
    """
    decoding, encoding = steps(tokenizer.decoder), [*steps(tokenizer.normalizer), *steps(tokenizer.pre_tokenizer)]
    if any(step["type"] == "ByteLevel" for step in encoding):
        is_byte_level = any(step["type"] == "ByteLevel" for step in decoding)
        return decoding if is_byte_level else [*decoding, {"type": "ByteLevel"}]
    for step in encoding:
        match step:
            case {"type": "Metaspace", "replacement": space}:
                undo = step
            case {"type": "Replace", "pattern": {"String": " "}, "content": str(space)} if space:
                undo = {"type": "Replace", "pattern": {"String": space}, "content": " "}
            case _:
                continue
        decoding = [other for other in decoding if other["type"] != "ByteLevel"]
        if not any(space in (other.get("replacement"), *other.get("pattern", {}).values()) for other in decoding):
            bytes_too = [{"type": "ByteFallback"}] if getattr(tokenizer.model, "byte_fallback", False) else []
            return [*decoding, undo, *bytes_too]
    return decoding


class TokenBytes:
    """The bytes of each token, computed as the tokenizer's decoder specifies.

    Supported are the steps of decoders of byte-level BPE (ByteLevel) and of SentencePiece (Metaspace, or Replace with
    ByteFallback), alone or in a sequence.

    Args:
        source: path of the tokenizer's file, for error messages.

    Attributes:
        special: ids of the special tokens.
        lossless: whether every text can be encoded without the unknown token.

    Raises:
        CheckpointError: the decoder is not supported.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: Path | str = "tokenizer.json"):
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._steps: list[Callable[[bytes], bytes]] = []
        self._drop_first = b""  # A string that is removed from the beginning of the first token of a text.
        self._drop_all = False  # Whether the string is removed from the whole token instead.
        self._cache: dict[int, bytes] = {}
        decoding = _decoder_steps(tokenizer)
        if len(decoding) > _MAX_DECODER_STEPS:
            raise CheckpointError(
                f"{source}: the decoder has {len(decoding)} steps; at most {_MAX_DECODER_STEPS} are supported"
            )
        for step in decoding or [{"type": None}]:
            if not self._accept(step):
                raise CheckpointError(
                    f"{source}: decoder {json.dumps(step)[:100]} is not supported; expected that of byte-level BPE "
                    "(ByteLevel) or of SentencePiece (Metaspace, or ByteFallback and Replace by a string of at most "
                    "the same length)"
                )
        self.lossless = _byte_level in self._steps or _byte_fallback in self._steps

    def _accept(self, step: dict) -> bool:
        """Configure this object for one decoder step; return whether the step is supported."""
        match step:
            case {"type": "ByteLevel"}:
                self._steps.append(_byte_level)
                # A prefix space that an earlier step removes is written in another way in a byte-level vocabulary.
                self._drop_first, self._drop_all = b"", False
            case {"type": "ByteFallback"}:
                self._steps.append(_byte_fallback)
            case {"type": "Fuse"}:
                pass  # A decoder of type Fuse joins tokens. Detokenizer always joins them.
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if 0 < len(old) >= len(new):
                self._replace(old, new)
            case {"type": "Metaspace", "replacement": old}:
                self._replace(old, " ")
                if step.get("prepend_scheme", "always") != "never":
                    self._drop_first, self._drop_all = b" ", True
            case {"type": "Strip", "content": text, "start": start, "stop": 0} if start <= 1:
                self._drop_first, self._drop_all = (text * start).encode(), False
            case _:
                return False
        return True

    def _replace(self, old: str, new: str) -> None:
        self._steps.append(partial(_replaced, old=old.encode(), new=new.encode()))

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
            data = data.replace(self._drop_first, b"") if self._drop_all else data.removeprefix(self._drop_first)
        return data

    def size(self, token: int) -> int:
        """Return the number of bytes of a token."""
        return len(self._bytes(token))

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:  # The id is padding of the embedding matrix. U+FFFD shows that the model generated such an id.
            return "\ufffd".encode()
        data = text.encode()
        for step in self._steps:
            data = step(data)
        return data


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
