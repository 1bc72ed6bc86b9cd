"""bench speculate: the cost of passes that verify drafts, the tokens accepted on fixed texts, and the speed-up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ... import layout
from ...checkpoint.hub import resolve_model
from ...engine import Engine
from ...kernels.sampling.draft import DRAFT
from ...options import EngineOptions
from ...step.dispatch import QUERIES, Dispatcher, max_queries
from ...step.graphs import make_passes
from ...step.run import launch, run_reference
from ...text.tokenizer import Tokenizer
from ...version import __version__
from ..options import engine_options
from ..terminal import counted
from .measure import (
    GREEDY,
    bench_engine,
    check_running,
    make_row,
    model_facts,
    need_gpu,
    reserved_positions,
    run_facts,
)
from .passes import enqueue, rewind
from .rows import Row, column
from .speculate_texts import LICENSE, Text, simulate, texts
from .timing import captured, time_runs

LAUNCHES = 20  # Number of launches of the draft kernel in one graph.


@dataclass(kw_only=True)
class PassesRow(Row):
    """The figures of passes that verify drafts."""

    bench = "speculate"
    header = "speculate"
    variant: str = column("requests")
    context: int = column("context")
    steps: int
    runs: int
    requests: int
    off_us: float = column("µs per pass without drafts", kept=2, compared=True)
    us_1: float = column("1 row of each", kept=2, compared=True)
    ratio_1: float = column("1: ratio", 3, kept=3)
    us_2: float | None = column("2 rows of each", kept=2, compared=True, default=None)
    ratio_2: float | None = column("2: ratio", 3, kept=3, default=None)
    us_4: float | None = column("4 rows of each", kept=2, compared=True, default=None)
    ratio_4: float | None = column("4: ratio", 3, kept=3, default=None)
    us_8: float | None = column("8 rows of each", kept=2, compared=True, default=None)
    ratio_8: float | None = column("8: ratio", 3, kept=3, default=None)


@dataclass(kw_only=True)
class DraftRow(Row):
    """The figures of the draft kernel."""

    bench = "speculate-draft"
    header = "search for a draft"
    variant: str = ""
    history: int = column("tokens of text")
    draft_us: float = column("µs", 2, kept=2, compared=True)


@dataclass(kw_only=True)
class TextRow(Row):
    """The figures of the playback of a text."""

    bench = "speculate-text"
    header = "speculate, texts"
    variant: str = column("text")
    source: str = column("from")
    license: str = column("license")
    tokens: int = column("tokens")
    tokens_per_pass: float = column("tokens per pass", 2, kept=2, compared=True)
    passes_1: int = column("passes of 1")
    passes_2: int = column("passes of 2")
    passes_4: int = column("passes of 4")
    passes_8: int = column("passes of 8")
    speed_up: float | None = column("speed-up", 2, kept=2, compared=True, default=None)


def speculate(args, output) -> list[Row]:
    """Return a row for each number of --requests, one for the draft kernel, and one for each text.

    With --texts-only, return the rows of the texts only.
    """
    loaded = texts()  # Outside a checkout this call raises an error. It must precede the measurements.
    if not args.texts_only:
        need_gpu()
    tokenizer = Tokenizer.load(Path(args.tokenizer) if args.tokenizer else resolve_model(args.model))
    play = partial(text_row, tokenizer=tokenizer, ngram=EngineOptions(**engine_options(args)).ngram)
    if args.texts_only:
        return [play(text, model=args.model, tridecode=__version__) for text in loaded]
    room, slots = reserved_positions(args.context, layout.MAX_QUERIES * (args.steps + 2)), max(args.requests)
    capacity = max(room, reserved_positions(args.history, layout.MAX_QUERIES))
    more = dict(speculate="ngram", graph="full_decode_only")
    engine = bench_engine(args, capacity, slots, max(slots * room, capacity), **more)
    costs = passes(engine, args)
    one_request = next((row for row in costs if row.requests == 1), None)
    us = draft_us(engine, args.history, args.runs)
    facts = model_facts(engine, args) | run_facts(engine.device)
    return [
        *costs,
        make_row(DraftRow, engine, args, variant="draft", draft_us=us),
        *(play(text, one_request=one_request, costs=engine.steps.costs_of("greedy", 1), **facts) for text in loaded),
    ]


def text_row(
    text: Text, tokenizer: Tokenizer, ngram: tuple[int, int], one_request: PassesRow | None = None,
    costs: Mapping[int, float] | None = None, **facts,
) -> TextRow:  # fmt: skip
    """Play a text back through the drafter.

    Args:
        text: the text
        tokenizer: tokenizer of the text
        ngram: range of n-gram lengths that the drafter compares
        one_request: the times of passes of one request, from which the speed-up follows; None omits the speed-up
        costs: see `simulate`
        facts: further fields of the row
    """
    sampled = tokenizer.encode(text.sampled)
    counts, tokens = simulate(tokenizer.encode(text.before), sampled, ngram, costs), len(sampled)
    figures: dict[str, Any] = {"tokens": tokens, "tokens_per_pass": tokens / counts.total()}
    figures |= {f"passes_{rows}": counts[rows] for rows in QUERIES}
    if one_request is not None:
        us = sum(count * getattr(one_request, f"us_{rows}") for rows, count in counts.items())
        figures["speed_up"] = tokens * one_request.off_us / us
    return TextRow(variant=text.name, source=text.source, license=LICENSE, **figures, **facts)


def passes(engine: Engine, args) -> list[PassesRow]:
    """Return µs per pass for each number of --requests: without drafts, and with each number of rows per request."""
    plain = replace(engine.model, verify=None)
    dispatcher = Dispatcher(engine.graph, engine.graphs.sizes)
    off, costs = make_passes(plain, engine.backend, dispatcher, engine.graphs.attention), []
    for requests in args.requests:
        off_us = pass_us(engine, args, requests, 1, partial(off.replay, "greedy", requests))
        figures = {"requests": requests, "variant": f"{requests} at a time", "off_us": off_us}
        for rows in QUERIES:
            if rows <= max_queries(requests):
                us = pass_us(engine, args, requests, rows, partial(enqueue, engine, GREEDY, requests, rows))
                figures |= {f"us_{rows}": us, f"ratio_{rows}": us / off_us}
        costs.append(make_row(PassesRow, engine, args, **figures))
    return costs


def pass_us(engine: Engine, args, requests: int, rows: int, run_pass: Callable[[], None]) -> float:
    """Return µs per pass. The tokens after the position are known, so rows stay active and drafts are accepted."""

    def prepare() -> None:
        rewind(engine, args.context, GREEDY, requests, rows * (args.steps + 2) if rows > 1 else 0)
        run_pass()  # The first pass captures a graph.

    times = time_runs(run_pass, args.runs, prepare, args.steps)
    check_running(engine, f"{counted(requests, 'request')} of {counted(rows, 'row')}", requests)
    return 1e6 * median(times)


def draft_us(engine: Engine, history: int, runs: int) -> float:
    """Return µs of the draft kernel over a text of `history` tokens.

    The text repeats one token, so that the kernel compares the longest n-gram at every position.
    """
    ws, model = engine.model.for_queries(1, 1).workspace, engine.model
    ws.meta[0] = 0
    ws.meta[0, layout.POSITION], ws.meta[0, layout.N_KNOWN] = history, 1
    ws.meta[0, [layout.LIMIT, layout.ALLOCATED]] = history + layout.MAX_QUERIES
    ws.tokens[0, : history + 1] = 7
    args = ws.meta, ws.tokens, ws.draft_keys, ws.draft_counter, layout.MAX_DRAFTS, model.ngram
    run = launch if engine.device.type == "cuda" else run_reference

    def launches() -> None:
        for _ in range(LAUNCHES):
            run("draft", DRAFT, *args)

    seconds = median(time_runs(captured(engine.device, launches), runs))
    ws.meta[0, layout.STATUS] = layout.LIMIT_REACHED
    return 1e6 * seconds / LAUNCHES
