"""Potential gain of a draft model. One graph contains K passes of a small model and a verifying pass of a large model.

    python -m benchmarks.draft_model --large qwen3-4b --small qwen3-0.6b

Both models have random weights and run on one GPU. The large model's pass has a row for its own token and a row for
each of the K draft tokens; all rows are active. The acceptance rate is assumed, not measured. `break_even` is the
acceptance probability of each draft at which a cycle samples as many tokens per second as the large model's own passes;
it is null if even the acceptance of all drafts is not enough. `speed_up` is the speed-up at some probabilities. The
cycle omits two parts of a real implementation, so that the figures are optimistic: the copy of the draft tokens to the
large model, and the small model's pass over the last token. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

from tridecode import layout
from tridecode.cli.bench.measure import GREEDY, check_running, preset_engine, run_facts
from tridecode.cli.bench.passes import rewind
from tridecode.cli.bench.timing import captured, time_runs
from tridecode.engine import Engine
from tridecode.models.presets import PRESETS
from tridecode.step import decode
from tridecode.step.compiling import compile_lists
from tridecode.step.graphs import launcher
from tridecode.step.run import Run, run_reference

DRAFTS = (1, 3, 7)
SHARES = (0.5, 0.7, 0.8, 0.9, 1.0)
CONTEXT, STEPS, RUNS = 1024, 32, 5

Lines = Callable[[Run], None]


def cycle(large: Engine, small: Engine, drafts: int, run: Run) -> None:
    """Run `drafts` passes of the small model, then a pass of the large model with `drafts + 1` rows."""
    for _ in range(drafts):
        decode.decode_pass(run, small.model, "greedy")
    decode.decode_pass(run, large.model.for_queries(1, drafts + 1), "greedy")


def measure(large: Engine, small: Engine, context: int = CONTEXT, steps: int = STEPS, runs: int = RUNS) -> list[dict]:
    """Return a row for each number of drafts in DRAFTS.

    Args:
        large: engine of the large model, with drafts on; both engines have one slot, no captured graphs, and K/V for
            `room(context, steps)` positions
        small: engine of the small model
        context: tokens before the first pass
        steps: cycles in a run
        runs: number of timed runs
    """
    plain = replace(large.model, verify=None)
    single: dict[str, Lines] = {
        "large": lambda run: decode.decode_pass(run, plain, "greedy"),
        "small": lambda run: decode.decode_pass(run, small.model, "greedy"),
    }
    views = {k: large.model.for_queries(1, k + 1) for k in DRAFTS}
    verifying = {k: partial(decode.decode_pass, m=view, kind="greedy") for k, view in views.items()}
    cycles = {k: partial(cycle, large, small, k) for k in DRAFTS}
    lists = {**single, **{("pass", k): lines for k, lines in verifying.items()}, **cycles}
    run: Run = run_reference
    if large.device.type == "cuda":
        run = launcher(large.model)
        compile_lists(lists.values(), run, large.device)
    replays = {name: captured(large.device, partial(lines, run)) for name, lines in lists.items()}

    def us(name, drafts: int = 0) -> float:
        return cycle_us(large, small, replays[name], context, steps, runs, drafts)

    large_us, small_us, rows = us("large"), us("small"), []
    for k in DRAFTS:
        row = {"drafts": k, "large_us": large_us, "small_us": small_us, "verify_us": us(("pass", k), k)}
        row["cycle_us"] = us(k, k)
        needed = row["cycle_us"] / large_us
        row |= {"passes": round(needed, 3), "break_even": break_even(needed, k)}
        row["speed_up"] = {share: round(expected(share, k) / needed, 2) for share in SHARES}
        rows.append(row)
    return rows


def cycle_us(large: Engine, small: Engine, replay, context: int, steps: int, runs: int, drafts: int) -> float:
    """Return µs of a cycle. The tokens after the large model's position are known, so that every draft is accepted."""

    def prepare() -> None:
        rewind(large, context, GREEDY, known=(drafts + 1) * (steps + 2) if drafts else 0)
        rewind(small, context, GREEDY)
        replay()

    times = time_runs(replay, runs, prepare, steps)
    for engine in (large, small):
        check_running(engine, engine.name)
    return round(1e6 * median(times), 2)


def room(context: int, steps: int) -> int:
    """Return the K/V positions that `measure` needs, in whole pages."""
    return -(-(context + layout.MAX_QUERIES * (steps + 3)) // 64) * 64


def expected(share: float, drafts: int) -> float:
    """Return the expected number of tokens of a cycle.

    `share` is the acceptance probability of a draft whose predecessors were accepted.
    """
    return sum(share**n for n in range(drafts + 1))


def break_even(needed: float, drafts: int) -> float | None:
    """Return the acceptance probability at which a cycle yields `needed` tokens, or None if no probability does."""
    if needed > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle, drafts) < needed else (low, middle)
    return round(high, 3)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", choices=list(PRESETS), default="qwen3-4b")
    parser.add_argument("--small", choices=list(PRESETS), default="qwen3-0.6b")
    parser.add_argument(
        "--context", type=int, default=CONTEXT, help=f"tokens before the first pass (default: {CONTEXT})"
    )
    args = parser.parse_args(argv)
    positions = room(args.context, STEPS)
    large = preset_engine(args.large, positions, graph="none", speculate="ngram")
    small = preset_engine(args.small, positions, graph="none")
    rows = measure(large, small, args.context)
    for row in rows:
        shares = ", ".join(f"{share:.0%}: {factor}" for share, factor in row["speed_up"].items())
        print(f"{row['drafts']} drafts: {row['cycle_us']:,} µs a cycle, {row['passes']} passes of the large model")
        print(f"  breaks even if a share of {row['break_even']} of the drafts is accepted; speed-up by share: {shares}")
    facts = {"bench": "draft-model", "large": args.large, "small": args.small, "context": args.context}
    print(json.dumps(facts | run_facts(large.device) | {"rows": rows}))


if __name__ == "__main__":
    main()
