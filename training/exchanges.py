"""Exchanges with one right answer, and the rule that keeps some of them out of the training data.

The chat generator asks `held_out` before it uses a sum, a (name, color) or a (name, place) pair; `held_out_exchanges`
makes its exchanges from exactly those pairs, so none of them can occur in generated training text.
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
    """Both directions of each pair; the first mention of a word decides."""
    found: dict[str, str] = {}
    for first, second in (line.split(" = ") for line in TABLES["opposites"]):
        found.setdefault(first, second)
        found.setdefault(second, first)
    return found


OPPOSITES = _opposites()


def held_out(*parts: object) -> bool:
    """Whether this combination is kept for evaluation: one in ten, by a hash that never changes."""
    return zlib.crc32(" ".join(map(str, parts)).encode()) % 10 == 0


def sum_held_out(a: int, b: int, question: str = "") -> bool:
    """A sum is held out by its pair, in both orders; a one-digit sum, which a chat needs, only in some wordings."""
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
        told = [
            (
                rng.choice(PHRASES["name and color statements"]).format(name=name, color=color),
                f"Nice to meet you, {name}!",
            )
        ]
    else:
        told = [
            (rng.choice(PHRASES["name statements"]).format(name=name), f"Nice to meet you, {name}!"),
            (rng.choice(PHRASES["color statements"]).format(color=color), f"{color.capitalize()} is a pretty color!"),
        ]
    fillers = [
        ("How are you?", "I am doing well, thank you! How are you?"),
        ("Tell me a fun fact.", "Bees make honey."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("Thanks!", "You're welcome!"),
    ]
    told += rng.sample(fillers, rng.randint(0, 2))
    if rng.random() < 0.5:
        question, answer, wrong = rng.choice(PHRASES["name questions"]), name, tuple(n for n in NAMES if n != name)
    else:
        question, answer, wrong = rng.choice(PHRASES["color questions"]), color, tuple(c for c in COLORS if c != color)
    messages = [_message(*turn) for user, reply in told for turn in (("user", user), ("assistant", reply))]
    return Exchange("recall", (*messages, _message("user", question)), answer, wrong)


def _where(rng: random.Random) -> Exchange | None:
    (asked, other), (place, other_place) = rng.sample(NAMES, 2), rng.sample(PLACES, 2)
    if not held_out("where", asked, place):
        return None
    sentences = [f"{asked} {rng.choice(MOVES)} the {place}.", f"{other} {rng.choice(MOVES)} the {other_place}."]
    rng.shuffle(sentences)
    question = f"{' '.join(sentences)} Where is {asked}?"
    return Exchange("where", (_message("user", question),), place, tuple(p for p in PLACES if p != place))


def held_out_exchanges(kind: str, count: int, seed: int) -> list[Exchange]:
    """`count` different exchanges of one of `KINDS`; those of sums, recall and where cannot occur in training."""
    make = {"sums": _sum, "capitals": _capital, "opposites": _opposite, "recall": _recall, "where": _where}[kind]
    rng = random.Random(f"{kind} {seed}")
    found: dict[str, Exchange] = {}
    while len(found) < count:
        exchange = make(rng)
        if exchange is not None:
            found.setdefault(str(exchange.messages), exchange)
    return list(found.values())


def _mentions(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def is_right(exchange: Exchange, reply: str) -> bool:
    """The answer appears and no other candidate of its kind does (for sums: no number but those asked about)."""
    if exchange.kind == "sums":
        asked = set(re.findall(r"\d+", exchange.messages[-1]["content"]))
        numbers = re.findall(r"\d+", reply)
        return exchange.answer in numbers and set(numbers) <= asked | {exchange.answer}
    return _mentions(reply, exchange.answer) and not any(_mentions(reply, wrong) for wrong in exchange.wrong)
