"""Exchanges with one right answer, and the rule that keeps some of them out of the training data.

The chat generator uses a sum, a (name, color) pair or a (name, place) pair only if `held_out` is False for it.
`held_out_exchanges` uses only the pairs for which it is True, so its exchanges cannot occur in generated training text.
"""

import random
import re
import zlib
from dataclasses import dataclass

from content import items, mapping, sections

TABLES = sections("tables.txt")
CAPITALS = mapping(TABLES["capitals"])
COLORS = items([mapping(TABLES["categories"])["colors"]])
NAMES = items(TABLES["names"], " ")
PLACES = [
    "kitchen",
    "garden",
    "bedroom",
    "park",
    "school",
    "library",
    "store",
    "office",
    "bathroom",
    "hall",
    "barn",
    "beach",
]
KINDS = ("sums", "capitals", "opposites", "recall", "where")

PHRASES = sections("phrases.txt")
MOVES = ["is in", "went to", "ran to", "walked to", "is now in"]


def _opposites() -> dict[str, str]:
    """Return both directions of each pair. The first pair that contains a word decides."""
    opposite_of: dict[str, str] = {}
    for first, second in (line.split(" = ") for line in TABLES["opposites"]):
        opposite_of.setdefault(first, second)
        opposite_of.setdefault(second, first)
    return opposite_of


OPPOSITES = _opposites()


def held_out(*parts: object) -> bool:
    """Return whether a combination is reserved for evaluation. A stable hash selects one in ten."""
    return zlib.crc32(" ".join(map(str, parts)).encode()) % 10 == 0


def sum_held_out(a: int, b: int, question: str = "") -> bool:
    """Return whether a sum is reserved for evaluation, in both orders of its numbers.

    A one-digit sum is reserved only in some wordings, because a chat model needs to see it.
    """
    if not held_out("sum", min(a, b), max(a, b)):
        return False
    return max(a, b) > 9 or bool(question) and held_out("sum", a, b, question)


@dataclass(frozen=True)
class Exchange:
    """Messages that end with a user turn, the one right answer, and the wrong answers of its kind."""

    kind: str
    messages: tuple[dict[str, str], ...]
    answer: str
    wrong: tuple[str, ...] = ()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _sum(rng: random.Random) -> Exchange | None:
    high = rng.choice([9, 99])
    a, b = rng.randint(0, high), rng.randint(0, high)
    question = rng.choice(PHRASES["sum questions"])
    if not sum_held_out(a, b, question):
        return None
    return Exchange("sums", (_message("user", question.format(a=a, b=b)),), str(a + b))


def _capital(rng: random.Random) -> Exchange:
    country, answer = rng.choice(list(CAPITALS.items()))
    question = rng.choice(PHRASES["capital questions"]).format(country=country)
    wrong = tuple(city for city in CAPITALS.values() if city != answer)
    return Exchange("capitals", (_message("user", question),), answer, wrong)


def _opposite(rng: random.Random) -> Exchange:
    word, answer = rng.choice(list(OPPOSITES.items()))
    question = rng.choice(PHRASES["opposite questions"]).format(word=word)
    wrong = tuple(other for other in OPPOSITES if other not in (word, answer))
    return Exchange("opposites", (_message("user", question),), answer, wrong)


def _recall(rng: random.Random) -> Exchange | None:
    name, color = rng.choice(NAMES), rng.choice(COLORS)
    if not held_out("recall", name, color):
        return None
    if rng.random() < 0.4:
        exchanges = [
            (
                rng.choice(PHRASES["name and color statements"]).format(name=name, color=color),
                f"Nice to meet you, {name}!",
            )
        ]
    else:
        exchanges = [
            (rng.choice(PHRASES["name statements"]).format(name=name), f"Nice to meet you, {name}!"),
            (rng.choice(PHRASES["color statements"]).format(color=color), f"{color.capitalize()} is a pretty color!"),
        ]
    fillers = [
        ("How are you?", "I am doing well, thank you! How are you?"),
        ("Tell me a fun fact.", "Bees make honey."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("Thanks!", "You're welcome!"),
    ]
    exchanges += rng.sample(fillers, rng.randint(0, 2))
    if rng.random() < 0.5:
        question, answer, wrong = rng.choice(PHRASES["name questions"]), name, tuple(n for n in NAMES if n != name)
    else:
        question, answer, wrong = rng.choice(PHRASES["color questions"]), color, tuple(c for c in COLORS if c != color)
    messages = [_message(*turn) for user, reply in exchanges for turn in (("user", user), ("assistant", reply))]
    return Exchange("recall", (*messages, _message("user", question)), answer, wrong)


def _location(rng: random.Random) -> Exchange | None:
    (person, other), (place, other_place) = rng.sample(NAMES, 2), rng.sample(PLACES, 2)
    if not held_out("where", person, place):
        return None
    sentences = [f"{person} {rng.choice(MOVES)} the {place}.", f"{other} {rng.choice(MOVES)} the {other_place}."]
    rng.shuffle(sentences)
    question = f"{' '.join(sentences)} Where is {person}?"
    return Exchange("where", (_message("user", question),), place, tuple(p for p in PLACES if p != place))


def held_out_exchanges(kind: str, count: int, seed: int) -> list[Exchange]:
    """Return `count` different exchanges of a kind of `KINDS`. Sums, recall and where cannot occur in training."""
    make = {"sums": _sum, "capitals": _capital, "opposites": _opposite, "recall": _recall, "where": _location}[kind]
    rng = random.Random(f"{kind} {seed}")
    exchanges: dict[str, Exchange] = {}
    while len(exchanges) < count:
        exchange = make(rng)
        if exchange is not None:
            exchanges.setdefault(str(exchange.messages), exchange)
    return list(exchanges.values())


def _mentions(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def is_right(exchange: Exchange, reply: str) -> bool:
    """Return whether a reply has the answer and no other candidate of its kind.

    For a sum, other candidates are all numbers that are not in the question.
    """
    if exchange.kind == "sums":
        in_question = set(re.findall(r"\d+", exchange.messages[-1]["content"]))
        numbers = re.findall(r"\d+", reply)
        return exchange.answer in numbers and set(numbers) <= in_question | {exchange.answer}
    return _mentions(reply, exchange.answer) and not any(_mentions(reply, wrong) for wrong in exchange.wrong)
