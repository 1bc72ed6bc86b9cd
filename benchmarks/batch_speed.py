"""What `generate --jsonl` takes beside its passes: wall time over the passes that it ran, each counted with its median.

    python -m benchmarks.batch_speed                       # the bundled model
    python -m benchmarks.batch_speed --preset qwen3-4b     # a checkpoint of that shape, with random weights
    python -m benchmarks.batch_speed --come-and-go         # instead: --graph-stats of 1 to 20 requests at a time

The lines hold token ids and every answer has its full length. One process loads the model, answers a file that does
not count, then the one that does; afterwards each size of pass that it ran is timed alone by CUDA events. The last line
is one JSON object. With --preset it needs transformers, which writes the checkpoint (8 GB for qwen3-4b) into a
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
from itertools import accumulate
from pathlib import Path

import torch

from benchmarks.checkpoint import PRESETS, write_checkpoint
from tridecode import Engine, SamplingParams
from tridecode.cli.bench.measure import GREEDY, check_running
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.cli.generate.batch import batch
from tridecode.cli.graph_stats import show_graph_stats
from tridecode.cli.loading import load_engine
from tridecode.cli.parser import make_parser
from tridecode.cli.terminal import Output
from tridecode.layout import LIMIT_REACHED, STATUS, Chunk
from tridecode.step.prompt import write_chunks

STEPS, RUNS, WARM_UP = 32, 7, 2  # passes in a row, and how often, to time a size


def options(args, file: str, output: str):
    """Of the run that counts, as the command line reads them."""
    found = ["generate", "--jsonl", file, "--output", output, "--slots", str(args.slots), "--ignore-eos"]
    found += ["--temperature", "0", "--no-reuse-prefix", "--max-seq-len", str(args.prompt_tokens + args.tokens)]
    found += ["--speculate", "off"]  # a token a pass, whose sizes are timed
    return make_parser().parse_args([*found, *(["--model", args.model] if args.model else [])])


def write_lines(path: Path, args, tokens: int, vocabulary: int, seed: int) -> None:
    """Prompts of random ids, to be answered with `tokens` tokens each."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(args.requests):
            ids = [draw.randrange(vocabulary) for _ in range(args.prompt_tokens)]
            file.write(json.dumps({"prompt_ids": ids, "max_tokens": tokens}) + "\n")


def counts(engine: Engine) -> Counter:
    """Passes so far, by mode, kind, rows and padded rows; of those that read prompts the rows are their tokens."""
    passes = Counter()
    for row in engine.graph_stats():
        passes[row.mode, row.kind, row.rows, row.padded] += row.count
    return passes


def seconds(engine: Engine, work) -> float:
    """On a GPU by CUDA events."""
    if engine.device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_pass(engine: Engine, rows: int, position: int, steps: int) -> float:
    """Median seconds of a greedy pass of `rows` rows, over `steps` positions from `position`."""

    def work() -> None:
        for _ in range(steps):
            enqueue(engine, GREEDY, rows)

    times = []
    for _ in range(WARM_UP + RUNS):
        rewind(engine, [position] * rows, GREEDY, rows)
        times.append(seconds(engine, work) / steps)
        check_running(engine, f"{rows} rows", rows)
    return statistics.median(times[WARM_UP:])


def time_prompt(engine: Engine, tokens: int, longest: int, position: int, mixed: bool) -> float:
    """Median seconds of a pass that reads `tokens` tokens of prompts of up to `longest`; mixed: beside decoding rows in
    all other slots, and with their tokens drawn."""
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

    times = []
    for _ in range(WARM_UP + RUNS):
        rewind(engine, [position] * slots, GREEDY, slots)  # so that all slots have pages
        engine.model.workspace.meta[rows:, STATUS] = LIMIT_REACHED
        write_chunks(engine.model, chunks)
        times.append(seconds(engine, work))
    return statistics.median(times[WARM_UP:])


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
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    drawn = sum(len(answer["token_ids"]) for answer in found)
    if drawn != args.requests * args.tokens:
        raise SystemExit(f"{drawn} tokens came, {args.requests * args.tokens} were asked for")
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
        "tokens_per_second": round(drawn / wall),
    }


def come_and_go(args) -> None:
    """From one request at a time to 20 and back, of 8 to 64 tokens, every tenth sampled."""
    engine, draw = Engine.load(args.model, slots=20, max_seq_len=256, speculate="off"), random.Random(0)
    under_way, begun = [], 0
    for wanted in [*range(1, 21), *range(19, -1, -1)]:
        for _ in range(5):  # of them end, and others take their places
            while len(under_way) < wanted:
                ids = [draw.randrange(engine.config.vocab_size) for _ in range(draw.randint(4, 100))]
                lengths = dict(max_tokens=draw.randint(8, 64), ignore_eos=True)
                params = SamplingParams(temperature=0.8 * (begun % 10 == 9), seed=begun, **lengths)
                under_way.append(engine.submit(ids, params))
                begun += 1
            if under_way:
                engine.wait(under_way)
            under_way = [request for request in under_way if request.finish_reason is None]
    show_graph_stats(engine, Output())


@contextmanager
def checkpoint(preset: str | None):
    """A directory to work in, and that of the model; None is the bundled one."""
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
