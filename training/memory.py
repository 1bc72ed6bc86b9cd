"""Skills of reading and remembering, whose answers are in earlier user messages."""

import re
from dataclasses import replace

import stories
from content import items, split
from exchanges import COLORS, MOVES, PHRASES, PLACES, TABLES, held_out
from skills import MODEL_NAME, SLOTS, Skills
from turns import Turn, article, capitalize

THINGS = items(TABLES["things to find"])


class MemorySkills(Skills):
    """Skills whose replies repeat facts of the chat. Public methods return turns."""

    def whereabouts(self) -> list[Turn]:
        """Place two or three people, and ask where one of them is."""
        count = self.choice([2, 2, 2, 3])
        more_places = [place.removeprefix("the ") for place in SLOTS["place"]] if self.chance(0.3) else []
        people, places = self._people(count), self.rng.sample(PLACES + more_places, count)
        if any(held_out("where", name, place) for name, place in zip(people, places)):
            return self.whereabouts()
        sentences = " ".join(f"{name} {self.choice(MOVES)} the {place}." for name, place in zip(people, places))
        index = self.rng.randrange(count)
        reply = f"{people[index]} is in the {places[index]}."
        if self.chance(0.15):
            return [Turn(f"{sentences} Who is in the {places[index]}?", reply, people[index])]
        return [Turn(f"{sentences} Where is {people[index]}?", reply, f"The {places[index]}")]

    def reading(self) -> list[Turn]:
        """Write two or three sentences, and ask about one of them."""
        count = self.choice([2, 2, 2, 3])
        people, things = self._people(3), self.rng.sample(THINGS, 3)
        colors, foods = self.rng.sample(COLORS, 3), self.rng.sample(SLOTS["food"], 3)
        index = self.rng.randrange(count)
        who, thing, color, food = people[index], things[index], colors[index], foods[index]
        kind = self.choice(["having", "coloring", "liking", "comparing", "moving"])
        if kind == "having":
            sentences = " ".join(f"{people[i]} has {article(things[i])}." for i in range(count))
            owner = Turn(f"{sentences} Who has the {thing}?", f"{who} has the {thing}.", who)
            a_thing = article(thing)
            owned = Turn(f"{sentences} What does {who} have?", f"{who} has {a_thing}.", capitalize(a_thing))
            return [self.choice([owner, owned])]
        if kind == "coloring":
            sentences = " ".join(f"The {things[i]} is {colors[i]}." for i in range(count))
            question = self.choice([f"What color is the {thing}?", f"Which one is {color}?"])
            return [Turn(f"{sentences} {question}", f"The {thing} is {color}.")]
        if kind == "liking":
            sentences = " ".join(f"{people[i]} likes {foods[i]}." for i in range(count))
            question = self.choice([f"Who likes {food}?", f"What does {who} like?"])
            return [Turn(f"{sentences} {question}", f"{who} likes {food}.")]
        a, b, c = people
        if kind == "comparing":
            more, less = self.choice([("taller", "shorter"), ("older", "younger"), ("faster", "slower")])
            adjective = self.choice([more, less])
            who, superlative = (a if adjective == more else c), f"{adjective[:-2]}est"
            question = f"{a} is {more} than {b}. {b} is {more} than {c}. Who is the {superlative}?"
            return [Turn(question, f"{who} is the {superlative}.", who)]
        first, second = self.rng.sample(PLACES, 2)
        sentences = f"{a} took the {thing} in the {first}. Then {a} went to the {second} and left the {thing} there."
        return [Turn(f"{sentences} Where is the {thing}?", f"The {thing} is in the {second}.", f"The {second}")]

    def remembering(self) -> list[Turn]:
        """State facts, change the subject, and then ask for the facts."""
        name, color = self.any_name(), self.choice(COLORS)
        if held_out("recall", name, color):
            return self.remembering()
        turns, facts = self._introduction(name, color) if self.chance(0.65) else ([], [])
        templates = PHRASES["personal facts"] + PHRASES["more personal facts"]
        statements = []
        for template in self.rng.sample(templates, self.choice([0, 0, 1, 1, 2, 3] if turns else [1, 1, 2, 3])):
            turn, fact = self._personal_fact(template)
            if fact[0] not in [questions for questions, _, _ in facts]:
                statements.append(turn)
                facts.append(fact)
        turns += self._two_in_one(statements)
        turns = [replace(turn, short=self.choice(["Okay", "Nice", "Thanks", "Good"])) for turn in turns]
        distractions = [self.question, self.sums, self.joke, self.opposite, self.capital, self.chatter, self.thanks]
        distractions += [self.advice, self.table_row, self.how_are_you, self.story]
        for _ in range(self.choice([0, 0, 1, 1, 2, 3, 5])):
            turns += self.choice(distractions)()[:2]
        self.rng.shuffle(facts)
        for questions, reply, short in facts[: self.choice([1, 1, 2, 3])]:
            turns.append(Turn(self.choice(split(questions)), reply, capitalize(short)))
        if self.chance(0.15):
            turns += self._unknown_fact_question(turns)
        return turns

    def _two_in_one(self, turns: list[Turn]) -> list[Turn]:
        """Join the first two statements in one message, in some cases."""
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
        statement, replies, questions, answer, short = template.split(" => ")
        return Turn(self.choice(split(statement)), capitalize(self.choice(split(replies)))), (questions, answer, short)

    def _unknown_fact_question(self, turns: list[Turn]) -> list[Turn]:
        """Ask about a fact that the user has not stated."""
        user_text = " ".join(turn.user.lower() for turn in turns)
        for word in self.rng.sample(["name", "dog", "cat", "sister", "color", "live", "job", "old"], 8):
            if word not in user_text:
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
            statement = self._phrase("name and color statements").format(name=name, color=color)
            reply = self.choice([hello, f"Nice to meet you, {name}! {capitalize(color)} is a pretty color."])
            return [Turn(statement, reply)], [name_fact, color_fact]
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
        """Return a turn with a name, and sometimes a greeting or a question."""
        statement = self._phrase("introductions").format(name=name)
        greeting = self.choice(["", *PHRASES["greetings before a name"]])
        if greeting.endswith((",", "there", "hey")) and self.chance(0.3):
            keep = statement.startswith(name) or statement[:2] == "I "
            first = statement[0] if keep else statement[0].lower()
            statement = f"{greeting} {first}{statement[1:]}"
        elif greeting:
            statement = f"{greeting} {statement}"
        end = self.rng.random()
        if end < 0.5:
            return Turn(statement + self.choice([".", ".", "!", ""]), hello)
        question, reply = self._phrase("after a name").format(name=name, model=MODEL_NAME).split(" => ")
        return Turn(statement + self.choice([". ", "! ", ", "]) + question, reply)

    def introduction(self) -> list[Turn]:
        """Introduce the user by name only."""
        name = self.any_name()
        return [self._introduced(name, self._phrase("name replies").format(name=name, model=MODEL_NAME))]

    def unknown_user_fact(self) -> list[Turn]:
        """Ask for a fact about the user that the chat does not contain."""
        return [Turn(self._phrase("not told"), self._phrase("not told replies"))]
