"""`tridecode profile`: time by kernel of a decode pass and of a prompt chunk, from the GPU's activity records."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch

from ...engine import Engine
from ...errors import ParameterError
from ...layout import Chunk
from ...step import decode
from ...step.model import DecodeModel
from ...step.prompt import CHUNK, prefill, read, write_chunks
from ...step.run import Launch, Recorder
from ..bench.measure import (
    GREEDY,
    bench_engine,
    model_facts,
    need_gpu,
    random_adapters,
    read_bandwidth,
    run_facts,
    time_decode,
)
from ..bench.passes import enqueue, rewind
from ..bench.rows import print_table
from ..terminal import Output, counted
from . import draw
from .experts import experts
from .records import (
    Span,
    chained,
    read_records,
    record_on_gpu,
    roles_of,
    separate_spans,
    split_steps,
    summarize,
    typical,
)

STEPS, DROPPED = 20, 4  # Number of recorded decode passes that count, and of those before them that do not count.
CHUNKS, DROPPED_CHUNKS = 5, 2
SHOWN = 12  # Number of roles that a table shows.
COLUMNS = {  # Header -> (key of a role, format).
    "kernel": ("op", "{:.40}"),
    "share %": ("share_pct", "{:.1f}"),
    "launches": ("launches", "{}"),
    "mean µs": ("mean_us", "{:.2f}"),
    "recorded": ("recorded_us", "{:.2f}"),
    "bytes": ("bytes", "{:,}"),
    "% of bandwidth": ("pct_bandwidth", "{:.1f}"),
}


def run(args, output: Output) -> int:
    """Run `profile`: print a table for a decode pass, a table for a prompt chunk, and one JSON line."""
    if args.experts is not None:
        return experts(args, output)
    need_gpu("profile")
    adapters = args.random_adapters or 0
    if adapters > args.rows:
        raise ParameterError(f"--random-adapters must be at most --rows, {args.rows}, got {adapters}")
    if args.prompt_tokens > CHUNK:
        raise ParameterError(f"--prompt-tokens must be at most {CHUNK}, one chunk, got {args.prompt_tokens}")
    folder = None if args.output is None else Path(args.output)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    record_on_gpu(lambda: torch.zeros(1, device="cuda"))  # This attaches the profiler before the pass is captured.
    capacity = max(args.context + DROPPED + STEPS + 2, args.prompt_tokens)
    engine = bench_engine(args, capacity, args.rows, **random_adapters(adapters, args.rank))
    model = engine.model.with_adapters(adapters > 0)
    bandwidth = read_bandwidth(engine.device)
    clean = median(time_decode(engine, args.context, STEPS, 5, GREEDY, args.rows, adapters=adapters)) * 1e6
    name = args.model or args.preset
    step_trace = decode_trace(engine, args.context, args.rows, adapters)
    steps = decode_spans(step_trace, model, args.rows)
    chunk_trace = prefill_trace(model, args.prompt_tokens)
    chunks = separate_spans(split_steps(read_records(chunk_trace), CHUNKS + DROPPED_CHUNKS), DROPPED_CHUNKS)
    report = {
        "command": "profile",
        **model_facts(engine, args),
        "rows": args.rows,
        "context": args.context,
        "prompt_tokens": args.prompt_tokens,
        **random_adapters(adapters, args.rank),
        "read_bandwidth_gbs": bandwidth / 1e9,
        "decode": {"us_without_profiler": clean} | summarize(steps),
        "prefill": summarize(chunks),
        **run_facts(engine.device),
    }
    # The middle one of the counted passes has this context.
    rewind(engine, args.context + DROPPED + STEPS // 2, GREEDY, args.rows)
    add_bytes(report["decode"]["kernels"], bytes_by_role(step_launches(model, args.rows)), bandwidth)
    chunk_launches = prompt_launches(model, args.prompt_tokens)
    add_bytes(report["prefill"]["kernels"], bytes_by_kernel(chunk_launches), bandwidth)
    report = json.loads(json.dumps(report), parse_float=lambda number: round(float(number), 3))
    if folder is not None:
        for file, trace in (("decode_trace.json.gz", step_trace), ("prefill_trace.json.gz", chunk_trace)):
            (folder / file).write_bytes(gzip.compress(json.dumps(trace).encode()))
        for file, content in pictures(report, name, typical(steps)).items():
            (folder / file).write_text(content, encoding="utf-8")
        (folder / "profile.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        output.note(f"pictures, traces and figures are in {folder}")
    show(report, name, output)
    output.text(json.dumps(report) + "\n")
    return 0


def decode_trace(engine: Engine, context: int, rows: int = 1, adapters: int = 0) -> dict:
    """Return the profiler's trace of decode passes at a context. Their `rows` rows use `adapters` adapters."""

    def steps():
        for _ in range(DROPPED + STEPS):
            enqueue(engine, GREEDY, rows, adapters=adapters > 0)

    rewind(engine, context, GREEDY, rows)
    if adapters and engine.model.pool is not None:
        engine.model.pool.assign(adapters)
    return record_on_gpu(steps)


def decode_spans(trace: dict, model: DecodeModel, rows: int = 1) -> list[list[Span]]:
    """Return the spans of the counted decode passes, each with its role."""
    launches = [(launch.role, launch.kernels()) for launch in step_launches(model, rows)]
    steps = split_steps(read_records(trace), DROPPED + STEPS)
    roles, *_ = [roles_of(step, launches) for step in steps]
    return chained(steps, roles, DROPPED)


