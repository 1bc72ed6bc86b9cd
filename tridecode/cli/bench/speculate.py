"""bench speculate: what a pass of several rows a request costs, the tokens that come of it, and so the speed-up."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ... import layout
from ...checkpoint.hub import resolve_model
from ...engine import Engine
from ...kernels.sampling.draft import DRAFT
from ...options import EngineOptions
from ...step.dispatch import QUERIES, Dispatcher, most_queries
from ...step.graphs import Place, make_steps
from ...step.run import Run, launch, run_reference
from ...text.tokenizer import Tokenizer
from ...version import __version__
from ..options import engine_options
from ..terminal import counted
from .batch import room_of
from .measure import GREEDY, WARM_UP, bench_engine, check_running, model_facts, run_facts, spread
from .passes import enqueue, rewind
from .speculate_texts import LICENCE, play, texts

LAUNCHES = 20  # of the draft kernel in one graph


def speculate(args, output) -> list[dict]:
    """A row for each number of --requests, one for the draft kernel, and one for each text; with --texts-only these."""
    ngram = EngineOptions(**engine_options(args)).ngram
    costs, drafts, facts = [], [], {"tridecode": __version__}
    where = {} if args.model is None else {"model": args.model}
    if not args.texts_only:
        room, slots = room_of(args.context, layout.MAX_QUERIES * (args.steps + 2)), max(args.requests)
        capacity = max(room, room_of(args.history, layout.MAX_QUERIES))
        more = dict(speculate="ngram", graph="full_decode_only")
        engine = bench_engine(args, capacity, slots, max(slots * room, capacity), **more)
        where, facts = model_facts(engine, args), run_facts(engine.device)
        how = {"context": args.context, "steps": args.steps, "runs": args.runs}
        found = passes(engine, args)
        costs = [{"bench": "speculate", "variant": f"{n} at a time"} | where | how | found[n] for n in found]
        drafts = [{"bench": "speculate-draft", "variant": "draft"} | where | {"history": args.history}]
        drafts[0]["draft_us"] = draft_us(engine, args.history, args.runs)
    alone = next((row for row in costs if row["requests"] == 1), None)
    played = [{"bench": "speculate-text"} | where | row for row in text_rows(args, alone, ngram)]
    return [row | facts for row in (*costs, *drafts, *played)]


def text_rows(args, alone: dict | None, ngram: tuple[int, int]) -> list[dict]:
    """alone: the row of one request, from which the speed-up follows."""
    found = []
    path = Path(args.tokenizer) if args.tokenizer else resolve_model(args.model)
    tokenizer = Tokenizer.load(path)
    for text in texts():
        ids = tokenizer.encode(text.drawn)
        counts = play(tokenizer.encode(text.before), ids, ngram)
        row = {"variant": text.name, "source": text.source, "licence": LICENCE, "tokens": len(ids)}
        row |= {"tokens_per_pass": round(len(ids) / counts.total(), 2)}
        row |= {f"passes_{rows}": counts[rows] for rows in QUERIES}
        found.append(row | ({} if alone is None else {"speed_up": speed_up(alone, counts, len(ids))}))
    return found


def speed_up(alone: dict, counts: Counter, tokens: int) -> float:
    """Of so many tokens, from passes by their rows and what each costs."""
    return round(tokens * alone["off_us"] / sum(alone[f"us_{rows}"] * n for rows, n in counts.items()), 2)


def passes(engine: Engine, args) -> dict[int, dict]:
    """µs of a pass by requests: without speculation, and by rows of each request with it."""
    plain = replace(engine.model, verify=None)
    dispatcher = Dispatcher(engine.graph, engine.graphs.sizes)
    off, found = make_steps(plain, engine.backend, dispatcher, engine.graphs.attention), {}
    for requests in args.requests:
        row = {"requests": requests}
        row["off_us"] = pass_us(engine, args, requests, 1, partial(off.replay, "greedy", requests))
        for rows in QUERIES:
            if rows <= most_queries(requests):
                us = pass_us(engine, args, requests, rows, partial(enqueue, engine, GREEDY, requests, rows))
                row |= {f"us_{rows}": us, f"ratio_{rows}": round(us / row["off_us"], 3)}
        found[requests] = row
    return found


def pass_us(engine: Engine, args, requests: int, rows: int, run_pass: Callable[[], None]) -> float:
    """Tokens behind the position are given where there are rows for them: all of them run, and every guess is right."""
    times, given = [], rows * (args.steps + 2) if rows > 1 else 0
    for run in range(args.runs + WARM_UP):
        rewind(engine, args.context, GREEDY, requests, given)
        run_pass()  # captured by now
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(args.steps):
            run_pass()
        end.record()
        end.synchronize()
        if run >= WARM_UP:
            times.append(start.elapsed_time(end) / args.steps)
    check_running(engine, f"{counted(requests, 'request')} of {counted(rows, 'row')}", requests)
    return round(spread(times, 1e3)[0], 2)


def draft_us(engine: Engine, history: int, runs: int) -> float:
    """µs in which a text of that length is looked through; of one token, so that all that may agree is compared."""
    ws, model = engine.model.of_queries(1, 1).workspace, engine.model
    ws.meta[0] = 0
    ws.meta[0, layout.POSITION], ws.meta[0, layout.N_KNOWN] = history, 1
    ws.meta[0, [layout.LIMIT, layout.ROOM]] = history + layout.MAX_QUERIES
    ws.tokens[0, : history + 1] = 7
    args = ws.meta, ws.tokens, ws.draft_keys, ws.draft_counter, layout.MAX_DRAFTS, model.ngram

    def lines(run: Run) -> None:
        for _ in range(LAUNCHES):
            run("draft", DRAFT, *args)

    replay, times = captured(engine.device, lines), []
    for _ in range(runs + WARM_UP):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES)
    ws.meta[0, layout.STATUS] = layout.LIMIT_REACHED
    return round(spread(times[WARM_UP:], 1e3)[0], 2)


def captured(device: torch.device, lines: Callable[[Run], None], run: Run = launch) -> Callable[[], None]:
    """What replays `lines`, launched by `run`, in one graph; without a GPU their references. No row may run."""
    if device.type != "cuda":
        return torch.inference_mode()(lambda: lines(run_reference))
    place = Place(device)
    place.run(lambda: lines(run))
    return place.capture("full", run, lambda: run, lines)[0]
