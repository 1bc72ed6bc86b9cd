"""Generator of chats from templates, as training data for a very small model.

A skill is a method that returns one or more turns that belong together. `ChatGenerator.chat` joins skills to a chat and
adds typing noise to the user messages. Some chats have a system message and replies in the style that it requests.
`python training/generator.py` prints a few chats.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import styles
from content import CONTENT, sections
from exchanges import COLORS, NAMES, held_out
from facts import FactSkills
from memory import MemorySkills
from talk import TalkSkills
from texts import TextSkills
from turns import Turn
from typing_noise import typed

LONGEST_CHAT = 24
LONGEST_QUOTED = 200

Skill = Callable[[], list[Turn]]


def plain(text: str) -> str:
    """Return the letters and digits in lower case. Prompts with equal results count as the same prompt."""
    return " ".join(re.findall(r"\w+", text.lower()))


# The prompts of evaluate.py. No generated chat contains one of them, in any case or punctuation.
FREE_PROMPTS = (CONTENT / "free_prompts.txt").read_text(encoding="utf-8").splitlines()
EDGE_PROMPTS = sections("edge_prompts.txt")
NEVER_ASKED = {plain(prompt) for prompts in (FREE_PROMPTS, *EDGE_PROMPTS.values()) for prompt in prompts}


def _recalls_held_out(turns: list[Turn]) -> bool:
    """Return whether a chat recalls a name or color, and also contains the other half of a held-out pair."""
    replies = " ".join(turn.reply for turn in turns)
    names, colors = (re.findall(rf"Your {fact} is (\w+)", replies) for fact in ("name", "favorite color"))
    if not names and not colors:
        return False
    user_words = set(plain(" ".join(turn.user for turn in turns)).split())
    pairs = [(name, color) for name in names for color in COLORS if color in user_words]
    pairs += [(name, color) for color in colors for name in NAMES if name.lower() in user_words]
    return any(held_out("recall", name, color) for name, color in pairs)


class ChatGenerator(FactSkills, TalkSkills, MemorySkills, TextSkills):
    """A stream of chats that depends only on the seed."""

    # ---- skills that combine other skills

    def long_input(self) -> list[Turn]:
        """Quote one to three stories in a long user message."""
        text = " ".join(self.any_story().text.replace("\n\n", " ") for _ in range(self.rng.randint(1, 3)))
        return [Turn(self._phrase("long input").format(text), self._phrase("long input replies"), exact=True)]

    def joined(self) -> list[Turn]:
        """Ask two questions in one message; the reply answers both."""
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
        """Greet and ask a question in one message."""
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

    def quoting(self) -> list[Turn]:
        """Make a turn, and ask the model to repeat its reply or the user message."""
        skills = [self.question, self.statement, self.sums, self.capital, self.chatter, self.advice, self.joke]
        turns = self.choice(skills)()[:1]
        if len(turns[0].user) > LONGEST_QUOTED or len(turns[0].reply) > LONGEST_QUOTED:
            return turns
        turns = [replace(typed(self.rng, turns[0]), exact=True)]
        if self.chance(0.5):
            return turns + [Turn(self._phrase("repeat"), turns[0].reply)]
        reply = self._phrase("you said").replace("{}", turns[0].user)
        return turns + [Turn(self._phrase("what did i say"), reply)]

    # ---- chats

    def _skills(self) -> dict[Skill, float]:
        return {
            self.greeting: 3,
            self.how_are_you: 3,
            self.identity: 12,
            self.question: 20,
            self.advice: 16,
            self.chatter: 12,
            self.unknowable: 13,
            self.feeling: 4,
            self.activity: 4,
            self.statement: 24,
            self.fragment: 5,
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
            self.remembering: 14,
            self.introduction: 3,
            self.story: 14,
            self.joke: 4,
            self.poem: 2,
            self.echo: 2,
            self.favorite: 3,
            self.praise: 1,
            self.rudeness: 2,
            self.thanks: 1,
            self.goodbye: 1,
            self.unknown_user_fact: 2,
            self.joined: 4,
            self.polite_question: 4,
            self.long_input: 0.3,
            self.quoting: 4,
            self.unknown_how: 2,
            self.difference: 2,
        }

    def _turns(self) -> list[Turn]:
        weights = self._skills()
        length = self.rng.choices([1, 2, 3, 4, 6, 10, 16], [42, 24, 14, 10, 6, 3, 1.5])[0]
        turns, picked = (self.greeting() if self.chance(0.2) else []), set()
        if turns and self.chance(0.3):
            turns += self.answered(turns[-1].reply)
        name_skills = {self.remembering, self.introduction}
        user_fact_skills = name_skills | {self.statement, self.activity}
        for skill in self.rng.choices(list(weights), list(weights.values()), k=length):
            again = skill in picked and skill in (self.greeting, self.how_are_you)
            again |= skill in name_skills and bool(picked & name_skills)
            contradicts = skill in (self.unknowable, self.unknown_user_fact) and picked & user_fact_skills
            if again or contradicts or len(turns) > LONGEST_CHAT:
                continue
            picked.add(skill)
            turns += skill()
            answered = self.answered(turns[-1].reply) if self.chance(0.3) else []
            if answered:
                turns += answered
                picked.add(self.statement)
            if self.chance(0.06):
                turns += self.thanks()
            if skill == self.goodbye:
                return turns
        return turns + (self.goodbye() if len(turns) > 1 and self.chance(0.12) else [])

    def chat(self) -> list[dict[str, str]]:
        """Return one chat: alternating user and assistant messages, sometimes after a system message."""
        while True:
            messages = self._any_chat()
            if not any(message["role"] == "user" and plain(message["content"]) in NEVER_ASKED for message in messages):
                return messages

    def _any_chat(self) -> list[dict[str, str]]:
        if self.chance(0.015):
            system, turns = self._named()
        else:
            system, turns = "", self._turns()
            while _recalls_held_out(turns):
                turns = self._turns()
            if self.chance(0.16):
                system, turns = styles.apply(self.rng, turns)
        messages = [{"role": "system", "content": system}] if system else []
        for turn in (typed(self.rng, turn) for turn in turns):
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
        return messages

    def _named(self) -> tuple[str, list[Turn]]:
        """Return a system message with a name for the model or of the user, and turns that use it."""
        name = self.any_name()
        owner = self.choice(["own name", "user's name"])
        turns = self._templated(self._phrase(f"{owner} questions").replace("{name}", name))
        if self.chance(0.4):
            turns += self.choice([self.question, self.sums, self.table_row, self.advice])()
        return self._phrase(f"system {owner}").format(name), turns


def generate(count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield `count` chats. Equal seeds give equal chats."""
    generator = ChatGenerator(seed)
    for _ in range(count):
        yield generator.chat()


if __name__ == "__main__":
    for chat in generate(20, seed=7):
        print("\n".join(f"{message['role']:>9}: {message['content']}" for message in chat), end="\n\n")
