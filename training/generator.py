"""Template-generated chats: original text for teaching a tiny model to talk, as much of it as wanted.

A skill is a method that returns one or more turns that belong together; `ChatGenerator.chat` strings skills together,
adds the noise of real typing to the user's side and sometimes a system turn with a matching style on the other side.
`python training/generator.py` prints a few chats.
"""

import random
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import replace

import stories
import styles
from content import bank, dialogues, items, mapping, split
from exchanges import COLORS, MOVES, NAMES, PHRASES, PLACES, held_out
from facts import CATEGORIES, NUMBER_WORDS, TABLES, FactSkills
from turns import Turn, article, capitalize, plural, sentence

MODEL_NAME = "Tri"
PROJECT = "tridecode"
BANKS = ("questions", "advice", "identity", "unknowable", "smalltalk", "statements")
MORE_NAMES = items(TABLES["more names"], " ")
SLOTS = {name.removeprefix("slot "): items(lines) for name, lines in TABLES.items() if name.startswith("slot ")}
SLOTS |= {"day": CATEGORIES["days of the week"], "season": CATEGORIES["seasons"], "color": CATEGORIES["colors"]}
THINGS = items(TABLES["things to find"])
WORDS_AS_NAMES = [word for word in items(TABLES["spelling"], " ") + stories.THINGS if " " not in word]
HAVE_OWN_SKILL = {
    "Hi",
    "How are you?",
    "I'm good, thanks.",
    "Thanks!",
    "You are nice.",
    "You are stupid.",
    "asdf",
    "Bye",
}
LONGEST_CHAT = 24
LONGEST_WITH_NOISE = 400

Skill = Callable[[], list[Turn]]


