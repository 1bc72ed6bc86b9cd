"""Tokenizers of GGUF files, as objects of the tokenizers library: byte-level BPE, and SentencePiece's BPE.

A GGUF file names the pre-tokenizer of byte-level BPE and does not contain its pattern.
Source: `llama-vocab.cpp` in llama.cpp for the names, and the tokenizer.json of each model for the patterns.
"""

from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..arguments import shown
from ..errors import CheckpointError, brief, counted
from ..models.gguf import GGUF, read_gguf
from ..models.reader import ConfigReader
from .encoder import LLAMA3, O200K, QWEN2, QWEN35, TEKKEN

KEYS = "tokenizer.ggml."
# Values of token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "mask": "mask_token"}
_LEADING = "▁"  # SentencePiece's space.


class PreTokenizer(NamedTuple):
    """The properties of byte-level BPE that the name of a pre-tokenizer stands for.

    Args:
        pattern: the pattern that splits words; None for that of GPT-2.
        digits: digits are split first.
        nfc: text is normalized.
        whole_words: a word in the vocabulary is one token, regardless of the merges. Such tokenizers also add bos.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False


PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), PreTokenizer()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), PreTokenizer(digits=True)
    ),
    "qwen2": PreTokenizer(QWEN2, nfc=True),
    "qwen35": PreTokenizer(QWEN35, nfc=True),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen"), PreTokenizer(QWEN2)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), PreTokenizer(LLAMA3, whole_words=True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(LLAMA3)),
    "tekken": PreTokenizer(TEKKEN, whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(O200K)),
}


class GGUFTokenizer(NamedTuple):
    """The tokenizer in a GGUF file, the texts of its special tokens by name, and its chat template or None."""

    tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    template: str | None


def load_gguf_tokenizer(path: Path) -> GGUFTokenizer:
    """Return the tokenizer of a GGUF file. Raises CheckpointError."""
    gguf = read_gguf(path)
    read = gguf.reader()
    kind = read.choice(f"{KEYS}model", ("gpt2", "llama"), None)
    tokens = gguf.strings(f"{KEYS}tokens")
    if not tokens:
        raise CheckpointError(f"{path}: {KEYS}tokens is missing; use another copy of the file")
    types = gguf.numbers(f"{KEYS}token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{path}: {KEYS}token_type must have {counted(len(tokens), 'element')}, got {len(types):,}"
        )
    try:
        add_bos = read.flag(f"{KEYS}add_bos_token", True)
        if kind == "gpt2":
            tokenizer, whole = _byte_level(gguf, read, tokens)
            add_bos = read.flag(f"{KEYS}add_bos_token", whole)
        else:
            tokenizer = _sentencepiece(gguf, read, tokens, types)
        added = [
            AddedToken(text, special=type_ != _USER_DEFINED, normalized=False)
            for text, type_ in zip(tokens, types)
            if type_ in (_CONTROL, _USER_DEFINED) or type_ == _UNKNOWN and kind == "llama"
        ]
        tokenizer.add_tokens(added)
        named = _named(read, tokens, kind)
        bos, eos = named.get("bos_token") if add_bos else None, None
        if read.flag(f"{KEYS}add_eos_token"):
            eos = named.get("eos_token")
        if bos or eos:
            ids = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(filter(None, (bos, eos)))]
            parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
            tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:  # tokenizers raises plain Exceptions. A panic in Rust is a BaseException.
        raise CheckpointError(
            f"{path}: its tokenizer is malformed ({brief(error)}); use another copy of the file"
        ) from None
    template = read.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise read.fail("tokenizer.chat_template", "a string")
    return GGUFTokenizer(tokenizer, named, template)


def _named(read: ConfigReader, tokens: list[str], kind: str) -> dict[str, str]:
    """Return the texts of the special tokens by name."""
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    ids = {name: read.get(f"{KEYS}{key}_token_id", defaults.get(key)) for key, name in _NAMED.items()}
    for key, name in _NAMED.items():
        if ids[name] is not None and not (type(ids[name]) is int and 0 <= ids[name] < len(tokens)):
            raise read.fail(f"{KEYS}{key}_token_id", f"the id of one of {counted(len(tokens), 'token')}")
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def _ids(path: Path, tokens: list[str]) -> dict[str, int]:
    """Return the id of each token."""
    ids: dict[str, int] = {}
    for token, text in enumerate(tokens):
        if ids.setdefault(text, token) != token:
            raise CheckpointError(f"{path}: tokens {ids[text]} and {token} are both {shown(text)}")
    return ids


def _byte_level(gguf: GGUF, read: ConfigReader, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a tokenizer of byte-level BPE, and whether it adds bos by default."""
    name = read.choice(f"{KEYS}pre", tuple(PRE_TOKENIZERS), None)
    pre = PRE_TOKENIZERS[name]
    merges = []
    for text in gguf.strings(f"{KEYS}merges"):
        left, space, right = text.partition(" ")
        if not space or not left or not right:
            raise CheckpointError(f"{gguf.path}: {KEYS}merges must hold pairs of tokens, got {shown(text)}")
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(_ids(gguf.path, tokens), merges, ignore_merges=pre.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.whole_words


def _sentencepiece(gguf: GGUF, read: ConfigReader, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """Return a tokenizer of SentencePiece's BPE, which merges the pair whose joined token has the highest score."""
    scores = gguf.numbers(f"{KEYS}scores")
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{gguf.path}: {KEYS}scores must have {counted(len(tokens), 'element')}, got {len(scores):,}"
        )
    ids = _ids(gguf.path, tokens)
    pairs = []
    for text, score, type_ in zip(tokens, scores, types):
        if type_ != _NORMAL:
            continue
        splits = ((text[:place], text[place:]) for place in range(1, len(text)))
        joined = sorted((ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids)
        pairs += [(-score, -len(left), -len(right), left, right) for _, _, left, right in joined]
    pairs.sort(key=lambda pair: pair[:3])
    unknown = read.get(f"{KEYS}unknown_token_id", 0)
    unknown = tokens[unknown] if type(unknown) is int and unknown < len(tokens) else None
    model = models.BPE(
        ids, [pair[3:] for pair in pairs], unk_token=unknown, fuse_unk=True, byte_fallback="<0x0A>" in ids
    )
    tokenizer = tokenizers.Tokenizer(model)
    prefix = read.flag(f"{KEYS}add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_LEADING, "first" if prefix else "never", split=False)
    undo = [decoders.Replace(_LEADING, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return tokenizer
