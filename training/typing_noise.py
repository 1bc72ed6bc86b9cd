"""Typing noise in user messages: synonyms, short forms, missing periods, typos and capital letters."""

import random
import re
from dataclasses import replace

from skills import MODEL_NAME
from turns import Turn

LONGEST_WITH_NOISE = 400
# The words of a pair may be swapped in both directions.
SAME = [
    ("I am", "I'm"),
    ("What is", "What's"),
    ("Who is", "Who's"),
    ("Where is", "Where's"),
    ("do not", "don't"),
    ("cannot", "can't"),
    ("can not", "can't"),
    ("My name is", "My name's"),
    ("You are", "You're"),
    ("you are", "you're"),
    ("It is", "It's"),
    ("it is", "it's"),
    ("color", "colour"),
    ("favorite", "favourite"),
    ("Tell me", "Can you tell me"),
    ("Can you", "Could you"),
    ("How do I", "How can I"),
    ("How do I", "How do you"),
    ("I have", "I've got"),
    ("I like", "I really like"),
    ("I love", "I really love"),
    ("mother", "mom"),
    ("father", "dad"),
    ("Tell me", "Please tell me"),
    ("called", "named"),
]
SHORT_FORMS = [("you", "u"), ("are", "r"), ("your", "ur"), ("please", "pls"), ("thanks", "thx"), ("want to", "wanna"),
               ("going to", "gonna"), ("because", "cuz"), ("what is", "whats"), ("don't know", "dunno")]  # fmt: skip
BEFORE = ["Hey, ", "So, ", "OK, ", "Um, ", f"{MODEL_NAME}, ", "Well, ", "Please, ", "Hi! ", "Okay, ", "And ", "But ",
          "Oh, ", "Hi, ", "Hello, ", "Now, ", "Just wondering, ", "Quick question: ", "I wonder, ", "By the way, ",
          "Alright, ", "Listen, ", "Hmm, ", f"Hey {MODEL_NAME}, ", "One more thing: ", "Next: "]  # fmt: skip
AFTER = ["!!", "??", "!!!", " ...", " please", ", please", " :)", " now", "?", "!", ".", " thanks", f", {MODEL_NAME}?",
         " pls", " lol", " :(", " btw", " haha", "?!", " ok?"]  # fmt: skip


def typed(rng: random.Random, turn: Turn) -> Turn:
    """Return the turn, in most cases with noise in its user message."""
    user = turn.user
    if turn.exact or len(user) > LONGEST_WITH_NOISE:
        return turn
    if rng.random() < 0.25:
        user = _other_words(rng, user)
    if rng.random() < 0.07:
        user = _lowered_after(rng.choice(BEFORE), user)
    if rng.random() < 0.19:
        user = user.lower()
        if rng.random() < 0.3:
            user = re.sub(r"\b(i|what|that|don|can|it|who|he|she|isn|you)'(m|s|t|re)\b", r"\1\2", user)
        if rng.random() < 0.2:
            for long, short in rng.sample(SHORT_FORMS, 5):
                user = re.sub(rf"\b{long}\b", short, user)
    if rng.random() < 0.2:
        user = user.rstrip("?.!") or user
    if rng.random() < 0.1:
        words = user.split(" ")
        places = [i for i, word in enumerate(words) if word.isascii() and word.islower() and word.isalpha()]
        places = [i for i in places if len(words[i]) > 2]
        for place in rng.sample(places, min(len(places), rng.choice([1, 1, 2, 3]))):
            words[place] = _misspell(rng, words[place])
        user = " ".join(words)
    if rng.random() < 0.04:
        user = user.upper()
    if rng.random() < 0.05:
        user += rng.choice(AFTER)
    return replace(turn, user=user)


def _other_words(rng: random.Random, user: str) -> str:
    """Replace a phrase by a synonym of SAME."""
    for one, other in rng.sample(SAME, len(SAME)):
        if rng.random() < 0.5:
            one, other = other, one
        if re.search(rf"\b{one}\b", user) and rng.random() < 0.7:
            return re.sub(rf"\b{one}\b", other, user, count=1)
    return user


def _lowered_after(before: str, user: str) -> str:
    first = user.split(" ")[0]
    keep = first in ("I", "I'm", "I've") or not first[1:].islower() and first != "A"
    return before + (user if keep or not before.endswith((", ", "d ", "t ")) else user[0].lower() + user[1:])


def _misspell(rng: random.Random, word: str) -> str:
    place = rng.randrange(1, len(word) - 1)
    before, letter, after = word[:place], word[place], word[place + 1 :]
    return rng.choice(
        [
            before + after,
            before + letter * 2 + after,
            before + after[0] + letter + after[1:],
            before + rng.choice("aeiorstn") + after,
            word[1] + word[0] + word[2:],
        ]
    )
