"""Short stories from plots, whose lines have slots for a hero, a friend, a place, a thing and a mood."""

import random
import re
from dataclasses import dataclass, field

from content import items, mapping, plots, sections
from turns import article, plural

TOPICS = sections("topics.txt")
ANIMALS, PEOPLE, CREATURES = (items(TOPICS[kind]) for kind in ("animals", "people", "creatures"))
THINGS, PLACES, ADJECTIVES = (items(TOPICS[kind]) for kind in ("items", "places", "adjectives"))
THEMES = mapping(TOPICS["themes"])
STORY_NAMES = items(TOPICS["story names"])
PLOTS = plots("stories.txt")
PRONOUNS = {"m": ("he", "his", "him", "himself"), "f": ("she", "her", "her", "herself")}
NAMED_BY_USERS = items(sections("tables.txt")["names"], " ")
FEMALE, MALE, FEMALE_NAMES = (set(items(TOPICS[kind])) for kind in ("female", "male", "female names"))


@dataclass(frozen=True)
class Topic:
    """The requested subject of a story: its text, the plots that fit it, and the values of their slots."""

    text: str
    kind: str
    plots: tuple[str, ...] = ()
    slots: dict[str, str] = field(default_factory=dict)
    tiny: bool = False

    @property
    def can_be_tiny(self) -> bool:
        """Whether a plot for very short stories fits the topic."""
        return not self.plots and self.kind == "hero"


@dataclass(frozen=True)
class Story:
    """The text of a story, and the characters that questions may refer to."""

    text: str
    hero: str
    hero_name: str
    friend: str
    friend_name: str


def _any_hero(rng: random.Random) -> str:
    return rng.choice(rng.choice([ANIMALS, ANIMALS, PEOPLE, CREATURES]))


def _hero_home(rng: random.Random, hero: str) -> str:
    base = hero.split()[-1]
    if hero in PEOPLE or base in PEOPLE:
        return rng.choice(items(TOPICS["homes person"]))
    return rng.choice(items(TOPICS["homes animal" if base in ANIMALS else "homes creature"]))


def _named(rng: random.Random, kind: str, other_than: str = "") -> tuple[str, str]:
    """Return a name and a gender that fit the kind of character."""
    gender = "f" if kind in FEMALE else "m" if kind in MALE else rng.choice("mf")
    names = STORY_NAMES if rng.random() < 0.7 else NAMED_BY_USERS
    names = [name for name in names if (name in FEMALE_NAMES) == (gender == "f") and name != other_than]
    return rng.choice(names), gender


def _cast(rng: random.Random) -> dict[str, str]:
    """Return a value for every slot of the plots."""
    hero = _any_hero(rng)
    other = rng.choice([kind for kind in rng.choice([ANIMALS, ANIMALS, PEOPLE]) if kind != hero])
    name, gender = _named(rng, hero)
    friend, friend_gender = _named(rng, other, name)
    if rng.random() < 0.3:
        hero = f"{rng.choice(ADJECTIVES)} {hero}"
    if rng.random() < 0.2:
        other = f"{rng.choice(ADJECTIVES)} {other}"
    he, his, him, himself = PRONOUNS[gender]
    fhe, fhis, fhim, _ = PRONOUNS[friend_gender]
    item, food = rng.choice(THINGS), rng.choice(items(TOPICS["food"]))
    return {
        "hero": hero, "a_hero": article(hero), "heroes": plural(hero), "Name": name, "home": _hero_home(rng, hero),
        "he": he, "He": he.capitalize(), "his": his, "His": his.capitalize(), "him": him, "himself": himself,
        "other": other, "an_other": article(other), "a_wise": "a wise", "Friend": friend,
        "fhe": fhe, "fhis": fhis, "fhim": fhim, "item": item, "an_item": article(item), "place": rng.choice(PLACES),
        "food": food, "a_basket": f"a basket of {food}", "weather": rng.choice(items(TOPICS["weather"])),
        "fear": rng.choice(items(TOPICS["fears"])), "wish": rng.choice(items(TOPICS["wishes"])),
    }  # fmt: skip


def random_topic(rng: random.Random) -> Topic:
    """Sample a topic."""
    kind = rng.choices(["hero", "item", "place", "theme"], [60, 17, 13, 10])[0]
    slots = _cast(rng)
    if kind == "theme":
        theme = rng.choice(list(THEMES))
        return Topic(theme, "hero", tuple(items([THEMES[theme]])), slots)
    text, names = rng.choice([line.split(" = ") for line in TOPICS[f"story about {article(kind)}"]])
    return Topic(text.format_map(slots), kind, () if names == "any" else tuple(items([names])), slots)


def _choose(rng: random.Random, text: str) -> str:
    return re.sub(r"\[([^\[\]]*)\]", lambda match: rng.choice(match[1].split("|")), text)


def _plot(rng: random.Random, topic: Topic) -> list[str]:
    if topic.tiny:
        return rng.choice([lines for kind, _, lines in PLOTS if kind == "tiny"])
    return rng.choice([lines for kind, name, lines in PLOTS
                       if kind == topic.kind and (name in topic.plots or not topic.plots)])  # fmt: skip


def tell(rng: random.Random, topic: Topic) -> Story:
    """Write a story about the topic."""
    paragraphs: list[list[str]] = [[]]
    for line in _plot(rng, topic):
        if line == "//":
            paragraphs.append([])
        elif not line.startswith("~") or rng.random() < 0.5:
            sentence = _choose(rng, _choose(rng, line.removeprefix("~")).format_map(topic.slots))
            sentence = re.sub(r'([?!])[.,]"', r'\1"', sentence)
            paragraphs[-1].append(sentence[0].upper() + sentence[1:])
    text = "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)
    if not text.endswith("The end.") and rng.random() < 0.3:
        text += " The end."
    slots = topic.slots
    return Story(text, slots["hero"], slots["Name"], slots["other"], slots["Friend"])
