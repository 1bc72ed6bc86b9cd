"""The special tokens and the added tokens that other files than tokenizer.json declare, as transformers reads them."""

import logging
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..arguments import shown
from ..errors import CheckpointError, as_json
from ..models.files import present
from ..models.reader import read_json

log = logging.getLogger("tridecode")
CONFIG, MAP, LEGACY = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
# The standard special tokens, in the order in which transformers adds them.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ID = re.compile(r"\d{1,9}", re.ASCII)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_settings(path: Path) -> dict:
    """Return the settings in tokenizer_config.json and special_tokens_map.json of directory `path`; {} without files.

    Raises CheckpointError.
    """
    return _read(path / MAP) | _read(path / CONFIG)


def special_tokens(settings: dict) -> dict[str, str]:
    """Return the special tokens by name (bos_token, eos_token, ...).

    In the settings each is a string, or an object with the key "content".
    """
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def add_declared(tokenizer: tokenizers.Tokenizer, path: Path, settings: dict) -> None:
    """Add the tokens that tokenizer.json lacks and another file of the checkpoint declares.

    These are the tokens in added_tokens_decoder of tokenizer_config.json or, without this key, in added_tokens.json,
    and the special tokens. A token that tokenizer.json has with other flags gets the flags of added_tokens_decoder.

    Raises:
        CheckpointError: a declaration is malformed.
    """
    special, own = _special(settings, path / CONFIG), tokenizer.get_added_tokens_decoder()
    if "added_tokens_decoder" in settings:
        file = path / CONFIG
        declared = _declared(settings["added_tokens_decoder"], file)
    else:
        file = path / LEGACY
        declared = {i: token for i, token in _legacy(file, special).items() if i not in own}
    same, named = {repr(token) for token in own.values()}, {*special_tokens(settings).values()}
    missing = [token for _, token in sorted(declared.items()) if repr(token) not in same]
    for token in missing:
        token.special |= token.content in named
    known = {token.content for token in (*own.values(), *declared.values())}
    missing += [token for text, token in special.items() if text not in known]
    if not missing:
        return
    tokenizer.add_tokens(missing)
    for i, token in declared.items():
        if token.content and (place := tokenizer.token_to_id(token.content)) != i:
            log.warning(
                "%s: the added token %s has id %d, but tokenizer.json gives it id %d, which is used; "
                "check that both files belong to the same checkpoint", file, shown(token.content), i, place,
            )  # fmt: skip


def _read(path: Path) -> dict:
    return read_json(path) if present(path) else {}


def _special(settings: dict, file: Path) -> dict[str, AddedToken]:
    """Return the special tokens by text, with their flags. Raises CheckpointError."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    names = [name for name in settings if name.endswith("_token")]
    values = [settings[name] for name in (*filter(settings.__contains__, _NAMES), *names)]
    values += extra if isinstance(extra, list) else extra.values() if isinstance(extra, dict) else []
    values = [{"content": value} if isinstance(value, str) else value for value in values]
    objects = [value | {"special": True} for value in values if isinstance(value, dict) and "content" in value]
    tokens = [_token(value, file) for value in objects]
    return {token.content: token for token in tokens}


def _token(value: dict, file: Path) -> AddedToken:
    """Return the token that an object describes. Raises CheckpointError."""
    try:
        return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value})
    except (KeyError, TypeError):
        got = as_json(value)
        raise CheckpointError(
            f"{file}: an added token must be an object with a string content and flags, got {got}; "
            "download the file again"
        ) from None


def _declared(values: Any, file: Path) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens_decoder by id. Raises CheckpointError."""
    valid = isinstance(values, dict) and all(map(_ID.fullmatch, values))
    if not valid or not all(isinstance(value, dict) for value in values.values()):
        raise CheckpointError(
            f"{file}: added_tokens_decoder must map ids to objects, got {as_json(values)}; download the file again"
        )
    return {int(i): _token(value, file) for i, value in values.items()}


def _legacy(file: Path, special: dict[str, AddedToken]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json by id. Raises CheckpointError."""
    values = _read(file)
    if not all(type(i) is int for i in values.values()):
        raise CheckpointError(f"{file}: must map tokens to ids, got {as_json(values)}; download the file again")
    return {i: AddedToken(text, special=text in special, normalized=text not in special) for text, i in values.items()}
