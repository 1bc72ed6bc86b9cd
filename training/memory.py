"""Skills of reading and remembering: answers that stand in what the user has said."""

import re
from dataclasses import replace

import stories
from content import items, split
from exchanges import COLORS, MOVES, PHRASES, PLACES, TABLES, held_out
from skills import MODEL_NAME, SLOTS, Skills
from turns import Turn, article, capitalize

THINGS = items(TABLES["things to find"])


class MemorySkills(Skills):
    """Methods that return turns to be answered from the chat itself."""

    def whereabouts(self) -> list[Turn]:
        """Two or three people, each somewhere, and a question about one of them."""
        count = self.choice([2, 2, 2, 3])
        more_places = [place.removeprefix("the ") for place in SLOTS["place"]] if self.chance(0.3) else []
        people, places = self._people(count), self.rng.sample(PLACES + more_places, count)
        if any(held_out("where", name, place) for name, place in zip(people, places)):
            return self.whereabouts()
        told = " ".join(f"{name} {self.choice(MOVES)} the {place}." for name, place in zip(people, places))
        asked = self.rng.randrange(count)
        reply = f"{people[asked]} is in the {places[asked]}."
        if self.chance(0.15):
            return [Turn(f"{told} Who is in the {places[asked]}?", reply, people[asked])]
        return [Turn(f"{told} Where is {people[asked]}?", reply, f"The {places[asked]}")]

    def reading(self) -> list[Turn]:
        """Two or three sentences and a question about one of them."""
        count = self.choice([2, 2, 2, 3])
        people, things = self._people(3), self.rng.sample(THINGS, 3)
        colors, foods = self.rng.sample(COLORS, 3), self.rng.sample(SLOTS["food"], 3)
        asked = self.rng.randrange(count)
        who, thing, color, food = people[asked], things[asked], colors[asked], foods[asked]
        kind = self.choice(["having", "coloring", "liking", "comparing", "moving"])
        if kind == "having":
            told = " ".join(f"{people[i]} has {article(things[i])}." for i in range(count))
            owner = Turn(f"{told} Who has the {thing}?", f"{who} has the {thing}.", who)
            owned = Turn(f"{told} What does {who} have?", f"{who} has {article(thing)}.", capitalize(article(thing)))
            return [self.choice([owner, owned])]
        if kind == "coloring":
            told = " ".join(f"The {things[i]} is {colors[i]}." for i in range(count))
            question = self.choice([f"What color is the {thing}?", f"Which one is {color}?"])
            return [Turn(f"{told} {question}", f"The {thing} is {color}.")]
        if kind == "liking":
            told = " ".join(f"{people[i]} likes {foods[i]}." for i in range(count))
            question = self.choice([f"Who likes {food}?", f"What does {who} like?"])
            return [Turn(f"{told} {question}", f"{who} likes {food}.")]
        a, b, c = people
        if kind == "comparing":
            more, less = self.choice([("taller", "shorter"), ("older", "younger"), ("faster", "slower")])
            asked_for = self.choice([more, less])
            who, superlative = (a if asked_for == more else c), f"{asked_for[:-2]}est"
            question = f"{a} is {more} than {b}. {b} is {more} than {c}. Who is the {superlative}?"
            return [Turn(question, f"{who} is the {superlative}.", who)]
        first, second = self.rng.sample(PLACES, 2)
        told = f"{a} took the {thing} in the {first}. Then {a} went to the {second} and left the {thing} there."
        return [Turn(f"{told} Where is the {thing}?", f"The {thing} is in the {second}.", f"The {second}")]

    def remembering(self) -> list[Turn]:
        """The user tells a few things, talks of something else, and asks for them."""
        name, color = self.any_name(), self.choice(COLORS)
        if held_out("recall", name, color):
            return self.remembering()
        turns, facts = self._introduction(name, color) if self.chance(0.65) else ([], [])
        templates = PHRASES["personal facts"] + PHRASES["more personal facts"]
        told = []
        for template in self.rng.sample(templates, self.choice([0, 0, 1, 1, 2, 3] if turns else [1, 1, 2, 3])):
            turn, fact = self._personal_fact(template)
            if fact[0] not in [questions for questions, _, _ in facts]:
                told.append(turn)
                facts.append(fact)
        turns += self._two_in_one(told)
        turns = [replace(turn, short=self.choice(["Okay", "Nice", "Thanks", "Good"])) for turn in turns]
        distractions = [self.question, self.sums, self.joke, self.opposite, self.capital, self.chatter, self.thanks]
        distractions += [self.advice, self.table_row, self.how_are_you, self.story]
        for _ in range(self.choice([0, 0, 1, 1, 2, 3, 5])):
            turns += self.choice(distractions)()[:2]
        self.rng.shuffle(facts)
        for questions, reply, short in facts[: self.choice([1, 1, 2, 3])]:
            turns.append(Turn(self.choice(split(questions)), reply, capitalize(short)))
        if self.chance(0.15):
            turns += self._never_told(turns)
        return turns

    def _two_in_one(self, turns: list[Turn]) -> list[Turn]:
        """Sometimes the first two statements become one."""
        if len(turns) < 2 or self.chance(0.6) or any(turn.user.count(".") > 1 for turn in turns[:2]):
            return turns
        first, second = turns[:2]
        then = second.user if second.user.startswith("I") else second.user[0].lower() + second.user[1:]
        joined = self.choice([f"{first.user} {second.user}", f"{first.user.rstrip('.')} and {then}"])
        return [Turn(joined, self.choice([first.reply, second.reply])), *turns[2:]]

    def _personal_fact(self, template: str) -> tuple[Turn, tuple[str, str, str]]:
        values = self._slot_values() | {"other": self.any_name(), "animal_one": self.choice(stories.ANIMALS)}
        values |= {"year": str(self.rng.randint(1940, 2020)), "number": str(self.rng.randint(2, 12))}
        if self.chance(0.2):
            values["city"] = self.invented_name()
        template = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", template.format_map(values))
        said, replies, questions, answer, short = template.split(" => ")
        return Turn(self.choice(split(said)), capitalize(self.choice(split(replies)))), (questions, answer, short)

    def _never_told(self, turns: list[Turn]) -> list[Turn]:
        """A question about something that the user has not said."""
        said = " ".join(turn.user.lower() for turn in turns)
        for word in self.rng.sample(["name", "dog", "cat", "sister", "color", "live", "job", "old"], 8):
            if word not in said:
                questions = [question for question in PHRASES["not told"] if word in question]
                return [Turn(self.choice(questions), self._phrase("not told replies"))] if questions else []
        return []

    def _introduction(self, name: str, color: str) -> tuple[list[Turn], list[tuple[str, str, str]]]:
        hello = self._phrase("name replies").format(name=name, model=MODEL_NAME)
        pretty = self._phrase("color replies").format(color=color)
        name_fact = (" | ".join(PHRASES["name questions"]), f"Your name is {name}.", name)
        color_fact = (" | ".join(PHRASES["color questions"]), f"Your favorite color is {color}.", color)
        kind = self.rng.random()
        if kind < 0.25:
            said = self._phrase("name and color statements").format(name=name, color=color)
            reply = self.choice([hello, f"Nice to meet you, {name}! {capitalize(color)} is a pretty color."])
            return [Turn(said, reply)], [name_fact, color_fact]
        name_turn = Turn(self._phrase("name statements").format(name=name), hello)
        if self.chance(0.6):
            name_turn = self._introduced(name, hello)
        color_turn = Turn(capitalize(self._phrase("color statements").format(color=color)), capitalize(pretty))
        if kind < 0.5:
            return [name_turn], [name_fact]
        if kind < 0.65:
            return [color_turn], [color_fact]
        return self.rng.sample([name_turn, color_turn], 2), [name_fact, color_fact]

    def _introduced(self, name: str, hello: str) -> Turn:
        """A greeting, a name and perhaps a question, in one of many combinations."""
        said = self._phrase("introductions").format(name=name)
        greeting = self.choice(["", *PHRASES["greetings before a name"]])
        if greeting.endswith((",", "there", "hey")) and self.chance(0.3):
            said = (
                f"{greeting} {said[0].lower() if not said.startswith(name) and said[:2] != 'I ' else said[0]}{said[1:]}"
            )
        elif greeting:
            said = f"{greeting} {said}"
        end = self.rng.random()
        if end < 0.5:
            return Turn(said + self.choice([".", ".", "!", ""]), hello)
        question, reply = self._phrase("after a name").format(name=name, model=MODEL_NAME).split(" => ")
        return Turn(said + self.choice([". ", "! ", ", "]) + question, reply)

    def introduction(self) -> list[Turn]:
        """A name, and nothing more of it."""
        name = self.any_name()
        return [self._introduced(name, self._phrase("name replies").format(name=name, model=MODEL_NAME))]

    def not_told(self) -> list[Turn]:
        return [Turn(self._phrase("not told"), self._phrase("not told replies"))]
