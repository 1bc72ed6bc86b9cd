"""System messages that request a style, and the functions that convert replies to that style."""

import random
import re
from collections.abc import Callable
from dataclasses import replace

from content import mapping, sections

PHRASES = sections("phrases.txt")
PIRATE_WORDS = mapping(sections("tables.txt")["pirate words"])
SHORT_ENOUGH_FOR_A_STYLE = 300


def first_sentence(text: str) -> str:
    """Return the first sentence of a text."""
    match = re.match(r'.+?[.!?]"?(?=\s|$)', text.replace("\n", " "))
    return match[0] if match else text


def first_two_sentences(text: str) -> str:
    """Return the first two sentences of a text."""
    first = first_sentence(text)
    rest = text.replace("\n", " ")[len(first) :].strip()
    return f"{first} {first_sentence(rest)}" if rest else first


def pirate(text: str) -> str:
    """Return the text in the style of a pirate."""

    def word(match: re.Match) -> str:
        new = PIRATE_WORDS.get(match[0].lower(), match[0])
        return new.capitalize() if match[0][0].isupper() else new

    return f"Arr! {re.sub(r'[A-Za-z]+', word, first_two_sentences(text))}"


def framed(before: str, after: str = "") -> Callable[[str], str]:
    """Return a style that adds words before and after two sentences."""
    return lambda text: f"{before} {first_two_sentences(text)} {after}".strip()


STYLES: dict[str, Callable[[str], str]] = {
    "one sentence": first_sentence,
    "pirate": pirate,
    "capital letters": str.upper,
    "lower case": str.lower,
    "cat": framed("Meow!", "Purr."),
    "dog": framed("Woof!", "Woof woof!"),
    "robot": framed("Beep boop.", "Beep."),
    "wizard": framed("By my magic hat!"),
    "king": framed("Hear me!", "So I have spoken."),
    "cowboy": framed("Howdy, partner!"),
    "polite": lambda text: f"With pleasure. {text}",
    "teacher": lambda text: f"Good question! {text}",
    "ask back": lambda text: text if text.endswith("?") else f"{text} What else would you like to know?",
    "excited": lambda text: f"Wow! {text.replace('.', '!')}",
}


def apply(rng: random.Random, turns: list) -> tuple[str, list]:
    """Return a system message, and the turns with replies in the style that it requests."""
    short = [turn for turn in turns if turn.short]
    if short and rng.random() < 0.4:
        return rng.choice(PHRASES["system one word"]), [replace(turn, reply=f"{turn.short}.") for turn in short]
    if rng.random() < 0.3:
        return rng.choice(PHRASES["system plain"]), turns
    name = rng.choice(list(STYLES))
    turns = [turn for turn in turns if len(turn.reply) < SHORT_ENOUGH_FOR_A_STYLE] or turns[:1]
    prompt = rng.choice(PHRASES[f"system {name}"])
    if rng.random() < 0.15:
        prompt = f"{rng.choice(PHRASES['system plain'])} {prompt}"
    return prompt, [replace(turn, reply=STYLES[name](turn.reply)) for turn in turns]
