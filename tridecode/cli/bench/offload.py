"""bench offload: decode passes with K/V or weights in host memory, compared with the bandwidth of the fetch kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ...blocks.host_layers import HostLayers
from ...checkpoint.load import random_weights
from ...engine import Engine
from ...errors import GenerationError
from ...kernels.transfer.fetch import fetch
from ...models.presets import PRESETS
from ...options import EngineOptions
from ...plan.resolve import resolve
from ...state.kv import PAGE, kv_bytes_per_token
from ...state.offload import Offload, Offloaded
from ...state.offloaded_slots import OffloadedSlots
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses, first_batches, launcher
from ...step.run import Run, launch
from ..terminal import counted
from .ablate import stepping
from .measure import (
    GREEDY,
    WARM_UP,
    check_running,
    fill_cache,
    gpu_seconds,
    make_row,
    median_p5_p95,
    need_gpu,
    time_decode,
)
from .passes import rewind
from .prefill import prompt_ids
from .rows import Row, column

Variant = tuple[str, DecodePasses, Callable[[], None]]  # (name, passes, function that prepares a run)
RATE_RUNS = 9
SWAP_ROOM = 200  # Number of spare positions after a conversation.


@dataclass(kw_only=True)
class OffloadRow(Row):
    """The figures of one way to read K/V from host memory."""

    bench = "offload"
    header = "offload"
    variant: str = column("passes")
    host: float | None = column("on the host", 2, selects=True, default=None)
    host_layers: int | None = column("layers on the host", default=None)
    context: int = column("context")
    steps: int
    runs: int
    ring: int | None = None
    us_per_token: float = column("µs per token", kept=2, compared=True)
    us_p5: float = column("p5", kept=2)
    us_p95: float = column("p95", kept=2)
    host_bytes: int = column("GB a token", 2, 1e-9)
    pcie_gbs: float | None = column("PCIe GB/s", 1, kept=2, default=None)
    fetch_gbs: float | None = column("fetch alone", 1, kept=2, default=None)
    copy_gbs: float | None = column("page copies alone", 1, kept=2, default=None)
    pct_fetch: float | None = column("% of fetch", 1, kept=1, default=None)
    over_needed: float | None = column("to the bytes' time", 3, kept=3, default=None)
    captures: int = column("graphs")


@dataclass(kw_only=True)
class WeightsRow(OffloadRow):
    """The figures of one way to read weights from host memory."""

    bench = "offload-weights"
    header = "offload --weights"

    def selectors(self):
        """Return no options, because the command always measures all variants."""
        return {}


@dataclass(kw_only=True)
class PromptRow(Row):
    """The figures of a prompt whose K/V exceed the device memory."""

    bench = "offload-prompt"
    header = "offload --prompt-tokens"
    prompt_tokens: int = column("prompt tokens", selects=True)
    ring: int
    steps: int
    kv_gib: float = column("K/V GiB of the device", 1)
    device_pages: int = column("pages there")
    host_pages: int = column("on the host")
    ttft_s: float = column("s to first token", 2, kept=3, compared=True)
    prompt_tokens_per_second: int = column("prompt tok/s", kept=0)
    us_per_token: float = column("µs per token after it", kept=1, compared=True)
    allocated_gib: float = column("GiB allocated", 2, kept=2)
    tokens_equal: bool


@dataclass(kw_only=True)
class SwapRow(Row):
    """The figures of a conversation whose K/V are copied back or computed again."""

    bench = "offload-swap"
    header = "offload --swap"
    context: int = column("context")
    runs: int
    back_ms: float = column("from the host, ms", 1, kept=2, compared=True)
    anew_ms: float = column("computed again, ms", 1, kept=2, compared=True)
    ratio: float = column("ratio", 1, kept=2)
    both_ways_gbs: float = column("GB/s, out and in", 1, kept=1)


def offload(args, output) -> list[Row]:
    """Return the rows of the variant that the options select.

    By default, each share of --host has a row for each way to read the K/V. With --prompt-tokens each prompt has a row,
    with --swap there is one row, and with --weights each way to read the weights has a row.
    """
    need_gpu()
    if args.prompt_tokens:
        return [read_and_continue(args, tokens) for tokens in args.prompt_tokens]
    if args.swap:
        return [swap(args)]
    if args.weights:
        return weights(args, output)
    return kv_on_host(args, output, fetch_variants, lambda memory, host: {})


def kv_on_host(
    args,
    output,
    variants: Callable[[Engine, int], Iterator[Variant]],
    more_rates: Callable[[Offloaded, int], dict[str, float]],
) -> list[Row]:
    """Time each share of --host with each way to read the K/V.

    Args:
        args: parsed options
        output: receives notes
        variants: function of the number of pages in host memory; returns the ways to read them
        more_rates: function of the same number; returns further rates in GB/s, in addition to that of the fetch kernel
    """
    pages = -(-(args.context + args.steps + 2) // PAGE)
    engine = offload_engine(args, args.context + args.steps + 2, pages, Offload(pages, pages, args.ring))
    slots, memory = offloaded(engine)
    rows: list[Row] = []
    for share in args.host:
        host = round(share * (args.context // PAGE))  # Only full pages can be on the host.
        rewind(engine, args.context, GREEDY)
        slots.send(0, host)
        nbytes = host * PAGE * kv_bytes_per_token(engine.config, engine.model.weights.dtype)
        rates = {"fetch_gbs": fetch_rate(engine, memory, nbytes)} | more_rates(memory, host) if host else {}
        rows += time_variants(
            OffloadRow, engine, args, output, variants(engine, host), nbytes, rates, f"{share:.0%}", host=share
        )
    return rows


def time_variants(
    kind: type[Row],
    engine: Engine,
    args,
    output,
    variants: Iterator[Variant],
    nbytes: int,
    rates: dict,
    part: str,
    **facts,
) -> Iterator[Row]:
    """Yield a row for each variant. `part` names the data in host memory in notes."""
    for name, steps, prepare in variants:
        with stepping(engine, steps):
            times = time_decode(engine, args.context, args.steps, args.runs, before=prepare)
        check_running(engine, name)
        figures = offload_figures(times, nbytes, rates) | facts
        output.note(f"{part} on the host, {name}: {figures['us_per_token']:,.0f} µs a token")
        figures |= {"variant": name, "captures": getattr(steps, "captures", 0)}
        yield make_row(kind, engine, args, **figures)


def fetch_variants(engine: Engine, host: int) -> Iterator[Variant]:
    """Yield the variants of passes that read the K/V of `host` pages from host memory."""
    return graph_variants(engine, partial(offloaded(engine)[0].send, 0, host))


def offload_engine(args, capacity: int, pages: int | None, offload: Offload | None) -> Engine:
    """Build an engine of the preset with random weights for one request.

    Args:
        args: parsed options; --weights GiB of weights are in host memory
        capacity: K/V positions of the request
        pages: pages on the device
        offload: pages in host memory
    """
    device = torch.device("cuda", torch.cuda.current_device())
    options = EngineOptions(max_seq_len=capacity, dtype="bfloat16", speculate="off", weights_offload=args.weights)
    plan = resolve(options, PRESETS[args.preset], device)
    plan.check()
    weights = random_weights(plan.spec, device, plan.dtype, on_host=plan.host_layers)
    engine = Engine.build(replace(plan, pages=pages, offload=offload), weights, name=args.preset)
    fill_cache(engine)
    return engine


def offloaded(engine: Engine) -> tuple[OffloadedSlots, Offloaded]:
    """Return the slots of an engine that offloads K/V, and the memory of their pages."""
    slots, memory = engine.scheduler.slots, engine.model.kv.offload
    assert isinstance(slots, OffloadedSlots) and memory is not None
    return slots, memory


def graph_variants(engine: Engine, prepare: Callable[[], None]) -> Iterator[Variant]:
    """Yield the variants with the fetch kernel, the slowest first. `prepare` is called before each run."""
    model, run = engine.model, launcher(engine.model)
    yield "eager", DecodePasses(model, run), prepare
    yield "a graph a layer", piecewise_passes(model, run, launch), prepare
    yield "one graph", engine.steps, prepare


def piecewise_passes(model, run: Run, between: Run) -> DecodePasses:
    """Capture a decode pass in parts that end at attention and at fetches.

    `between` runs the launches between the parts.
    """
    return captured(model, run, "piecewise", between)


def captured(model, run: Run, mode: str = "full", between: Run = launch) -> DecodePasses:
    """Capture a greedy decode pass in a graph mode. `between` runs the launches between its graphs."""
    batches = first_batches((model.rows,), ("greedy",))
    return DecodePasses(model, run, Dispatcher(mode, (model.rows,)), batches=batches, between=between)


def fetch_rate(engine: Engine, memory: Offloaded | HostLayers, nbytes: int) -> float:
    """Return the GB/s of a graph that contains only the fetches of one pass."""
    places = memory.fetched if isinstance(memory, Offloaded) else memory.places

    def all_layers() -> None:
        for source, target in zip(memory.source, memory.target):
            fetch(None, places, source, target, config=engine.model.fetch_config)

    return nbytes / captured_seconds(all_layers) / 1e9


def captured_seconds(enqueue: Callable[[], None]) -> float:
    """Return the median seconds of a replay of a graph that captures the work of `enqueue()`."""
    enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return median_p5_p95([gpu_seconds(graph.replay) for _ in range(RATE_RUNS)])[0]


def offload_figures(times: list[float], nbytes: int, rates: dict[str, float]) -> dict:
    """Return the figures of a row. `over_needed` is the measured time divided by the time of the fetches alone.

    Args:
        times: seconds per token
        nbytes: bytes per token over PCIe
        rates: GB/s by field name
    """
    median, p5, p95 = median_p5_p95(times, 1e6)
    figures = {"us_per_token": median, "us_p5": p5, "us_p95": p95, "host_bytes": nbytes} | rates
    if rates:
        gbs, fetch_gbs = nbytes / median / 1e3, rates["fetch_gbs"]
        figures |= {"pcie_gbs": gbs, "pct_fetch": 100 * gbs / fetch_gbs, "over_needed": fetch_gbs / gbs}
    return figures


def weights(args, output) -> list[Row]:
    """Time decode passes with --weights GiB of the last layers in host memory, after --context tokens on the device."""
    engine = offload_engine(args, args.context + args.steps + 2, None, None)
    on_host, host = engine.plan.host_layers, engine.model.weights.host
    assert host is not None
    nbytes = sum(source.nbytes for source in host.source)
    rates, variants = {"fetch_gbs": fetch_rate(engine, host, nbytes)}, graph_variants(engine, lambda: None)
    part = counted(on_host, "layer")
    return list(
        time_variants(WeightsRow, engine, args, output, variants, nbytes, rates, part, host=None, host_layers=on_host)
    )


def swap(args) -> Row:
    """Time the next turn of a conversation whose K/V was moved to host memory.

    Two conversations of --context tokens alternate on a device with memory for one. The K/V of a conversation is either
    copied back from the host or computed again.
    """
    capacity = args.context + SWAP_ROOM
    pages = -(-capacity // PAGE)
    engine = offload_engine(args, capacity, pages, Offload(2 * pages, 0, args.ring))
    params = engine.default_params(temperature=0, max_tokens=1, ignore_eos=True)
    first = prompt_ids(engine.config, args.context)
    second = [(token + 1) % engine.config.vocab_size for token in first]
    times: dict[bool, list[float]] = {True: [], False: []}
    for run in range(args.runs + WARM_UP):
        for back in (False, True):
            engine.generate(second, params)  # This request moves the first conversation to the host.
            result = engine.generate(first, params, reuse_prefix=back)
            if result.error or (result.usage.reused_tokens > 0) != back:
                raise GenerationError(result.error or "the cache did not return the expected conversation")
            if run >= WARM_UP:
                times[back].append(result.timings.ttft)
    nbytes = args.context * kv_bytes_per_token(engine.config, torch.bfloat16)
    returned, recomputed = (median_p5_p95(times[key], 1e3)[0] for key in (True, False))
    figures = {"back_ms": returned, "anew_ms": recomputed, "ratio": recomputed / returned}
    return make_row(SwapRow, engine, args, **figures, both_ways_gbs=2 * nbytes / returned / 1e6)


def read_and_continue(args, tokens: int) -> Row:
    """Time a prompt of `tokens` tokens with --kv-gib of K/V on the device, and the --steps tokens after the prompt."""
    config = PRESETS[args.preset]
    capacity = tokens + args.steps + 1
    pages = -(-capacity // PAGE)
    device = min(int(args.kv_gib * 2**30) // (PAGE * kv_bytes_per_token(config, torch.bfloat16)), pages)
    engine = offload_engine(args, capacity, device, Offload(pages, pages - device, args.ring))
    ids, results = prompt_ids(engine.config, tokens), []
    params = engine.default_params(temperature=0, max_tokens=args.steps, ignore_eos=True)
    for _ in range(2):  # The first run captures graphs and loads kernels.
        result = engine.generate(ids, params, reuse_prefix=False)
        if result.error:
            raise GenerationError(result.error)
        results.append(result)
    used, ttft = torch.cuda.max_memory_allocated(engine.device), result.timings.ttft
    return make_row(
        PromptRow,
        engine,
        args,
        prompt_tokens=tokens,
        device_pages=device,
        host_pages=pages - device,
        ttft_s=ttft,
        prompt_tokens_per_second=tokens / ttft,
        us_per_token=1e6 * result.timings.decode / max(args.steps - 1, 1),
        allocated_gib=used / 2**30,
        tokens_equal=results[0].token_ids == results[1].token_ids,
    )
