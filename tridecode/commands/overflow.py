"""A turn that does not fit in the context: said with both numbers, and handled as --overflow chose."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from ..errors import PromptError
from .conversation import Conversation

CHOICES = ("error", "drop-oldest", "stop")


class Overflow(PromptError):
    """The turn cannot fit; with --overflow stop the chat ends here."""


def fit(conversation: Conversation, line: str, count: Callable, capacity: int, choice: str, max_tokens: int | None):
    """The conversation that `line` can be asked in, and a line to show ("" where nothing had to change).

    count(prompt) is its number of tokens.
    drop-oldest leaves an eighth of the context for the answer (or max_tokens, if that is less) and keeps the system
    turn. Raises Overflow where there is no way.
    """

    def tokens(dropped: int) -> int:
        return count(replace(conversation, dropped=dropped).prompt(line))

    dropped, turns = conversation.dropped, len(conversation.turns)
    room = min(max_tokens or capacity, capacity // 8) if choice == "drop-oldest" else 0
    needed = tokens(dropped)
    if needed <= capacity - room:
        return conversation, ""
    if choice != "drop-oldest":
        fix = "/undo or /clear make room, and so does --overflow drop-oldest" if choice == "error" else "the chat ends"
        raise Overflow(f"this turn needs {needed:,} tokens, the context holds {capacity:,}; {fix}")
    chosen = bisect_left(range(dropped, turns), True, key=lambda n: tokens(n) <= capacity - room) + dropped
    left = tokens(chosen)
    if left > capacity:
        raise Overflow(f"this turn alone needs {left:,} tokens, the context holds {capacity:,}; shorten it")
    if chosen == dropped:
        return conversation, ""
    first, last = dropped + 1, chosen
    which = f"turn {first:,} is" if first == last else f"turns {first:,} to {last:,} are"
    space = f" with room for the answer ({room:,})" if needed <= capacity else ""
    note = f"{needed:,} tokens do not fit in the context of {capacity:,}{space}: {which} no longer sent to the model"
    return replace(conversation, dropped=chosen), note
