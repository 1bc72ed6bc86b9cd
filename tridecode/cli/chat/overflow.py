"""A turn that does not fit in the context: said with both numbers, and handled as --overflow chose."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from ...errors import PromptError, TooLong
from ..terminal import counted
from .conversation import Conversation


class Overflow(PromptError):
    """The turn cannot fit; with --overflow stop the chat ends here."""


def fit(
    conversation: Conversation,
    line: str,
    count: Callable,
    capacity: int,
    choice: str,
    max_tokens: int | None,
    largest: int,
    begun: bool = False,
):
    """The conversation that `line` can be asked in, and a line to show ("" where nothing had to change).

    count(prompt) is its number of tokens; where it is too long it may raise TooLong with the fewest that it has.
    largest: the context that the model could have. begun: count adds an answer, which is to go on.
    choice: of --overflow; drop-oldest leaves an eighth of the context for the answer (or max_tokens, if that is less)
    and keeps the system turn. Raises Overflow where there is no way.
    """

    def measured(dropped: int) -> tuple[int, bool]:
        return _counted(count, replace(conversation, dropped=dropped).prompt(line))

    def tokens(dropped: int) -> int:
        return measured(dropped)[0]

    dropped, turns = conversation.dropped, len(conversation.turns)
    room = min(max_tokens or capacity, capacity // 8) if choice == "drop-oldest" else 0
    # The newest turns first: what is far longer than the context would not even go through the template.
    size = 16 * capacity
    while True:
        first = max(_newest(conversation.turns, size), dropped)
        needed, or_more = measured(first)
        if needed > capacity - room or first == dropped:
            break
        size *= 4
    if needed <= capacity - room:
        return conversation, ""
    words = f"more than {counted(needed, 'token')}" if first > dropped else _said(needed, or_more)
    if choice != "drop-oldest":
        if tokens(turns) > capacity:
            raise Overflow(_alone(conversation, line, count, capacity, largest, choice, begun))
        fix = "/undo, /clear or /set overflow drop-oldest make room" if choice == "error" else "the chat ends"
        raise Overflow(f"this turn needs {words}, the context holds {capacity:,}; {fix}")
    chosen = bisect_left(range(first, turns), True, key=lambda n: tokens(n) <= capacity - room) + first
    if tokens(chosen) > capacity:
        raise Overflow(_alone(conversation, line, count, capacity, largest, choice, begun))
    if chosen == dropped:
        return conversation, ""
    first, last = dropped + 1, chosen
    which = f"turn {first:,} is" if first == last else f"turns {first:,} to {last:,} are"
    space = f" with room for the answer ({room:,})" if needed <= capacity else ""
    note = f"{words} do not fit in the context of {capacity:,}{space}: {which} no longer sent to the model"
    return replace(conversation, dropped=chosen), note


def _newest(turns: tuple, size: int) -> int:
    """The first of the last turns that have at most `size` characters."""
    for number in range(len(turns) - 1, -1, -1):
        size -= 16 + sum(map(len, turns[number]))  # 16 for what a template adds
        if size < 0:
            return number + 1
    return 0


def _alone(
    conversation: Conversation, line: str, count: Callable, capacity: int, largest: int, choice: str, begun: bool
) -> str:
    """What is wrong with a message that does not fit even where nothing was said before it."""
    system = conversation.system is not None
    parts = ["this message", *["its answer"] * begun, *["the system turn"] * system]
    what = " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)
    what += " alone need" if parts[1:] else " alone needs"
    needed, or_more = _counted(count, Conversation(conversation.raw, conversation.system).prompt(line))
    fixes = ["ask for the rest in a message of its own" if begun else "shorten it"]
    if system and _counted(count, Conversation(conversation.raw).prompt(line))[0] <= capacity:
        fixes.append("take the system turn away (/system -)")
    if needed <= largest:
        fixes.append(f"start the chat with --max-seq-len {largest if or_more else min(largest, 2 * needed)}")
    fix = "the chat ends" if choice == "stop" else " or ".join(fixes)
    return f"{what} {_said(needed, or_more)}, the context holds {capacity:,}; {fix}"


def _counted(count: Callable, prompt) -> tuple[int, bool]:
    """The tokens of a prompt, and whether these are only the fewest that it can have."""
    try:
        return count(prompt), False
    except TooLong as error:
        return error.tokens, error.or_more


def _said(tokens: int, or_more: bool) -> str:
    return f"{counted(tokens, 'token')}{' or more' if or_more else ''}"
