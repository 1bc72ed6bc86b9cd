"""Skills that write short texts: stories, jokes, riddles, poems and echoes."""

from dataclasses import replace

import stories
from content import items, mapping
from exchanges import PHRASES
from skills import NUMBER_WORDS, TABLES, Skills
from turns import Turn, article, capitalize, sentence


class TextSkills(Skills):
    """Skills whose user asks for a short text. Each public method returns turns of a chat, or a text for one."""

    def any_story(self) -> stories.Story:
        """Write a story about a random topic."""
        return stories.tell(self.rng, stories.random_topic(self.rng))

    def any_story_turn(self) -> Turn:
        """Return a turn with a story."""
        return Turn("Tell me a story.", self.any_story().text)

    def requested_story(self) -> Turn:
        """Request a story by its subject alone."""
        topic = stories.random_topic(self.rng)
        template = self.choice(["{}", "{}.", "About {}.", "about {}", "It should be about {}.", "{}, please."])
        return Turn(capitalize(template.format(topic.text)), stories.tell(self.rng, topic).text)

    def any_joke(self) -> Turn:
        """Return a turn with a joke."""
        question, answer = self.choice(list(mapping(TABLES["jokes"]).items()))
        return Turn("Tell me a joke.", f"{question} {answer}")

    def story(self) -> list[Turn]:
        """Request a story, sometimes with a question about it."""
        topic = stories.random_topic(self.rng)
        if self.chance(0.12):
            question = self._phrase("story")
        else:
            short = self.chance(0.15) and topic.can_be_tiny
            topic = replace(topic, tiny=short)
            question = self._story_request("short story about" if short else "story about", topic.text)
        result = stories.tell(self.rng, topic)
        turns = [Turn(question, result.text)]
        if self.chance(0.3):
            turns += self._about_story(result)
        if self.chance(0.12):
            turns.append(Turn(self._phrase("another story"), self.any_story().text))
        return turns

    def _story_request(self, section: str, topic: str) -> str:
        ask, short, kind = (self._phrase(f"story {part}") for part in ("ask", "short", "kind"))
        asks_back = ask.startswith(("Can", "Could", "Will", "Would", "Do ", "How"))
        end = "?" if asks_back else self.choice([".", ".", "", ", please.", "!"])
        kind_only = self.choice(["story", "story", "tale", "bedtime story"])
        return self._phrase(section).format(topic, ask=ask, short=short, kind=kind, kind_only=kind_only, end=end)

    def _about_story(self, story: stories.Story) -> list[Turn]:
        if f"{story.hero} named {story.hero_name}" not in story.text or story.friend_name not in story.text:
            return self._smalltalk("Thanks!")
        return self._templated(
            self._phrase("story questions"),
            name=story.hero_name,
            hero=story.hero,
            friend=story.friend_name,
            other=story.friend,
            a_hero=article(story.hero),
        )

    def joke(self) -> list[Turn]:
        """Request a joke."""
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
        """Request a riddle, and guess its answer."""
        question, answer = self.choice(list(mapping(TABLES["riddles"]).items()))
        answer = answer[0].lower() + answer[1:]
        solution = answer.rstrip(".")
        guess = self.choice([*PHRASES["riddle answers"], solution])
        praise = "Yes, that is right! " if guess == solution else ""
        return [Turn(self._phrase("riddle"), question), Turn(guess, f"{praise}The answer is {answer}")]

    def poem(self) -> list[Turn]:
        """Request a poem."""
        topic, lines = self.choice(list(mapping(TABLES["poems"]).items()))
        if topic not in ("rain", "love", "winter", "spring", "snow", "summer", "fall", "school", "home"):
            topic = f"the {topic}" if topic in ("moon", "sun", "sea", "night") else article(topic)
        question = self.choice(["Write a poem.", "Tell me a poem.", "Do you know any poems?"])
        question = question if self.chance(0.2) else self._phrase("poem").format(topic)
        return [Turn(question, lines.replace(" / ", "\n"))]

    def echo(self) -> list[Turn]:
        """Request exact words."""
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
