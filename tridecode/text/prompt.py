"""Validation and encoding of prompts: text, token ids or chat messages."""

import operator
import struct
from array import array
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ..arguments import shown
from ..errors import PromptError, TooLong, brief
from ..layout import packed
from .tokenizer import Tokenizer


class Encoded(NamedTuple):
    """A validated prompt.

    Attributes:
        tokens: token ids, int32.
        chat: whether the answer begins a new text, as in a chat, instead of continuing the prompt.
        tag: as in ChatPrompt; "" if the prompt is not a chat.
    """

    tokens: array
    chat: bool
    tag: str = ""

    @property
    def ids(self) -> list[int]:
        """The token ids as a list."""
        return self.tokens.tolist()


Prompt = str | Sequence[int] | Sequence[dict] | Encoded


class Reading(NamedTuple):
    """How a prompt is read.

    Attributes:
        allow_special: whether control tokens in a text are encoded as control tokens.
        add_special_tokens: whether the tokens are added that the tokenizer adds to a whole text, usually bos; None adds
            them to texts, but not to chats.
        continued: whether the answer continues the last message of a chat.
    """

    allow_special: bool = False
    add_special_tokens: bool | None = None
    continued: bool = False


AS_TEXT = Reading()  # Control tokens in a text are ordinary characters.


def prompt_ids(
    prompt: Prompt,
    variables: dict,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    capacity: int,
    limit: int,
    reading: Reading = AS_TEXT,
) -> Encoded:
    """Validate and encode a prompt.

    Args:
        variables: variables of the chat template.
        vocab_size: number of token ids of the model.
        capacity: context length of the engine, in tokens.
        limit: context length that the model supports, in tokens.

    Raises:
        PromptError: the value is not a prompt, or does not fit in the context.
    """
    fix = ": shorten it" + (" or raise max_seq_len" if capacity < limit else "")
    if isinstance(prompt, Encoded):
        # Another engine may have encoded the prompt, so check it again.
        return _fitting(prompt.tokens, prompt.chat, prompt.tag, vocab_size, capacity, fix)
    items = [] if isinstance(prompt, str) else listed(prompt)
    if items is None:
        kind = type(prompt).__name__
        raise PromptError(f"the prompt must be text, token ids or a list of chat messages, got {kind}")
    chat = bool(items) and isinstance(items[0], Mapping)
    if tokenizer is None and (chat or isinstance(prompt, str)):
        raise PromptError("this engine has no tokenizer; pass token ids")
    _check_variables(variables, tokenizer if chat else None)
    if not chat and len(items) > capacity:  # Refuse a long list before each item is checked.
        raise TooLong(len(items), capacity, fix=fix)
    tag = ""
    try:
        if isinstance(prompt, str) and tokenizer:
            ids = tokenizer.encode(prompt, reading.allow_special, capacity, reading.add_special_tokens is not False)
        elif chat and tokenizer:
            added = reading.add_special_tokens is True
            ids, tag = tokenizer.prepare_chat(items, capacity, reading.continued, added, **variables)
        elif [*map(type, items)].count(int) == len(items):  # This is the common case, and it is fast for long prompts.
            ids = items
        else:
            ids = [_token_id(token, vocab_size) for token in items]
    except TooLong as error:
        raise TooLong(error.tokens, capacity, is_lower_bound=True, fix=fix) from None
    if not ids:
        raise PromptError("the prompt is empty; at least one token is needed")
    return _fitting(ids, chat and not reading.continued, tag, vocab_size, capacity, fix)


def listed(prompt) -> list | None:
    """Return token ids or messages as a list. For text, and for values that are not prompts, return None."""
    if isinstance(prompt, (str, bytes, bytearray, memoryview, Set, Mapping)):
        return None
    try:
        # A method `tolist`, as of arrays and tensors, converts all items to Python numbers and bools in one call.
        return list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    except TypeError:  # The value is not iterable, such as a tensor without dimensions.
        return None


def _check_variables(variables: dict, tokenizer: Tokenizer | None) -> None:
    known = tokenizer.template_variables | {"add_generation_prompt"} if variables and tokenizer else frozenset()
    if unknown := sorted(variables.keys() - known):
        has = f"it reads {brief(', '.join(sorted(known)))}" if known else "it reads none, or this prompt is not a chat"
        raise PromptError(f"template_variables: the chat template has no variable {shown(unknown[0])}; {has}")


def _fitting(ids: Sequence[int], chat: bool, tag: str, vocab_size: int, capacity: int, fix: str) -> Encoded:
    """Return the checked prompt. Raises PromptError if an id is not in the vocabulary or the prompt is too long."""
    tokens = _packed(ids, vocab_size)  # A tokenizer may have more tokens than the model.
    if len(ids) > capacity:
        raise TooLong(len(ids), capacity, fix=fix)
    return Encoded(tokens, chat, tag)


def _packed(ids: Sequence[int], vocab_size: int) -> array:
    with suppress(struct.error):  # An id has more than 32 bits.
        tokens = packed(ids)
        # The comparison is unsigned, so negative ids are large.
        if np.frombuffer(tokens, np.uint32).max() < vocab_size:
            return tokens
    raise _outside(min(ids) if min(ids) < 0 else max(ids), vocab_size)


def _token_id(token, vocab_size: int) -> int:
    if not isinstance(token, bool):
        with suppress(TypeError):
            return operator.index(token)  # operator.index accepts integers of numpy and torch.
    raise _outside(token, vocab_size)


def _outside(token, vocab_size: int) -> PromptError:
    return PromptError(f"token id {shown(token)} is not in the vocabulary (0 to {vocab_size - 1})")
