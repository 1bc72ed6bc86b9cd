"""Base class of all skills: random choices, phrases and names."""

import random

import stories
from content import items, mapping, sections, split
from exchanges import NAMES, PHRASES
from turns import Turn, capitalize, sentence

TABLES = sections("tables.txt")
CATEGORIES = {name: items([values]) for name, values in mapping(TABLES["categories"]).items()}
NUMBER_WORDS = items(TABLES["number words"], " ")
MODEL_NAME = "Tri"
MORE_NAMES = items(TABLES["more names"], " ")
SLOTS = {name.removeprefix("slot "): items(lines) for name, lines in TABLES.items() if name.startswith("slot ")}
WORDS_AS_NAMES = [word for word in items(TABLES["spelling"], " ") + stories.THINGS if " " not in word]
SLOTS |= {"day": CATEGORIES["days of the week"], "season": CATEGORIES["seasons"], "color": CATEGORIES["colors"]}


class Skills:
    """Random choices that depend only on the seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def choice(self, options):
        """Return one of the options."""
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def _templated(self, template: str, **slots: object) -> list[Turn]:
        """Make a turn from a template `question | question => reply => short reply`."""
        questions, reply, *short = template.split(" => ")
        return [
            Turn(
                self.choice(split(questions)).format(**slots),
                sentence(reply.format(**slots)),
                capitalize(short[0].format(**slots)) if short else "",
            )
        ]

    def _phrase(self, section: str) -> str:
        return self.choice(PHRASES[section])

    def invented_name(self) -> str:
        """Invent a name, so that the model learns to copy names instead of guessing them."""
        onsets = items(
            ["b, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, z, br, ch, cl, dr, fl, gr, kr, pl, qu, sh, st, th, tr"]
        )
        codas = ["", "", "", "n", "l", "r", "s", "x", "ck", "tz", "nd", "rt", "m", "th", "ff"]
        syllables = [self.choice(onsets) + self.choice(["a", "e", "i", "o", "u", "ai", "ee", "oo"]) for _ in range(3)]
        return ("".join(syllables[: self.choice([1, 2, 2, 3])]) + self.choice(codas)).capitalize()

    def any_name(self) -> str:
        """Return a common, rare or invented name."""
        kind = self.rng.random()
        return self.choice(NAMES) if kind < 0.5 else self.choice(MORE_NAMES) if kind < 0.8 else self.invented_name()

    def any_pet_name(self) -> str:
        """Return a name for a pet."""
        kind = self.rng.random()
        if kind < 0.4:
            return self.choice(SLOTS["pet_name"])
        return capitalize(self.choice(WORDS_AS_NAMES)) if kind < 0.7 else self.any_name()

    def _people(self, count: int) -> list[str]:
        people: dict[str, None] = {}
        while len(people) < count:
            people[self.any_name()] = None
        return list(people)

    def _slot_values(self) -> dict[str, str]:
        values = {slot: self.choice(choices) for slot, choices in SLOTS.items()}
        for slot in ("animal", "food", "season"):
            values[f"{slot}2"] = self.choice([other for other in SLOTS[slot] if other != values[slot]])
        values |= {"pet_name": self.any_pet_name(), "friend_name": self.any_name()}
        values |= {"age": str(self.rng.randint(5, 90)), "count": self.choice(NUMBER_WORDS[2:8])}
        return values | {capitalize(slot): capitalize(value) for slot, value in values.items()}
