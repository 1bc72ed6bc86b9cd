"""Skills of everyday talk: greetings, feelings, advice, the identity of the model, and unknowable facts."""

import re
import string
from dataclasses import replace

from content import bank, dialogues, follow_ups, items
from skills import MODEL_NAME, SLOTS, TABLES, Skills
from turns import Turn, capitalize, plural

PROJECT = "tridecode"
BANKS = ("questions", "advice", "identity", "unknowable", "smalltalk", "statements")
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


class TalkSkills(Skills):
    """Skills of everyday talk. Public methods return turns."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.banks = {name: bank(f"{name}.txt") for name in BANKS}
        self.smalltalk = {questions[0]: (questions, replies) for questions, replies in self.banks["smalltalk"]}
        self.openers = [entry for first, entry in self.smalltalk.items() if first not in HAVE_OWN_SKILL]
        kinds = {"bad": "bad_feeling", "good": "good_feeling", "season": "season"}
        self.follow_ups = []
        for pattern, answers, replies in follow_ups("follow_ups.txt"):
            for kind, slot in kinds.items():
                pattern = pattern.replace(f"{{{kind}}}", "|".join(SLOTS[slot]))
            self.follow_ups.append((re.compile(f"(?:{pattern})$"), answers, replies))
        self.feelings, self.acts = dialogues("feelings.txt"), dialogues("acts.txt")

    def _fill(self, text: str) -> str:
        return text.replace("{name}", MODEL_NAME).replace("{project}", PROJECT)

    def _from_bank(self, entry: tuple[list[str], list[str]]) -> list[Turn]:
        questions, replies = entry
        return [Turn(self._fill(self.choice(questions)), self._fill(self.choice(replies)))]

    def question(self) -> list[Turn]:
        """Ask a common question."""
        turn = self._from_bank(self.choice(self.banks["questions"]))[0]
        what = re.fullmatch(r"What is ((?:an? |the )?[a-z ]+)\?", turn.user)
        if what and "best" not in turn.user and self.chance(0.35):
            turn = replace(turn, user=self._phrase("what is").format(what[1]))
        why = re.fullmatch(r"Why (is|are) ((?:the )?\w+) ([a-z ]+)\?", turn.user)
        if why and self.chance(0.3):
            turn = replace(turn, user=self._phrase("why").format(f"{why[2]} {why[1]} {why[3]}"))
        return [turn]

    def advice(self) -> list[Turn]:
        """Ask for advice or instructions."""
        turn = self._from_bank(self.choice(self.banks["advice"]))[0]
        how = re.fullmatch(r"How do I (.*)\?", turn.user)
        if how and self.chance(0.35):
            turn = replace(turn, user=self._phrase("how to").format(how[1]))
        return [turn]

    def identity(self) -> list[Turn]:
        """Ask about the model itself."""
        return self._from_bank(self.choice(self.banks["identity"]))

    def unknowable(self) -> list[Turn]:
        """Ask for a fact that the model cannot know."""
        if self.chance(0.75):
            return self._from_bank(self.choice(self.banks["unknowable"]))
        if self.chance(0.35):
            who = f"{self.any_name()} {self.invented_name()}"
            return [
                Turn(self._phrase("unknown person").format(who), self._phrase("unknown person replies").format(who))
            ]
        topic = self.choice(items(TABLES["unknown topics"]))
        return [Turn(self._phrase("unknown topic").format(topic), self._phrase("unknown topic replies").format(topic))]

    def unknown_how(self) -> list[Turn]:
        """Ask for instructions that the model does not have; the reply admits it."""
        verb, thing = (self.choice(items(TABLES[f"unknown {kind}"])) for kind in ("verbs", "things"))
        if self.chance(0.15):
            thing = f"{self.choice(['a', 'my', 'the'])} {self.invented_name().lower()}"
        return [Turn(self._phrase("how to any").format(f"{verb} {thing}"), self._phrase("unknown how replies"))]

    def chatter(self) -> list[Turn]:
        """Open small talk."""
        return self._from_bank(self.choice(self.openers))

    def _smalltalk(self, first: str) -> list[Turn]:
        return self._from_bank(self.smalltalk[first])

    def greeting(self) -> list[Turn]:
        """Greet the model."""
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
        """Ask how the model is."""
        turns = self._smalltalk("How are you?")
        if self.chance(0.2):
            greeting = self.choice(["Hi!", "Hello,", "Hey,", "Hi there!", "Good morning!"])
            turns = [replace(turns[0], user=f"{greeting} {turns[0].user}")]
        return turns + (self._smalltalk("I'm good, thanks.") if self.chance(0.5) else [])

    def thanks(self) -> list[Turn]:
        """Thank the model."""
        return self._smalltalk("Thanks!")

    def praise(self) -> list[Turn]:
        """Praise the model."""
        turns = self._smalltalk("You are nice.")
        if self.chance(0.3):
            turns = [replace(turns[0], user=f"{self.choice(['Thanks!', 'Thank you,', 'Thank you!'])} {turns[0].user}")]
        return turns

    def rudeness(self) -> list[Turn]:
        """Insult the model; the reply stays polite."""
        return self._smalltalk("You are stupid.")

    def goodbye(self) -> list[Turn]:
        """Say goodbye."""
        turn = self._smalltalk("Bye")[0]
        if "ight" in turn.user or "sleep" in turn.user:
            replies = ["Good night! Sleep well.", "Good night! Sweet dreams.", "Sleep well! Talk to you soon."]
            turn = replace(turn, reply=self.choice(replies))
        return [turn]

    def _dialogue(self, parts: list[list[str]], continue_chance: float) -> list[Turn]:
        turns = [Turn(self.choice(parts[0]), self.choice(parts[1]))]
        if self.chance(continue_chance):
            turns.append(Turn(self.choice(parts[2]), self.choice(parts[3])))
        return turns

    def feeling(self) -> list[Turn]:
        """Return a conversation about a feeling."""
        return self._dialogue(self.choice(self.feelings), 0.75)

    def activity(self) -> list[Turn]:
        """Talk about an activity."""
        return self._dialogue(self.choice(self.acts), 0.8)

    def statement(self) -> list[Turn]:
        """State something about the user's life; the reply repeats words of the statement."""
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

    def answered(self, reply: str) -> list[Turn]:
        """Answer the question at the end of a reply, with the reply to that answer.

        Returns an empty list if no pattern of follow_ups.txt matches.
        """
        if not reply.endswith(("?", "about.")):
            return []
        matches = [(pattern.search(reply), *rest) for pattern, *rest in self.follow_ups]
        matches = [entry for entry in matches if entry[0]]
        if not matches:
            return []
        match, answers, replies = self.choice(matches)
        values = self._slot_values() | {"it": next(filter(None, match.groups()), "")}
        values["number"] = str(self.rng.randint(2, 15))
        answer, reply = self.choice(answers), self.choice(replies)
        if reply.startswith("@"):
            turn = getattr(self, reply.removeprefix("@"))()
            return [turn if answer == "-" else replace(turn, user=answer)]
        answer, reply = (re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text.format_map(values)) for text in (answer, reply))
        return [Turn(self.choice([capitalize(answer), answer]), capitalize(reply))]

    def fragment(self) -> list[Turn]:
        """Send unusual input: nothing, random keys, an emoji, or another language."""
        kind = self.rng.choice(["empty", "empty", "keys", "emoji", "languages other", "languages other"])
        if kind == "keys":
            keys = "".join(self.choice(string.ascii_lowercase) for _ in range(self.rng.randint(1, 9)))
            return [Turn(" ".join([keys] * self.choice([1, 1, 2])), self._smalltalk("asdf")[0].reply, exact=True)]
        user = self.choice(items(TABLES[kind], " / "))
        replies = {"emoji": "emoji replies", "languages other": "other language replies"}
        reply = self._phrase(replies[kind]) if kind in replies else self._smalltalk("asdf")[0].reply
        return [Turn(user, reply, exact=True)]
