"""One exchange of a chat, and grammar functions for replies."""

from dataclasses import dataclass

from content import mapping, sections

IRREGULAR_PLURALS = mapping(sections("tables.txt")["irregular plurals"])


@dataclass(frozen=True)
class Turn:
    """A user message and its reply. `short` is the reply as a word or phrase; `exact` disables typing noise."""

    user: str
    reply: str
    short: str = ""
    exact: bool = False


def capitalize(text: str) -> str:
    """Capitalize the first letter only."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Add a capital letter and a final period."""
    return capitalize(text) if text[-1] in ".!?" else f"{capitalize(text)}."


def listing(words: list[str]) -> str:
    """Join words with commas and "and"."""
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def article(noun: str) -> str:
    """Add "a" or "an" to a noun."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
