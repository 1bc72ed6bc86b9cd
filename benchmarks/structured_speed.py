"""The cost of structured output in a batch: time between tokens of requests with a schema and of the other requests.

    python -m benchmarks.structured_speed --preset qwen3-4b     # GPU only: random weights, the bundled tokenizer
    python -m benchmarks.structured_speed                       # the bundled model, on any machine

A batch of --rows requests decodes --tokens tokens each. Runs without a schema and runs in which half of the requests
have one alternate, --runs times. The script prints the medians of the time between two tokens, in microseconds, and the
ratios; the last line is one JSON object. `beside` are the requests without a schema in a mixed batch, and `held` the
requests with a schema. `late` counts passes that a row skipped because its mask was not ready.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.hub import BUNDLED
from tridecode.layout import LATE_TOKEN
from tridecode.text.grammar import Grammars
from tridecode.text.tokenizer import Tokenizer

WORDS = {"type": "array", "items": {"type": "string", "minLength": 5, "maxLength": 30}, "minItems": 10_000}
PEOPLE = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "mail": {"type": "string", "pattern": "^[a-z]{2,12}@[a-z]{2,12}\\.(org|net)$"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "mail", "tags"],
        "additionalProperties": False,
    },
}
SCHEMAS = {"words": WORDS, "people": PEOPLE}


def make_engine(args) -> Engine:
    if args.preset is None:
        return Engine.load(slots=args.rows, speculate="off")
    from tridecode.cli.bench.measure import bench_engine

    model = SimpleNamespace(model=None, preset=args.preset)
    engine = bench_engine(model, args.tokens + 256, args.rows)
    tokenizer = Tokenizer.load(BUNDLED)
    engine._grammars = Grammars(tokenizer, engine.config.vocab_size, (tokenizer.eos_id,))
    return engine


def run(engine: Engine, params: list[SamplingParams]) -> tuple[list[list[float]], int]:
    """Return the seconds between tokens of each request, and the number of skipped rows."""
    prompt = [5 + i % 1000 for i in range(64)]
    late, entry = 0, engine.scheduler._ring.entry

    def counted(*args):
        nonlocal late
        result = entry(*args)
        late += result.token == LATE_TOKEN
        return result

    engine.scheduler._ring.entry = counted
    requests = [engine.submit(prompt, own, reuse_prefix=False) for own in params]
    times: list[list[float]] = [[] for _ in params]
    while engine.step():
        now = time.perf_counter()
        for request, arrivals in zip(requests, times):
            arrivals += [now] * (request.completion_tokens - len(arrivals))
    del engine.scheduler._ring.entry
    for request in requests:
        assert request.result().error is None, request.result().error
    return [[b - a for a, b in zip(arrivals, arrivals[1:])] for arrivals in times], late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help="a model's shape, like qwen3-4b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--schema", choices=SCHEMAS, default="people")
    args = parser.parse_args()
    engine = make_engine(args)
    common = {"temperature": args.temperature, "max_tokens": args.tokens}
    plain = [SamplingParams(**common, seed=i, ignore_eos=True) for i in range(args.rows)]
    held = [SamplingParams(**common, seed=i, json_schema=SCHEMAS[args.schema]) for i in range(args.rows // 2)]
    mixed = held + plain[len(held) :]
    run(engine, mixed)
    without, beside, within, late = [], [], [], 0
    for _ in range(args.runs):
        times, _ = run(engine, plain)
        without.append(mean(times))
        times, count = run(engine, mixed)
        beside.append(mean(times[len(held) :]))
        within.append(mean(times[: len(held)]))
        late += count
    us = {name: round(1e6 * statistics.median(times), 1)
             for name, times in (("without", without), ("beside", beside), ("held", within))}  # fmt: skip
    ratios = {f"{name}_ratio": round(us[name] / us["without"], 3) for name in ("beside", "held")}
    print(f"µs between tokens: {us['without']:,.1f} in a batch without schemas; in a mixed batch {us['beside']:,.1f} "
          f"without a schema ({ratios['beside_ratio']:.3f}) and {us['held']:,.1f} with one "
          f"({ratios['held_ratio']:.3f}); {late} rows late")  # fmt: skip
    print(json.dumps({"bench": "structured", "preset": args.preset, "rows": args.rows, "tokens": args.tokens,
                      "schema": args.schema, "late": late} | us | ratios))  # fmt: skip


def mean(times: list[list[float]]) -> float:
    """Return the mean over the tokens of all requests. A request that skips passes has fewer tokens."""
    return statistics.fmean(gap for gaps in times for gap in gaps)


if __name__ == "__main__":
    main()