class ChatGenerator(FactSkills):
    """A stream of chats that depends on nothing but the seed."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.banks = {name: bank(f"{name}.txt") for name in BANKS}
        self.smalltalk = {questions[0]: (questions, replies) for questions, replies in self.banks["smalltalk"]}
        self.openers = [entry for first, entry in self.smalltalk.items() if first not in HAVE_OWN_SKILL]
        self.feelings, self.acts = dialogues("feelings.txt"), dialogues("acts.txt")

    def _phrase(self, section: str) -> str:
        return self.choice(PHRASES[section])

    # Skills from the question banks.

    def _fill(self, text: str) -> str:
        return text.replace("{name}", MODEL_NAME).replace("{project}", PROJECT)

    def _from_bank(self, entry: tuple[list[str], list[str]]) -> list[Turn]:
        questions, replies = entry
        return [Turn(self._fill(self.choice(questions)), self._fill(self.choice(replies)))]

    def question(self) -> list[Turn]:
        turn = self._from_bank(self.choice(self.banks["questions"]))[0]
        what = re.fullmatch(r"What is ((?:an? |the )?[a-z ]+)\?", turn.user)
        if what and "best" not in turn.user and self.chance(0.35):
            turn = replace(turn, user=self._phrase("what is").format(what[1]))
        why = re.fullmatch(r"Why (is|are) ((?:the )?\w+) ([a-z ]+)\?", turn.user)
        if why and self.chance(0.3):
            turn = replace(turn, user=self._phrase("why").format(f"{why[2]} {why[1]} {why[3]}"))
        return [turn]

    def advice(self) -> list[Turn]:
        turn = self._from_bank(self.choice(self.banks["advice"]))[0]
        how = re.fullmatch(r"How do I (.*)\?", turn.user)
        if how and self.chance(0.35):
            turn = replace(turn, user=self._phrase("how to").format(how[1]))
        return [turn]

    def identity(self) -> list[Turn]:
        return self._from_bank(self.choice(self.banks["identity"]))

    def unknowable(self) -> list[Turn]:
        if self.chance(0.75):
            return self._from_bank(self.choice(self.banks["unknowable"]))
        if self.chance(0.35):
            who = f"{self.any_name()} {self.invented_name()}"
            return [
                Turn(self._phrase("unknown person").format(who), self._phrase("unknown person replies").format(who))
            ]
        topic = self.choice(items(TABLES["unknown topics"]))
        return [Turn(self._phrase("unknown topic").format(topic), self._phrase("unknown topic replies").format(topic))]

    def chatter(self) -> list[Turn]:
        return self._from_bank(self.choice(self.openers))

    def _smalltalk(self, first: str) -> list[Turn]:
        return self._from_bank(self.smalltalk[first])

    def greeting(self) -> list[Turn]:
        turn = self._smalltalk("Hi")[0]
        part = re.search(r"morning|afternoon|evening", turn.user)
        if part:
            question = self.choice(["How are you?", "What would you like to talk about?", "How can I help you?"])
            turn = replace(turn, reply=f"Good {part[0]}! {question}")
        turns = [turn]
        if re.search(r"How are you|How is your day", turn.reply) and self.chance(0.6):
            turns += self._smalltalk("I'm good, thanks.")
        return turns

    def how_are_you(self) -> list[Turn]:
        turns = self._smalltalk("How are you?")
        if self.chance(0.2):
            greeting = self.choice(["Hi!", "Hello,", "Hey,", "Hi there!", "Good morning!"])
            turns = [replace(turns[0], user=f"{greeting} {turns[0].user}")]
        return turns + (self._smalltalk("I'm good, thanks.") if self.chance(0.5) else [])

    def thanks(self) -> list[Turn]:
        return self._smalltalk("Thanks!")

    def praise(self) -> list[Turn]:
        turns = self._smalltalk("You are nice.")
        if self.chance(0.3):
            turns = [replace(turns[0], user=f"{self.choice(['Thanks!', 'Thank you,', 'Thank you!'])} {turns[0].user}")]
        return turns

    def rudeness(self) -> list[Turn]:
        return self._smalltalk("You are stupid.")

    def goodbye(self) -> list[Turn]:
        turn = self._smalltalk("Bye")[0]
        if "ight" in turn.user or "sleep" in turn.user:
            replies = ["Good night! Sleep well.", "Good night! Sweet dreams.", "Sleep well! Talk to you soon."]
            turn = replace(turn, reply=self.choice(replies))
        return [turn]

    def _dialogue(self, parts: list[list[str]], go_on: float) -> list[Turn]:
        turns = [Turn(self.choice(parts[0]), self.choice(parts[1]))]
        if self.chance(go_on):
            turns.append(Turn(self.choice(parts[2]), self.choice(parts[3])))
        return turns

    def feeling(self) -> list[Turn]:
        return self._dialogue(self.choice(self.feelings), 0.75)

    def activity(self) -> list[Turn]:
        return self._dialogue(self.choice(self.acts), 0.8)

    def _slot_values(self) -> dict[str, str]:
        values = {slot: self.choice(choices) for slot, choices in SLOTS.items()}
        for slot in ("animal", "food", "season"):
            values[f"{slot}2"] = self.choice([other for other in SLOTS[slot] if other != values[slot]])
        values["pet_name"] = self.any_pet_name()
        values |= {"age": str(self.rng.randint(5, 90)), "count": self.choice(NUMBER_WORDS[2:8])}
        return values | {capitalize(slot): capitalize(value) for slot, value in values.items()}

    def statement(self) -> list[Turn]:
        """What users say about their lives; the reply takes up their own words."""
        users, replies = self.choice(self.banks["statements"])
        values = self._slot_values()
        user, reply = self.choice(users).format_map(values), self.choice(replies).format_map(values)
        food = values["food"]
        if plural(food.removesuffix("s")) == food:
            reply = reply.replace(f"{food} sounds", f"{food} sound").replace(f"Was the {food}", f"Were the {food}")
        user, reply = (re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text) for text in (user, reply))
        turns = [Turn(capitalize(user), capitalize(reply))]
        if re.search(r"(Do|Did|Is|Are|Was|Were|Have|Will|Would|Can)\b[^.!?]*\?$", reply) and self.chance(0.3):
            answer = self.choice(["yes", "no"])
            turns.append(Turn(self._phrase(answer), self._phrase(f"{answer} replies")))
        return turns

    # Inputs with little in them, or too much.

    def fragment(self) -> list[Turn]:
        kind = self.rng.choice(["empty", "empty", "keys", "emoji", "languages other", "languages other"])
        if kind == "keys":
            keys = "".join(self.choice(string.ascii_lowercase) for _ in range(self.rng.randint(1, 9)))
            return [Turn(" ".join([keys] * self.choice([1, 1, 2])), self._smalltalk("asdf")[0].reply, exact=True)]
        user = self.choice(items(TABLES[kind], " / "))
        replies = {"emoji": "emoji replies", "languages other": "other language replies"}
        reply = self._phrase(replies[kind]) if kind in replies else self._smalltalk("asdf")[0].reply
        return [Turn(user, reply, exact=True)]

    def long_input(self) -> list[Turn]:
        text = " ".join(self.any_story().text.replace("\n\n", " ") for _ in range(self.rng.randint(1, 3)))
        return [Turn(self._phrase("long input").format(text), self._phrase("long input replies"), exact=True)]

    # Reading and remembering.

    def invented_name(self) -> str:
        """A name that nobody has, so that names are copied and not guessed."""
        onsets = items(
            ["b, d, f, g, h, j, k, l, m, n, p, r, s, t, v, w, z, br, ch, cl, dr, fl, gr, kr, pl, qu, sh, st, th, tr"]
        )
        codas = ["", "", "", "n", "l", "r", "s", "x", "ck", "tz", "nd", "rt", "m", "th", "ff"]
        syllables = [self.choice(onsets) + self.choice(["a", "e", "i", "o", "u", "ai", "ee", "oo"]) for _ in range(3)]
        return ("".join(syllables[: self.choice([1, 2, 2, 3])]) + self.choice(codas)).capitalize()

    def any_name(self) -> str:
        kind = self.rng.random()
        return self.choice(NAMES) if kind < 0.5 else self.choice(MORE_NAMES) if kind < 0.8 else self.invented_name()

    def any_pet_name(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return self.choice(SLOTS["pet_name"])
        return capitalize(self.choice(WORDS_AS_NAMES)) if kind < 0.7 else self.any_name()

    def _people(self, count: int) -> list[str]:
        people: dict[str, None] = {}
        while len(people) < count:
            people[self.any_name()] = None
        return list(people)

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
        for template in self.rng.sample(templates, self.choice([0, 0, 1, 1, 2, 3] if turns else [1, 1, 2, 3])):
            turn, fact = self._personal_fact(template)
            if fact[0] not in [questions for questions, _, _ in facts]:
                turns.append(turn)
                facts.append(fact)
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

    def _personal_fact(self, template: str) -> tuple[Turn, tuple[str, str, str]]:
        values = self._slot_values() | {"other": self.any_name(), "animal_one": self.choice(stories.ANIMALS)}
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
        if self.chance(0.15):
            name_turn = Turn(f"I am {name}. What is your name?", f"Nice to meet you, {name}! My name is {MODEL_NAME}.")
        color_turn = Turn(capitalize(self._phrase("color statements").format(color=color)), capitalize(pretty))
        if kind < 0.5:
            return [name_turn], [name_fact]
        if kind < 0.65:
            return [color_turn], [color_fact]
        return self.rng.sample([name_turn, color_turn], 2), [name_fact, color_fact]

    def not_told(self) -> list[Turn]:
        return [Turn(self._phrase("not told"), self._phrase("not told replies"))]

    # Stories, jokes and other little texts.

    def any_story(self) -> stories.Story:
        return stories.tell(self.rng, stories.random_topic(self.rng))

    def story(self) -> list[Turn]:
        topic = stories.random_topic(self.rng)
        if self.chance(0.12):
            question = self._phrase("story")
        else:
            short = self.chance(0.15) and topic.can_be_tiny
            topic = replace(topic, tiny=short)
            question = self._phrase("short story about" if short else "story about").format(topic.text)
        told = stories.tell(self.rng, topic)
        turns = [Turn(question, told.text)]
        if self.chance(0.3):
            turns += self._about_story(told)
        if self.chance(0.12):
            turns.append(Turn(self._phrase("another story"), self.any_story().text))
        return turns

    def _about_story(self, told: stories.Story) -> list[Turn]:
        if f"{told.hero} named {told.hero_name}" not in told.text or told.friend_name not in told.text:
            return self._smalltalk("Thanks!")
        return self._templated(
            self._phrase("story questions"),
            name=told.hero_name,
            hero=told.hero,
            friend=told.friend_name,
            other=told.friend,
            a_hero=article(told.hero),
        )

    def joke(self) -> list[Turn]:
        if self.chance(0.3):
            return self.riddle()
        question, answer = self.choice(list(mapping(TABLES["jokes"]).items()))
        if self.chance(0.75):
            turns = [Turn(self._phrase("joke"), f"{question} {answer}")]
        else:
            turns = [Turn(self._phrase("joke"), question), Turn(self._phrase("joke answers"), answer)]
        return turns + (self._templated(self._phrase("joke laughs")) if self.chance(0.3) else [])

    def riddle(self) -> list[Turn]:
        question, answer = self.choice(list(mapping(TABLES["riddles"]).items()))
        answer = answer[0].lower() + answer[1:]
        solution = answer.rstrip(".")
        guess = self.choice([*PHRASES["riddle answers"], solution])
        praise = "Yes, that is right! " if guess == solution else ""
        return [Turn(self._phrase("riddle"), question), Turn(guess, f"{praise}The answer is {answer}")]

    def poem(self) -> list[Turn]:
        topic, lines = self.choice(list(mapping(TABLES["poems"]).items()))
        if topic not in ("rain", "love", "winter", "spring", "snow", "summer", "fall", "school", "home"):
            topic = f"the {topic}" if topic in ("moon", "sun", "sea", "night") else article(topic)
        question = self.choice(["Write a poem.", "Tell me a poem.", "Do you know any poems?"])
        question = question if self.chance(0.2) else self._phrase("poem").format(topic)
        return [Turn(question, lines.replace(" / ", "\n"))]

    def echo(self) -> list[Turn]:
        word = self.choice(items(TABLES["spelling"], " "))
        animal = f"{self.choice(stories.ADJECTIVES)} {self.choice(stories.ANIMALS)}"
        phrase, name, count = (
            self.choice([*PHRASES["echo"], word, animal, self.any_name()]),
            self.any_name(),
            self.rng.randint(2, 4),
        )
        user, reply = self.choice(
            [
                (f"Repeat after me: {phrase}", sentence(phrase)),
                (f'Say "{phrase}".', f"{capitalize(phrase)}!"),
                (f"Say {phrase} {NUMBER_WORDS[count]} times.", sentence(", ".join([phrase] * count))),
                (f'Write "{phrase}" in capital letters.', phrase.upper()),
                (f"Say hello to {name}.", f"Hello, {name}!"),
            ]
        )
        return [Turn(user, reply, exact=True)]

    def joined(self) -> list[Turn]:
        """Two questions in one message, both answered."""
        skills = [
            self.identity,
            self.question,
            self.sums,
            self.capital,
            self.opposite,
            self.table_row,
            self.how_are_you,
            self.advice,
        ]
        first, second = (self.choice(skills)()[0] for _ in range(2))
        if not first.user.endswith("?") or first.user == second.user:
            return [first]
        then = second.user if second.user.startswith("I ") else second.user[0].lower() + second.user[1:]
        user = self.choice(
            [
                f"{first.user} {second.user}",
                f"{first.user} And {then}",
                f"{first.user} Also, {then}",
                f"{first.user.rstrip('?')} and {then}",
            ]
        )
        return [Turn(user, f"{first.reply} {second.reply}")]

    def polite_question(self) -> list[Turn]:
        """A greeting and a question in one message."""
        turn = self.choice(
            [self.question, self.sums, self.capital, self.advice, self.statement, self.feeling, self.story]
        )()[0]
        hello = self.choice(["Hi!", "Hello!", "Hey!", "Hi Tri!", "Good morning!", "Hello Tri,", "Hi,"])
        answer = self.choice(["Hello! ", "Hi! ", ""])
        return [
            replace(
                turn, user=f"{hello} {turn.user}", reply=answer + turn.reply if len(turn.reply) < 300 else turn.reply
            )
        ]

    # Chats.

    def user_noise(self, turn: Turn) -> Turn:
        """Typed like a person types: lower case, missing stops, typos, shouting."""
        user = turn.user
        if turn.exact or len(user) > LONGEST_WITH_NOISE:
            return turn
        if self.chance(0.17):
            user = user.lower()
        if self.chance(0.2):
            user = user.rstrip("?.!") or user
        if self.chance(0.08):
            words = user.split(" ")
            places = [
                i
                for i, word in enumerate(words)
                if word.isascii() and word.islower() and word.isalpha() and len(word) > 3
            ]
            for place in self.rng.sample(places, min(len(places), self.choice([1, 1, 2]))):
                words[place] = self._misspell(words[place])
            user = " ".join(words)
        if self.chance(0.04):
            user = user.upper()
        if self.chance(0.03):
            user += self.choice(["!!", "??", "!!!", " ...", " please", ", please", " :)", " now"])
        if self.chance(0.02):
            user = (
                self.choice(["Hey, ", "So, ", "OK, ", "Um, ", f"{MODEL_NAME}, ", "Well, ", "Please, ", "Hi! "]) + user
            )
        return replace(turn, user=user)

    def _misspell(self, word: str) -> str:
        place = self.rng.randrange(1, len(word) - 1)
        before, letter, after = word[:place], word[place], word[place + 1 :]
        return self.choice(
            [
                before + after,
                before + letter * 2 + after,
                before + after[0] + letter + after[1:],
                before + self.choice("aeiorstn") + after,
            ]
        )

    def _skills(self) -> dict[Skill, float]:
        return {
            self.greeting: 3,
            self.how_are_you: 3,
            self.identity: 11,
            self.question: 20,
            self.advice: 13,
            self.chatter: 8,
            self.unknowable: 8,
            self.feeling: 4,
            self.activity: 4,
            self.statement: 18,
            self.fragment: 4,
            self.capital: 8,
            self.opposite: 9,
            self.table_row: 9,
            self.rhyme: 1,
            self.comparison: 1,
            self.calendar: 1,
            self.membership: 1.5,
            self.spelling: 2,
            self.lists: 5,
            self.sums: 15,
            self.arithmetic: 6,
            self.word_problem: 3,
            self.whereabouts: 9,
            self.reading: 6,
            self.remembering: 9,
            self.story: 11,
            self.joke: 4,
            self.poem: 2,
            self.echo: 2,
            self.favorite: 3,
            self.praise: 1,
            self.rudeness: 2,
            self.thanks: 1,
            self.goodbye: 1,
            self.not_told: 2,
            self.joined: 4,
            self.polite_question: 4,
            self.long_input: 0.3,
        }

    def _turns(self) -> list[Turn]:
        weights = self._skills()
        length = self.rng.choices([1, 2, 3, 4, 6, 10, 16], [42, 24, 14, 10, 6, 3, 1.5])[0]
        turns, picked = (self.greeting() if self.chance(0.2) else []), set()
        for skill in self.rng.choices(list(weights), list(weights.values()), k=length):
            again = skill in picked and skill in (self.remembering, self.greeting, self.how_are_you)
            contradicts = skill in (self.unknowable, self.not_told) and self.remembering in picked
            if again or contradicts or len(turns) > LONGEST_CHAT:
                continue
            picked.add(skill)
            turns += skill()
            if self.chance(0.06):
                turns += self.thanks()
            if skill == self.goodbye:
                return turns
        return turns + (self.goodbye() if len(turns) > 1 and self.chance(0.12) else [])

    def chat(self) -> list[dict[str, str]]:
        """One chat as messages, user and assistant in turn, perhaps after a system turn."""
        if self.chance(0.015):
            system, turns = self._named()
        else:
            system, turns = "", self._turns()
            if self.chance(0.16):
                system, turns = styles.apply(self.rng, turns)
        messages = [{"role": "system", "content": system}] if system else []
        for turn in map(self.user_noise, turns):
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
        return messages

    def _named(self) -> tuple[str, list[Turn]]:
        """A system turn that gives the model another name or tells it the user's name."""
        name = self.any_name()
        whose = self.choice(["own name", "user's name"])
        turns = self._templated(self._phrase(f"{whose} questions").replace("{name}", name))
        if self.chance(0.4):
            turns += self.choice([self.question, self.sums, self.table_row, self.advice])()
        return self._phrase(f"system {whose}").format(name), turns


def generate(count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """`count` chats; the same ones for the same seed."""
    generator = ChatGenerator(seed)
    for _ in range(count):
        yield generator.chat()


if __name__ == "__main__":
    for chat in generate(20, seed=7):
        print("\n".join(f"{message['role']:>9}: {message['content']}" for message in chat), end="\n\n")