def prefill_trace(model: DecodeModel, tokens: int) -> dict:
    """Return the profiler's trace of prompt passes of `tokens` tokens, with waits between them."""
    once = partial(prefill, model, 0, tokens)

    def chunks():
        for _ in range(DROPPED_CHUNKS + CHUNKS):
            once()
            torch.cuda.synchronize()

    once()  # In the first run, libraries choose and load their kernels.
    return record_on_gpu(chunks)


def pictures(report: dict, name: str, step: Sequence[Span]) -> dict[str, str]:
    """Return SVG pictures by file name."""
    decode, chunk, gpu = report["decode"], report["prefill"], report["gpu"]
    title = f"{name}, {at(report)}, one token step on {gpu}"
    prompt = f"{name}, prefill of {counted(report['prompt_tokens'], 'token')} on {gpu}"
    return {
        "decode_timeline.svg": draw.timeline(title, step),
        "decode_shares.svg": draw.shares(f"{title}: {decode['wall_us']:,.0f} µs", decode["kernels"]),
        "prefill_shares.svg": draw.shares(f"{prompt}: {chunk['wall_us'] / 1e3:,.1f} ms", chunk["kernels"][:SHOWN]),
    }


def at(report: dict) -> str:
    """Return the rows, their adapters and the context as text, such as "8 rows with 2 adapters at context 64"."""
    with_adapters = f" with {counted(report['adapters'], 'adapter')}" if "adapters" in report else ""
    rows = f"{counted(report['rows'], 'row')}{with_adapters} at " if report["rows"] > 1 or with_adapters else ""
    return f"{rows}context {report['context']:,}"


def show(report: dict, name: str, output: Output) -> None:
    """Print the report: a table for the decode pass and one for the prompt chunk."""
    decode, chunk = report["decode"], report["prefill"]
    output.text(f"{name}, {report['gpu']}, read bandwidth {report['read_bandwidth_gbs']:,.0f} GB/s\n\n")
    clean = f"{decode['us_without_profiler']:,.1f} µs without the profiler"
    output.text(f"token step at {at(report)}, median of {decode['steps']}; {clean}\n")
    show_kernels(decode, output)
    output.text(f"\nprefill of {counted(report['prompt_tokens'], 'token')}, median of {chunk['steps']}\n")
    show_kernels(chunk, output)


def show_kernels(part: dict, output: Output) -> None:
    """Print a summary, a table with a line for each kernel and its share of the time, and the gaps."""
    gap = f"gap {part['gap_us']:,.1f} ({part['gap_pct']:.1f}%)"
    launches = counted(part["launches"], "launch")
    output.text(f"wall {part['wall_us']:,.1f} µs, compute {part['compute_us']:,.1f}, {gap}, {launches}\n")
    cells = [
        [text.format(role[key]) if role.get(key) is not None else "" for key, text in COLUMNS.values()]
        for role in part["kernels"][:SHOWN]
    ]
    if rest := part["kernels"][SHOWN:]:
        cells.append([f"{len(rest)} more", f"{sum(role['share_pct'] for role in rest):.1f}"])
    print_table(list(COLUMNS), cells, output)
    gaps = ", ".join(f"{name}: {count}" for name, count in part["gaps"].items())
    output.text(f"gaps (µs): {gaps}\n")


def step_launches(model: DecodeModel, rows: int = 1) -> list[Launch]:
    """Return the launches of a greedy step, in order."""
    recorder = Recorder()
    decode.decode_pass(recorder, model.for_rows(rows), "greedy")
    return recorder.launches


def prompt_launches(model: DecodeModel, tokens: int) -> list[Launch]:
    """Return the launches of a prompt chunk without reused K/V, in order."""
    recorder = Recorder()
    with torch.inference_mode():
        write_chunks(model, [Chunk(0, 0, tokens, 0)])
        read(recorder, model, tokens)
    return recorder.launches


def bytes_by_role(launches: Iterable[Launch]) -> dict[str, float]:
    """Return the mean bytes per launch of each role, at the current positions.

    Layers with different windows have different bytes.
    """
    return _mean_bytes((launch.role, launch) for launch in launches)


def bytes_by_kernel(launches: Iterable[Launch]) -> dict[str, float]:
    """Return the mean bytes per launch of each kernel, for launches that consist of a single Triton kernel."""
    return _mean_bytes((launch.kernels()[0], launch) for launch in launches if len(launch.op.kernels) == 1)


def _mean_bytes(named: Iterable[tuple[str, Launch]]) -> dict[str, float]:
    by_name = defaultdict(list)
    for name, launch in named:
        by_name[name].append(launch.bytes())
    return {name: mean(sizes) for name, sizes in by_name.items()}


def add_bytes(kernels: list[dict], moved: dict[str, float], bandwidth: float) -> None:
    """Add to each role in `moved` its bytes per launch, and its share of `bandwidth`, in bytes per second."""
    for role in kernels:
        if role["op"] in moved:
            role["bytes"] = round(moved[role["op"]])
            seconds = role["mean_us"] / 1e6
            role["pct_bandwidth"] = 100 * moved[role["op"]] / seconds / bandwidth if seconds else None
