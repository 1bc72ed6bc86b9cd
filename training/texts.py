"""Skills that produce a little text: stories, jokes, riddles, poems and echoes."""

from dataclasses import replace

import stories
from content import items, mapping
from exchanges import PHRASES
from skills import NUMBER_WORDS, TABLES, Skills
from turns import Turn, article, capitalize, sentence


class TextSkills(Skills):
    """Methods that return turns with a little text made to order."""

    def any_story(self) -> stories.Story:
        return stories.tell(self.rng, stories.random_topic(self.rng))

    def any_told_story(self) -> Turn:
        return Turn("Tell me a story.", self.any_story().text)

    def asked_story(self) -> Turn:
        """Only the subject is said."""
        topic = stories.random_topic(self.rng)
        said = self.choice(["{}", "{}.", "About {}.", "about {}", "It should be about {}.", "{}, please."])
        return Turn(capitalize(said.format(topic.text)), stories.tell(self.rng, topic).text)

    def any_joke(self) -> Turn:
        question, answer = self.choice(list(mapping(TABLES["jokes"]).items()))
        return Turn("Tell me a joke.", f"{question} {answer}")

    def story(self) -> list[Turn]:
        topic = stories.random_topic(self.rng)
        if self.chance(0.12):
            question = self._phrase("story")
        else:
            short = self.chance(0.15) and topic.can_be_tiny
            topic = replace(topic, tiny=short)
            question = self._story_request("short story about" if short else "story about", topic.text)
        told = stories.tell(self.rng, topic)
        turns = [Turn(question, told.text)]
        if self.chance(0.3):
            turns += self._about_story(told)
        if self.chance(0.12):
            turns.append(Turn(self._phrase("another story"), self.any_story().text))
        return turns

    def _story_request(self, section: str, topic: str) -> str:
        ask, short, kind = (self._phrase(f"story {part}") for part in ("ask", "short", "kind"))
        asks_back = ask.startswith(("Can", "Could", "Will", "Would", "Do ", "How"))
        end = "?" if asks_back else self.choice([".", ".", "", ", please.", "!"])
        kind_only = self.choice(["story", "story", "tale", "bedtime story"])
        return self._phrase(section).format(topic, ask=ask, short=short, kind=kind, kind_only=kind_only, end=end)

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
        turns += self._templated(self._phrase("joke laughs")) if self.chance(0.3) else []
        if self.chance(0.2):
            question, answer = self.choice(list(mapping(TABLES["jokes"]).items()))
            turns.append(Turn(self._phrase("another joke"), f"{question} {answer}"))
        return turns

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
