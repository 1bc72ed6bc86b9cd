"""The gain from shared prefixes and the cost of the batch-invariant mode. Each command prints lines of JSON.

    python -m benchmarks.sharing conversations                   # any machine: prompt tokens that are not reused
    python -m benchmarks.sharing prefix --preset qwen3-4b        # GPU only
    python -m benchmarks.sharing invariant --preset qwen3-4b     # GPU only

conversations: five conversations take turns, and a request for a title follows each turn. The pool holds little more
than the five conversations.

prefix: 16 requests with a common prefix of 4,000 tokens and 64 tokens of their own. Their time is compared with the
time of the prefix plus the time of 16 requests whose prefix is cached.

invariant: a decode pass of 1, 8 and 64 rows, and the first token of prompts, alternately in both modes.

Prompts are random ids, and the models of presets have random weights.
"""

import argparse
import json
import random
import statistics
import time

from tridecode import Engine, SamplingParams
from tridecode.cli.bench.measure import GREEDY, preset_engine, read_bandwidth, run_facts, time_decode

RUNS, STEPS = 7, 64


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


class Ids:
    """Generator of random token ids; no two texts are equal."""

    def __init__(self, vocabulary: int):
        self._draw, self._vocabulary = random.Random(0), vocabulary

    def __call__(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocabulary) for _ in range(count)]


# ---- conversations

CONVERSATIONS, TURNS, OPENING, QUESTION, ANSWER = 5, 8, 300, 60, 60
TASK, EXCERPT, TITLE = (
    100,
    200,
    10,
)  # Tokens of a request for a title: common instructions, an excerpt of the conversation, and the answer.


def conversations(args) -> None:
    for sharing in (False, True):
        if args.preset:
            engine = preset_engine(args.preset, 2048, slots=4, kv_tokens=args.kv_tokens, prefix_sharing=sharing)
        else:
            options = dict(kv_tokens=args.kv_tokens, prefix_sharing=sharing, speculate="off")
            engine = Engine.load(max_seq_len=2048, slots=4, **options)
        with engine:
            print(json.dumps({"bench": "conversations", "sharing": sharing} | talk(engine)), flush=True)


def talk(engine: Engine) -> dict:
    """Return the number of prompt tokens and the number of computed ones, for turns and for titles."""
    ids, count = Ids(engine.config.vocab_size), {"turns": [0, 0], "titles": [0, 0]}
    task, texts = ids(TASK), [ids(OPENING) for _ in range(CONVERSATIONS)]

    def ask(kind: str, prompt: list[int], tokens: int) -> tuple[int, ...]:
        result = engine.generate(prompt, greedy(tokens))
        count[kind][0] += result.usage.prompt_tokens
        count[kind][1] += result.usage.prompt_tokens - result.usage.reused_tokens
        return result.token_ids

    for _ in range(TURNS):
        for text in texts:
            text += ids(QUESTION)
            text += ask("turns", text, ANSWER)
            ask("titles", task + text[-EXCERPT:], TITLE)
    return {f"{kind}_{name}": n for kind, both in count.items() for name, n in zip(("tokens", "computed"), both)}


# ---- a common prefix

PREFIX, OWN, REQUESTS = 4000, 64, 16


def prefix(args) -> None:
    engine = preset_engine(args.preset, 4352, slots=REQUESTS)
    ids, times = Ids(engine.config.vocab_size), {"all": [], "prefix": [], "tails": [], "hit": []}

    def wall(name: str, prompts: list[list[int]]) -> None:
        started = time.perf_counter()
        results = engine.generate_many(prompts, greedy(1))
        times[name].append(time.perf_counter() - started)
        assert all(result.finish_reason == "length" for result in results), results

    for _ in range(RUNS + 2):
        common = ids(PREFIX)
        wall("all", [common + ids(OWN) for _ in range(REQUESTS)])
        common = ids(PREFIX)
        wall("prefix", [common])
        wall("tails", [common + ids(OWN) for _ in range(REQUESTS)])
        result = engine.generate(common + ids(OWN), greedy(1))
        assert result.usage.reused_tokens >= PREFIX // 64 * 64, result.usage
        times["hit"].append(result.timings.ttft)
    median = {name: statistics.median(values[2:]) for name, values in times.items()}
    row = {f"{name}_ms": round(1e3 * seconds, 2) for name, seconds in median.items()}
    row["ratio"] = round(median["all"] / (median["prefix"] + median["tails"]), 3)  # The goal is at most 1.15.
    print(json.dumps({"bench": "prefix", "preset": args.preset} | row | run_facts(engine.device)))


# ---- the batch-invariant mode


def invariant(args) -> None:
    engines = {
        name: preset_engine(args.preset, 2560, slots=64, kv_tokens=2**16, batch_invariant=name == "invariant")
        for name in ("default", "invariant")
    }
    device = engines["default"].device
    facts = {"bench": "invariant", "preset": args.preset} | run_facts(device)
    facts["read_gb_s"] = round(read_bandwidth(device) / 1e9)
    for rows in (1, 8, 64):
        times = {name: [] for name in engines}
        for _ in range(3):  # The modes alternate, so that other load on the machine affects both.
            for name, engine in engines.items():
                times[name] += time_decode(engine, args.context, STEPS, RUNS, GREEDY, rows)
        compare(facts | {"rows": rows, "context": args.context}, times, 1e6, "us")
    ids = Ids(engines["default"].config.vocab_size)
    for tokens in (64, 512, 2048):
        times = {name: [] for name in engines}
        for _ in range(RUNS + 2):
            prompt = ids(tokens)
            for name, engine in engines.items():
                times[name].append(engine.generate(prompt, greedy(1), reuse_prefix=False).timings.ttft)
        compare(facts | {"prompt": tokens}, {name: values[2:] for name, values in times.items()}, 1e3, "ms")


def compare(facts: dict, times: dict[str, list[float]], scale: float, unit: str) -> None:
    median = {name: scale * statistics.median(values) for name, values in times.items()}
    row = {f"{name}_{unit}": round(value, 2) for name, value in median.items()}
    print(json.dumps(facts | row | {"ratio": round(median["invariant"] / median["default"], 3)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(required=True)
    for name, function in (("conversations", conversations), ("prefix", prefix), ("invariant", invariant)):
        kind = kinds.add_parser(name)
        kind.set_defaults(function=function)
        kind.add_argument("--preset", default=None if name == "conversations" else "qwen3-4b")
    kinds.choices["conversations"].add_argument("--kv-tokens", type=int, default=8192)
    kinds.choices["invariant"].add_argument("--context", type=int, default=64)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
