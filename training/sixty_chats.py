"""Run the sixty chats of content/sixty_chats.txt with the bundled model and write results/sixty_chats.md.

    python training/sixty_chats.py              on the CPU, with greedy sampling
    python training/sixty_chats.py --check      write nothing; the exit code is 1 if an answer has changed

Each turn follows the model's own answers to the earlier turns. The file keeps the verdict of a chat whose answers have
not changed, and marks every other chat as not judged.
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
<!-- plain-english: skip, a transcript of model output -->

# Sixty chats, judged strictly

The chats of `content/sixty_chats.txt`, as a new user might type them, with the answers of the bundled model.
`python training/sixty_chats.py` recorded them with greedy sampling on the CPU, as `python cli.py generate --temperature
0` does. The list was written before the model was tested, and was not changed afterwards. One reader judged the
answers. A chat counts if every answer in it is correct, follows every name, number and condition of the question, and
makes sense. "I don't know" counts only if nobody could know the answer.

"""


def ask(engine: Engine, turns: list[str]) -> list[str]:
    """Return the answers to the turns of one chat."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        result = engine.generate(messages, SamplingParams(temperature=0.0, max_tokens=500))
        messages.append({"role": "assistant", "content": result.text})
    return [message["content"] for message in messages[1::2]]


def quoted(text: str) -> str:
    """Return a text as a Markdown quote."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def parts(text: str) -> list[tuple[str, str]]:
    """Return (chat, verdict) of every section."""
    pairs = [section.partition("Verdict: ") for section in re.split(r"(?m)^(?=## )", text)[1:]]
    return [(chat, verdict.strip()) for chat, _, verdict in pairs]


def summary(judged: list[tuple[str, str]]) -> str:
    """Return the counts by kind as a Markdown table."""
    kinds = [chat.split(": ")[1].splitlines()[0] for chat, _ in judged]
    total, right = Counter(kinds), Counter(kind for kind, (_, verdict) in zip(kinds, judged) if verdict[:3] == "yes")
    rows = [f"| {kind} | {right[kind]} of {total[kind]} |" for kind in total]
    return "\n".join(["| kind | right |", "| --- | --- |", *rows, f"| all | **{right.total()} of {total.total()}** |"])


def main(check: bool) -> int:
    """Run all chats, and write or check the file."""
    torch.set_num_threads(1)  # The model is too small for more threads, which would wait for each other on busy cores.
    engine = Engine.load(device="cpu")
    before = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else ""
    verdicts, judged = dict(parts(before)), []
    for kind, chats in sections("sixty_chats.txt").items():
        for chat in chats:
            turns = chat.split(" => ")
            exchanges = "\n\n".join(f"{turn}\n\n{quoted(reply)}" for turn, reply in zip(turns, ask(engine, turns)))
            section = f"## {len(judged) + 1}: {kind}\n\n{exchanges}\n\n"
            judged.append((section, verdicts.get(section, NOT_JUDGED)))
    text = HEAD + summary(judged) + "\n\n" + "\n".join(f"{chat}Verdict: {verdict}\n" for chat, verdict in judged)
    if not check:
        RESULTS.write_text(text, encoding="utf-8")
        return 0
    changed = [chat.splitlines()[0] for chat, verdict in judged if verdict == NOT_JUDGED]
    print("\n".join(changed) or "all answers equal the judged ones")
    return int(text != before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    sys.exit(main(parser.parse_args().check))
