"""`tridecode profile`: time by kernel of a decode pass and of a prompt chunk, from the GPU's activity records."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from torch.profiler import ProfilerActivity

from ...engine import Engine
from ...errors import DeviceError, ParameterError
from ...layout import Chunk
from ...step import decode
from ...step.model import DecodeModel
from ...step.prompt import CHUNK, prefill, read, write_chunks
from ...step.run import Launch, Recorder
from ..bench.measure import GREEDY, bench_engine, model_facts, read_bandwidth, run_facts, time_decode
from ..bench.passes import enqueue, rewind
from ..terminal import Output, counted
from . import draw
from .records import Span, chained, read_records, separate_spans, split_steps, summarize, typical

STEPS, DROPPED = 20, 4  # Number of recorded decode passes that count, and of those before them that do not count.
CHUNKS, DROPPED_CHUNKS = 5, 2
SHOWN = 12  # Number of roles that a table shows.


def run(args, output: Output) -> int:
    """Run `profile`: print a table for a decode pass, a table for a prompt chunk, and one JSON line."""
    if not torch.cuda.is_available():
        raise DeviceError("profile needs an NVIDIA GPU; no usable GPU was found")
    if args.prompt_tokens > CHUNK:
        raise ParameterError(f"--prompt-tokens must be at most {CHUNK}, one chunk, got {args.prompt_tokens}")
    folder = None if args.output is None else Path(args.output)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    record_on_gpu(lambda: torch.zeros(1, device="cuda"))  # This attaches the profiler before the pass is captured.
    engine = bench_engine(args, max(args.context + DROPPED + STEPS + 2, args.prompt_tokens), args.rows)
    bandwidth = read_bandwidth(engine.device)
    clean = median(time_decode(engine, args.context, STEPS, 5, GREEDY, args.rows)) * 1e6
    name = args.model or args.preset
    step_trace = decode_trace(engine, args.context, args.rows)
    steps = decode_spans(step_trace, engine, args.rows)
    chunk_trace = prefill_trace(engine, args.prompt_tokens)
    chunks = separate_spans(split_steps(read_records(chunk_trace), CHUNKS + DROPPED_CHUNKS), DROPPED_CHUNKS)
    report = {
        "command": "profile",
        **model_facts(engine, args),
        "rows": args.rows,
        "context": args.context,
        "prompt_tokens": args.prompt_tokens,
        "read_bandwidth_gbs": bandwidth / 1e9,
        "decode": {"us_without_profiler": clean} | summarize(steps),
        "prefill": summarize(chunks),
        **run_facts(engine.device),
    }
    # The middle one of the counted passes has this context.
    rewind(engine, args.context + DROPPED + STEPS // 2, GREEDY, args.rows)
    add_bytes(report["decode"]["kernels"], bytes_by_role(step_launches(engine.model, args.rows)), bandwidth)
    chunk_launches = prompt_launches(engine.model, args.prompt_tokens)
    add_bytes(report["prefill"]["kernels"], bytes_by_kernel(chunk_launches), bandwidth)
    report = rounded(report)
    if folder is not None:
        write(folder / "decode_trace.json.gz", step_trace)
        write(folder / "prefill_trace.json.gz", chunk_trace)
        for file, content in pictures(report, name, typical(steps)).items():
            (folder / file).write_text(content, encoding="utf-8")
        (folder / "profile.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        output.note(f"pictures, traces and figures are in {folder}")
    output.text(as_text(report, name))
    output.text(json.dumps(report) + "\n")
    return 0


def decode_trace(engine: Engine, context: int, rows: int = 1) -> dict:
    """Return the profiler's trace of decode passes of `rows` rows at a context."""

    def steps():
        for _ in range(DROPPED + STEPS):
            enqueue(engine, GREEDY, rows)

    rewind(engine, context, GREEDY, rows)
    return record_on_gpu(steps)


