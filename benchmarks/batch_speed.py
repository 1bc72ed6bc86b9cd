"""Overhead of `generate --jsonl`: its wall time divided by the sum of the median times of its passes.

    python -m benchmarks.batch_speed                       # the bundled model
    python -m benchmarks.batch_speed --preset qwen3-4b     # a checkpoint of that shape, with random weights
    python -m benchmarks.batch_speed --come-and-go         # instead: --graph-stats of 1 to 20 requests at a time

The lines contain token ids, and every answer has its full length. One process loads the model, answers a file that is
not counted, and then the file that is counted. Afterwards it times each size of pass by CUDA events. The last line is
one JSON object. With --preset the script needs transformers, which writes the checkpoint (8 GB for qwen3-4b) into a
temporary directory; nothing is downloaded.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from benchmarks.checkpoint import PRESETS, write_checkpoint
from tridecode import Engine, SamplingParams
from tridecode.cli.bench.measure import GREEDY, check_running
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.cli.bench.timing import time_runs
from tridecode.cli.generate.batch import batch
from tridecode.cli.graph_stats import show_graph_stats
from tridecode.cli.loading import load_engine
from tridecode.cli.parser import make_parser
from tridecode.cli.terminal import Output
from tridecode.layout import LIMIT_REACHED, STATUS, Chunk
from tridecode.step.prompt import write_chunks

STEPS, RUNS = 32, 7  # Number of passes of a run, and of runs for each size.


def options(args, file: str, output: str):
    """Return the parsed options of `generate` for the measured run."""
    words = ["generate", "--jsonl", file, "--output", output, "--slots", str(args.slots), "--ignore-eos"]
    words += ["--temperature", "0", "--no-reuse-prefix", "--max-seq-len", str(args.prompt_tokens + args.tokens)]
    words += ["--speculate", "off"]  # Each pass samples one token per request.
    return make_parser().parse_args([*words, *(["--model", args.model] if args.model else [])])


def write_lines(path: Path, args, tokens: int, vocabulary: int, seed: int) -> None:
    """Write prompts of random ids whose answers have `tokens` tokens each."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(args.requests):
            ids = [draw.randrange(vocabulary) for _ in range(args.prompt_tokens)]
            file.write(json.dumps({"prompt_ids": ids, "max_tokens": tokens}) + "\n")


def counts(engine: Engine) -> Counter:
    """Return the passes so far, by mode, kind, rows and padded rows. The rows of a prompt pass are its tokens."""
    passes = Counter()
    for row in engine.graph_stats():
        passes[row.mode, row.kind, row.rows, row.padded] += row.count
    return passes


def time_pass(engine: Engine, rows: int, position: int, steps: int) -> float:
    """Return the median seconds of a greedy pass of `rows` rows, over `steps` positions from `position`."""
    times = time_runs(
        partial(enqueue, engine, GREEDY, rows), RUNS, partial(rewind, engine, [position] * rows, GREEDY, rows), steps
    )
    check_running(engine, f"{rows} rows", rows)
    return statistics.median(times)


def time_prompt(engine: Engine, tokens: int, longest: int, position: int, mixed: bool) -> float:
    """Return the median seconds of a pass that reads prompts.

    Args:
        engine: the engine to time
        tokens: number of prompt tokens in the pass
        longest: largest number of tokens of one prompt
        position: position of the decoding rows
        mixed: whether the pass also decodes rows of all other slots and samples their tokens
    """
    slots, prompts = engine.slots, engine.prompts
    counts = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    rows = max(slots - len(counts), 1) if mixed else 0
    decoding = prompts.decoding(rows)
    firsts = accumulate(counts, initial=decoding)
    chunks = [Chunk(slots - 1 - i, first, count, 0) for i, (first, count) in enumerate(zip(firsts, counts))]

    def work() -> None:
        prompts.read(chunks, tokens, decoding)
        if mixed:
            prompts.finish("greedy", rows)

    def prepare() -> None:
        rewind(engine, [position] * slots, GREEDY, slots)  # This gives pages to all slots.
        engine.model.workspace.meta[rows:, STATUS] = LIMIT_REACHED
        write_chunks(engine.model, chunks)

    return statistics.median(time_runs(work, RUNS, prepare))


def measure(args, folder: Path) -> dict:
    output = Output()
    file, answers = folder / "lines.jsonl", folder / "answers.jsonl"
    run = options(args, str(file), str(answers))
    engine, params = load_engine(run, output)
    for seed, tokens in ((0, 8), (1, args.tokens)):
        write_lines(file, args, tokens, engine.config.vocab_size, seed)
        answers.unlink(missing_ok=True)
        before, started = counts(engine), time.perf_counter()
        batch(run, output, lambda *_: (engine, params))
        wall, passes = time.perf_counter() - started, counts(engine) - before
    results = [json.loads(line) for line in answers.read_text().splitlines()]
    sampled = sum(len(answer["token_ids"]) for answer in results)
    if sampled != args.requests * args.tokens:
        raise SystemExit(f"the answers have {sampled} tokens; expected {args.requests * args.tokens}")
    table, steps = [], min(STEPS, args.tokens // 2)
    middle = args.prompt_tokens + (args.tokens - steps) // 2
    for (mode, kind, rows, padded), count in sorted(passes.items(), key=lambda item: item[0][2]):
        if kind in ("prompt", "mixed"):
            us = 1e6 * time_prompt(engine, rows, args.prompt_tokens, middle, kind == "mixed")
        else:
            us = 1e6 * time_pass(engine, rows, middle, steps)
        table.append({"mode": mode, "kind": kind, "rows": rows, "padded": padded, "count": count, "us": round(us, 1)})
    total = sum(row["count"] * row["us"] for row in table) / 1e6
    return {
        "model": args.preset or "bundled",
        "gpu": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None,
        "requests": args.requests,
        "slots": args.slots,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "passes": table,
        "wall_s": round(wall, 3),
        "passes_s": round(total, 3),
        "ratio": round(wall / total, 3),
        "tokens_per_second": round(sampled / wall),
    }


def come_and_go(args) -> None:
    """Run 1 to 20 concurrent requests, then fewer until 0, of 8 to 64 tokens. Every tenth has a temperature above 0."""
    engine, draw = Engine.load(args.model, slots=20, max_seq_len=256, speculate="off"), random.Random(0)
    under_way, submitted = [], 0
    for number in [*range(1, 21), *range(19, -1, -1)]:
        for _ in range(5):  # Five times, wait for a request to end and replace it.
            while len(under_way) < number:
                ids = [draw.randrange(engine.config.vocab_size) for _ in range(draw.randint(4, 100))]
                lengths = dict(max_tokens=draw.randint(8, 64), ignore_eos=True)
                params = SamplingParams(temperature=0.8 * (submitted % 10 == 9), seed=submitted, **lengths)
                under_way.append(engine.submit(ids, params))
                submitted += 1
            if under_way:
                engine.wait(under_way)
            under_way = [request for request in under_way if request.finish_reason is None]
    show_graph_stats(engine, Output())


@contextmanager
def checkpoint(preset: str | None):
    """Yield a working directory and the directory of the model, which is None for the bundled model."""
    with tempfile.TemporaryDirectory() as folder:
        if preset:
            write_checkpoint(f"{folder}/{preset}", preset)
        yield Path(folder), f"{folder}/{preset}" if preset else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--come-and-go", action="store_true")
    args = parser.parse_args()
    with checkpoint(args.preset) as (folder, args.model):
        if args.come_and_go:
            come_and_go(args)
        else:
            print(json.dumps(measure(args, folder)))


if __name__ == "__main__":
    main()
