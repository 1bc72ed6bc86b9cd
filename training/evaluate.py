"""Evaluate the bundled model through the engine, as a user would run it.

    python training/evaluate.py                 all evaluations, on the default device
    python training/evaluate.py --only exchanges --device cpu --json OUT.json

Exchanges and limits have one right answer and use greedy sampling. Free prompts and edges use the sampling defaults of
the model.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import stories
import torch
from exchanges import KINDS, held_out_exchanges, is_right
from facts import CATEGORIES
from generator import EDGE_PROMPTS, FREE_PROMPTS, ChatGenerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from tridecode import Engine, SamplingParams  # noqa: E402
from tridecode.errors import PromptError  # noqa: E402

GOAL = 0.85
MOST_REPEATS = 4
NEARLY_EMPTY = [" ", ".", "?", "hm", "...", "ok", "x", "\n", "?!", "1"]


def evaluate_exchanges(engine: Engine, count: int, seed: int) -> dict:
    """Evaluate `count` held-out exchanges of each kind with greedy sampling."""
    table, misses = {}, []
    for kind in KINDS:
        right = 0
        for exchange in held_out_exchanges(kind, count, seed):
            params = SamplingParams(temperature=0.0, max_tokens=80, seed=1)
            reply = engine.generate(list(exchange.messages), params).text
            if is_right(exchange, reply):
                right += 1
            else:
                question = exchange.messages[-1]["content"]
                misses.append({"kind": kind, "asked": question, "answer": exchange.answer, "reply": reply})
        table[kind] = right / count
        print(f"{kind:>10}  {right:4} of {count}", flush=True)
    mean = sum(table.values()) / len(table)
    print(f"{'mean':>10}  {mean:.1%}  (goal {GOAL:.0%})")
    for miss in misses:
        print(f"  {miss['kind']}: {miss['asked']!r} -> {miss['reply']!r}, not {miss['answer']!r}")
    return {"right": table, "mean": mean, "misses": misses}


def limits(rng: random.Random, count: int) -> dict[str, list[tuple[str, int]]]:
    """Return questions of increasing difficulty by kind, each with its answer or the number of requested list items."""
    pairs = [(a, b) for a in range(11, 100) for b in range(10, a)]
    borrowing = [(a, b) for a, b in pairs if a % 10 < b % 10]
    plain = [(a, b) for a, b in pairs if a % 10 >= b % 10]
    small = [(a, b) for a in range(1, 11) for b in range(1, 11)]
    three = [[rng.randint(1, top) for _ in range(3)] for top in (9, 33) for _ in range(count)]
    lists = [(f"Name {n} {kind}.", n) for kind, known in CATEGORIES.items() for n in range(3, min(len(known), 10) + 1)]
    return {
        "a - b, up to 10": [(f"What is {a} - {b}?", a - b) for a, b in small if b <= a],
        "two digits less one": [(f"What is {a} - {b}?", a - b) for a in range(11, 100) for b in range(1, 10)],
        "two digits less two": [(f"What is {a} - {b}?", a - b) for a, b in plain],
        "the same, borrowing": [(f"What is {a} - {b}?", a - b) for a, b in borrowing],
        "100 - b": [(f"What is 100 - {b}?", 100 - b) for b in range(1, 100)],
        "a + b + c, one digit": [(f"What is {a} + {b} + {c}?", a + b + c) for a, b, c in three[:count]],
        "a + b + c, up to 33": [(f"What is {a} + {b} + {c}?", a + b + c) for a, b, c in three[count:]],
        "a times b, up to 12": [(f"What is {a} times {b}?", a * b) for a in range(1, 13) for b in range(1, 13)],
        "a times 13 to 99": [(f"What is {a} times {b}?", a * b) for a in range(2, 10) for b in range(13, 100)],
        "ab divided by b": [(f"What is {a * b} divided by {b}?", a) for a, b in small],
        "lists of 3 to 5": [(question, n) for question, n in lists if n <= 5],
        "lists of 6 to 10": [(question, n) for question, n in lists if n > 5],
    }


def evaluate_limits(engine: Engine, count: int, seed: int) -> dict:
    """Evaluate arithmetic and lists up to the point of failure.

    A list is right if it has the requested number of different items.
    """
    rng = random.Random(f"limits {seed}")
    table, params = {}, SamplingParams(temperature=0.0, max_tokens=80)
    for kind, questions in limits(rng, count).items():
        sampled = rng.sample(questions, min(count, len(questions)))
        right, misses = 0, []
        for question, answer in sampled:
            reply = engine.generate([{"role": "user", "content": question}], params).text
            if kind.startswith("lists"):
                items = re.split(r", and |, | and ", reply.split(": ")[-1].lower().rstrip("."))
                result = len(items) if len(set(items)) == len(items) else 0
            else:
                result = int(([-1] + re.findall(r"\d+", reply))[-1])
            right += result == answer
            misses += [] if result == answer else [f"{question!r} -> {reply[:200]!r}"]
        table[kind] = {"right": right, "of": len(sampled), "misses": misses}
        print(f"{kind:>20}  {right:4} of {len(sampled)}", *misses[:2], sep="\n  ", flush=True)
    return table


def evaluate_free_prompts(engine: Engine) -> list[dict]:
    """Run the prompts that have many good answers, for a reader to judge."""
    answers = []
    for seed, prompt in enumerate(FREE_PROMPTS):
        params = engine.default_params(seed=seed, max_tokens=500)
        result = engine.generate([{"role": "user", "content": prompt}], params)
        answers.append({"prompt": prompt, "reply": result.text, "finish_reason": result.finish_reason})
        print(f"> {prompt}\n{result.text}\n", flush=True)
    return answers


def most_repeated(text: str, size: int = 4) -> int:
    """Return the number of occurrences of the most frequent run of `size` words."""
    words = text.lower().split()
    return max(Counter(zip(*(words[i:] for i in range(size)))).values(), default=0)


def edge_chats(seed: int) -> list[tuple[str, list[str]]]:
    """Return edge cases as (kind, user messages): unusual input, long chats and long stories."""
    rng, generator = random.Random(seed), ChatGenerator(10**9 + 2)
    chats = [(kind, [text]) for kind, texts in EDGE_PROMPTS.items() for text in texts]
    chats += [("nearly empty", [text]) for text in NEARLY_EMPTY]
    skills = [generator.question, generator.chatter, generator.sums] * 80
    questions = [turn.user for skill in skills for turn in skill()]
    chats += [("20 turns", rng.sample(questions, 20)) for _ in range(2)]
    chats += [("long story", [f"Tell me a long story about {stories.random_topic(rng).text}."]) for _ in range(50)]
    return chats


def evaluate_edges(engine: Engine, seed: int) -> dict:
    """Check that the replies to edge cases end and do not loop."""
    failures, counts = [], Counter()
    for number, (kind, turns) in enumerate(edge_chats(seed)):
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            result = engine.generate(messages, engine.default_params(seed=number, max_tokens=700))
            messages.append({"role": "assistant", "content": result.text})
            counts[kind] += 1
            if result.finish_reason != "stop" or most_repeated(result.text) > MOST_REPEATS:
                failures.append({"kind": kind, "asked": turn, "reply": result.text, "end": result.finish_reason})
    too_long = "Please read this. " * engine.capacity
    try:
        engine.generate([{"role": "user", "content": too_long}])
        refused = ""
    except PromptError as error:
        refused = str(error)
    for kind, count in counts.items():
        print(f"{kind:>16}: {count - sum(f['kind'] == kind for f in failures)} of {count} replies end without a loop")
    print(f"{'too long':>16}: {refused or 'was answered'}")
    for failure in failures:
        print(f"  {failure['kind']}: {failure['asked']!r} -> {failure['reply'][:200]!r} ({failure['end']})")
    return {"replies": dict(counts), "failures": failures, "too_long": refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of another checkpoint")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=100, help="number of exchanges and questions of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["exchanges", "limits", "free", "edges"])
    parser.add_argument("--json", type=Path, help="file that receives all results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # The model is too small for more threads, which would wait for each other on busy cores.
    engine = Engine.load(options.model, device=options.device)
    started, report = time.monotonic(), {}
    if options.only in (None, "exchanges"):
        report["exchanges"] = evaluate_exchanges(engine, options.count, options.seed)
    if options.only in (None, "limits"):
        report["limits"] = evaluate_limits(engine, options.count, options.seed)
    if options.only in (None, "free"):
        report["free_prompts"] = evaluate_free_prompts(engine)
    if options.only in (None, "edges"):
        report["edges"] = evaluate_edges(engine, options.seed)
    print(f"{time.monotonic() - started:.0f} s on {engine.device}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
