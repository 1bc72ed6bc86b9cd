"""One exchange of a chat, and the small grammar that replies are made with."""

from dataclasses import dataclass

from content import mapping, sections

IRREGULAR_PLURALS = mapping(sections("tables.txt")["irregular plurals"])


@dataclass(frozen=True)
class Turn:
    """A user turn and its reply; `short` is the reply as a word or phrase, `exact` keeps typing noise away."""

    user: str
    reply: str
    short: str = ""
    exact: bool = False


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """With a capital letter and a final stop."""
    return capitalize(text) if text[-1] in ".!?" else f"{capitalize(text)}."


def listing(words: list[str]) -> str:
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
