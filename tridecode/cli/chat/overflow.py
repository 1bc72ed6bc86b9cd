"""Handling of a turn that does not fit in the context, according to --overflow."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from ...errors import PromptError, TooLong
from ..terminal import counted
from .conversation import Conversation


class Overflow(PromptError):
    """The turn does not fit in the context. With --overflow stop, the chat ends."""


def fit(
    conversation: Conversation,
    line: str,
    count: Callable,
    capacity: int,
    choice: str,
    max_tokens: int | None,
    largest: int,
    continues: bool = False,
) -> tuple[Conversation, str]:
    """Return the conversation in which `line` fits, and a line to show ("" if the conversation is unchanged).

    Args:
        count: Returns the number of tokens of a prompt, or raises TooLong with a lower bound.
        capacity: Tokens of the context.
        choice: The value of --overflow. drop-oldest drops the oldest turns but keeps the system turn. It reserves an
            eighth of the context for the answer, or max_tokens if that is less.
        largest: Tokens of the largest context that the model supports.
        continues: Whether `count` includes the beginning of an answer that is continued.

    Raises:
        Overflow: The turn does not fit.
    """

    def tokens(dropped: int) -> tuple[int, bool]:
        return _counted(count, replace(conversation, dropped=dropped).prompt(line))

    dropped, turns = conversation.dropped, len(conversation.turns)
    room = min(max_tokens or capacity, capacity // 8) if choice == "drop-oldest" else 0
    needed, is_lower_bound = tokens(dropped)
    if needed <= capacity - room:
        return conversation, ""
    if tokens(turns)[0] > capacity:
        raise Overflow(_message_too_long(conversation, line, count, capacity, largest, choice, continues))
    words = _token_count(needed, is_lower_bound)
    if choice != "drop-oldest":
        fix = "/undo, /clear or /set overflow drop-oldest make room" if choice == "error" else "the chat ends"
        raise Overflow(f"this turn needs {words}, the context holds {capacity:,}; {fix}")
    chosen = bisect_left(range(dropped, turns), True, key=lambda n: tokens(n)[0] <= capacity - room) + dropped
    if chosen == dropped:
        return conversation, ""
    first, last = dropped + 1, chosen
    which = f"turn {first:,} is" if first == last else f"turns {first:,} to {last:,} are"
    space = f" with room for the answer ({room:,})" if needed <= capacity else ""
    note = f"{words} do not fit in the context of {capacity:,}{space}: {which} no longer sent to the model"
    return replace(conversation, dropped=chosen), note


def _message_too_long(
    conversation: Conversation, line: str, count: Callable, capacity: int, largest: int, choice: str, continues: bool
) -> str:
    """Return the error text for a message that does not fit even without earlier turns."""
    system = conversation.system is not None
    parts = ["this message", *["its answer"] * continues, *["the system turn"] * system]
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    what += " alone need" if parts[1:] else " alone needs"
    needed, is_lower_bound = _counted(count, Conversation(conversation.raw, conversation.system).prompt(line))
    fixes = ["ask for the rest in a separate message" if continues else "shorten it"]
    if system and _counted(count, Conversation(conversation.raw).prompt(line))[0] <= capacity:
        fixes.append("remove the system turn (/system -)")
    if needed <= largest:
        fixes.append(f"start the chat with --max-seq-len {largest if is_lower_bound else min(largest, 2 * needed)}")
    fix = "the chat ends" if choice == "stop" else " or ".join(fixes)
    return f"{what} {_token_count(needed, is_lower_bound)}, the context holds {capacity:,}; {fix}"


def _counted(count: Callable, prompt) -> tuple[int, bool]:
    """Return the number of tokens of a prompt, and whether it is only a lower bound."""
    try:
        return count(prompt), False
    except TooLong as error:
        return error.tokens, error.is_lower_bound


def _token_count(tokens: int, is_lower_bound: bool) -> str:
    return f"{counted(tokens, 'token')}{' or more' if is_lower_bound else ''}"