def decode_spans(trace: dict, engine: Engine, rows: int = 1) -> list[list[Span]]:
    """Return the spans of the counted decode passes, each with its role."""
    roles, kernels = roles_and_kernels(step_launches(engine.model, rows))
    return chained(split_steps(read_records(trace), DROPPED + STEPS, kernels), roles, DROPPED)


def prefill_trace(engine: Engine, tokens: int) -> dict:
    """Return the profiler's trace of prompt passes of `tokens` tokens, with waits between them."""
    once = partial(prefill, engine.model, 0, tokens)

    def chunks():
        for _ in range(DROPPED_CHUNKS + CHUNKS):
            once()
            torch.cuda.synchronize()

    once()  # In the first run, libraries choose and load their kernels.
    return record_on_gpu(chunks)


def record_on_gpu(work) -> dict:
    """Return the Chrome trace of the GPU's activities during `work`, without the name of the machine."""
    torch.cuda.synchronize()
    # Without acc_events, PyTorch warns that it clears events after a cycle.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    trace.pop("host_name", None)
    trace.pop("traceName", None)  # This key contains the name of the temporary file.
    return trace


def write(path: Path, trace: dict) -> None:
    """Write a trace as compressed JSON, which Perfetto and chrome://tracing open."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)


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
    """Return the rows and the context of the pass as text, such as "8 rows at context 64"."""
    rows = f"{report['rows']} rows at " if report["rows"] > 1 else ""
    return f"{rows}context {report['context']:,}"


def rounded(value):
    """Return a report with numbers rounded to three places."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def as_text(report: dict, name: str) -> str:
    """Return the report as text: a table for the decode pass and one for the prompt chunk."""
    decode, chunk = report["decode"], report["prefill"]
    bandwidth = report["read_bandwidth_gbs"]
    lines = [
        f"{name}, {report['gpu']}, read bandwidth {bandwidth:,.0f} GB/s",
        "",
        f"token step at {at(report)}, median of {decode['steps']}; "
        f"{decode['us_without_profiler']:,.1f} µs without the profiler",
        *table(decode),
        "",
        f"prefill of {counted(report['prompt_tokens'], 'token')}, median of {chunk['steps']}",
        *table(chunk),
    ]
    return "\n".join(lines) + "\n\n"


def table(part: dict) -> list[str]:
    """Return the lines of a table: a summary, then a line for each kernel with its share of the time."""
    with_bytes = any("bytes" in role for role in part["kernels"])
    head = f"{'kernel':<40} {'share %':>8} {'launches':>8} {'mean µs':>9} {'recorded':>9}"
    head += f" {'bytes':>13} {'% of bandwidth':>15}" if with_bytes else ""
    lines = [
        f"wall {part['wall_us']:,.1f} µs, compute {part['compute_us']:,.1f}, gap {part['gap_us']:,.1f} "
        f"({part['gap_pct']:.1f}%), {counted(part['launches'], 'launch')}",
        head,
    ]
    for role in part["kernels"][:SHOWN]:
        line = f"{role['op'][:40]:<40} {role['share_pct']:>8.1f} {role['launches']:>8} {role['mean_us']:>9.2f}"
        line += f" {role['recorded_us']:>9.2f}"
        if "bytes" in role:
            percent = "" if role["pct_bandwidth"] is None else f"{role['pct_bandwidth']:.1f}"
            line += f" {role['bytes']:>13,} {percent:>15}"
        lines.append(line)
    if rest := part["kernels"][SHOWN:]:
        lines.append(f"{f'{len(rest)} more':<40} {sum(role['share_pct'] for role in rest):>8.1f}")
    lines.append("gaps (µs): " + ", ".join(f"{name}: {count}" for name, count in part["gaps"].items()))
    return lines


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


def roles_and_kernels(launches: Iterable[Launch]) -> tuple[list[str], list[str]]:
    """Return the role and the name of each kernel of the launches, in order."""
    pairs = [(launch.role, kernel) for launch in launches for kernel in launch.kernels()]
    return [role for role, _ in pairs], [kernel for _, kernel in pairs]


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
