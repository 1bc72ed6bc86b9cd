"""Asks the bundled model the sixty chats of content/sixty_chats.txt and writes results/sixty_chats.md.

    python training/sixty_chats.py              on the CPU, greedily, each turn after the model's own answers before it
    python training/sixty_chats.py --check      writes nothing; the exit code is 1 where an answer is another one

A verdict in the file stays where the chat and its answers are what was judged; any other chat is marked as not judged.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from content import sections

sys.path.insert(0, str(Path(__file__).parents[1]))
from tridecode import Engine, SamplingParams  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sixty_chats.md"
NOT_JUDGED = "not judged."
HEAD = """\
# Sixty chats, judged strictly

The chats of `content/sixty_chats.txt`, as a stranger might type them, and the bundled model's answers as
`python training/sixty_chats.py` got them: greedily, on the CPU, as with `python cli.py generate --temperature 0`. The
list was written before the model was asked, and nothing was taken out of it or put in another way afterwards. One
reader judged. A chat counts if every answer in it is right, does all that was asked, with every name, number and
condition in the question, and makes sense; "I don't know" counts only where nobody could know.

"""


def ask(engine: Engine, turns: list[str]) -> list[str]:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        result = engine.generate(messages, SamplingParams(temperature=0.0, max_tokens=500))
        messages.append({"role": "assistant", "content": result.text})
    return [message["content"] for message in messages[1::2]]


def quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def parts(text: str) -> list[tuple[str, str]]:
    """(chat, verdict) of every section."""
    found = [section.partition("Verdict: ") for section in re.split(r"(?m)^(?=## )", text)[1:]]
    return [(chat, verdict.strip()) for chat, _, verdict in found]


def summary(judged: list[tuple[str, str]]) -> str:
    """Counts by kind, in Markdown."""
    kinds = [chat.split(": ")[1].splitlines()[0] for chat, _ in judged]
    asked, right = Counter(kinds), Counter(kind for kind, (_, verdict) in zip(kinds, judged) if verdict[:3] == "yes")
    rows = [f"| {kind} | {right[kind]} of {asked[kind]} |" for kind in asked]
    return "\n".join(["| kind | right |", "| --- | --- |", *rows, f"| all | **{right.total()} of {asked.total()}** |"])


def main(check: bool) -> int:
    torch.set_num_threads(1)  # the model is too small to gain from more, and they stall where cores are busy
    engine = Engine.load(device="cpu")
    before = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else ""
    verdicts, judged = dict(parts(before)), []
    for kind, chats in sections("sixty_chats.txt").items():
        for chat in chats:
            turns = chat.split(" => ")
            said = "\n\n".join(f"{turn}\n\n{quoted(reply)}" for turn, reply in zip(turns, ask(engine, turns)))
            section = f"## {len(judged) + 1}: {kind}\n\n{said}\n\n"
            judged.append((section, verdicts.get(section, NOT_JUDGED)))
    text = HEAD + summary(judged) + "\n\n" + "\n".join(f"{chat}Verdict: {verdict}\n" for chat, verdict in judged)
    if not check:
        RESULTS.write_text(text, encoding="utf-8")
        return 0
    changed = [chat.splitlines()[0] for chat, verdict in judged if verdict == NOT_JUDGED]
    print("\n".join(changed) or "the answers are those that were judged")
    return int(text != before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    sys.exit(main(parser.parse_args().check))
