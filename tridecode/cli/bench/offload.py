"""bench offload: decode passes with K/V or weights in host memory, compared with the bandwidth of the fetch kernel."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from ...blocks.host_layers import HostLayers
from ...engine import Engine
from ...errors import GenerationError
from ...kernels.transfer.fetch import fetch
from ...models.presets import PRESETS
from ...state.kv import PAGE, kv_bytes_per_token
from ...state.offload import Offload, Offloaded
from ...state.offloaded_slots import OffloadedSlots
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses, first_batches, launcher
from ...step.run import Run, launch
from ..terminal import counted
from .measure import GREEDY, check_running, make_row, need_gpu, preset_engine, running, time_decode
from .passes import rewind
from .prefill import prompt_ids
from .rows import Row, column
from .timing import WARM_UP, captured, spread, time_runs

RATE_RUNS = 9
SWAP_ROOM = 200  # Number of spare positions after a conversation.
Variant = tuple[str, DecodePasses, Callable[[], None]]  # (name, passes, function that prepares a run)


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

    def variants(engine: Engine, host: int) -> Iterator[Variant]:
        return graph_variants(engine, partial(offloaded(engine)[0].send, 0, host))

    return kv_on_host(args, output, variants)


def kv_on_host(
    args,
    output,
    variants: Callable[[Engine, int], Iterator[Variant]],
    more_rates: Callable[[Offloaded, int], dict[str, float]] = lambda memory, host: {},
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
        timed = time_variants(engine, args, output, variants(engine, host), nbytes, rates, f"{share:.0%}")
        rows += [make_row(OffloadRow, engine, args, host=share, **figures) for figures in timed]
    return rows


def weights(args, output) -> list[Row]:
    """Time decode passes with --weights GiB of the last layers in host memory, after --context tokens on the device."""
    engine = offload_engine(args, args.context + args.steps + 2, None, None)
    host, layers = engine.model.weights.host, engine.plan.host_layers
    assert host is not None
    nbytes = sum(source.nbytes for source in host.source)
    rates, variants = {"fetch_gbs": fetch_rate(engine, host, nbytes)}, graph_variants(engine, lambda: None)
    timed = time_variants(engine, args, output, variants, nbytes, rates, counted(layers, "layer"))
    return [make_row(WeightsRow, engine, args, host=None, host_layers=layers, **figures) for figures in timed]


def time_variants(
    engine: Engine, args, output, variants: Iterator[Variant], nbytes: int, rates: dict[str, float], part: str
) -> Iterator[dict]:
    """Yield the figures of each variant.

    Args:
        engine: the engine to time
        args: parsed options
        output: receives a note for each variant
        variants: the ways to read the data in host memory
        nbytes: bytes per token over PCIe
        rates: GB/s by field name, among them that of the fetch kernel; empty if nothing is read
        part: the data in host memory, for the notes
    """
    for name, steps, prepare in variants:
        with running(engine, steps):
            times = time_decode(engine, args.context, args.steps, args.runs, before=prepare)
        check_running(engine, name)
        figures = spread("us_per_token", times, 1e6, "us") | {"host_bytes": nbytes} | rates
        if rates:
            gbs = nbytes / median(times) / 1e9
            share = gbs / rates["fetch_gbs"]
            figures |= {"pcie_gbs": gbs, "pct_fetch": 100 * share, "over_needed": 1 / share}
        output.note(f"{part} on the host, {name}: {figures['us_per_token']:,.0f} µs a token")
        yield figures | {"variant": name, "captures": getattr(steps, "captures", 0)}


def offload_engine(args, capacity: int, pages: int | None, offload: Offload | None) -> Engine:
    """Build an engine of the preset for one request, with --weights GiB of the weights in host memory.

    Args:
        args: parsed options
        capacity: K/V positions of the request
        pages: pages on the device
        offload: pages in host memory
    """
    return preset_engine(args.preset, capacity, pages=pages, offload=offload, weights_offload=args.weights)


def offloaded(engine: Engine) -> tuple[OffloadedSlots, Offloaded]:
    """Return the slots of an engine that offloads K/V, and the memory of their pages."""
    slots, memory = engine.scheduler.slots, engine.model.kv.offload
    assert isinstance(slots, OffloadedSlots) and memory is not None
    return slots, memory


def graph_variants(engine: Engine, prepare: Callable[[], None]) -> Iterator[Variant]:
    """Yield the variants with the fetch kernel, the slowest first. `prepare` is called before each run."""
    model, run = engine.model, launcher(engine.model)
    yield "eager", DecodePasses(model, run), prepare
    yield "a graph a layer", captured_passes(model, run, "piecewise"), prepare
    yield "one graph", engine.steps, prepare


def captured_passes(model, run: Run, mode: str = "full", between: Run = launch) -> DecodePasses:
    """Capture a greedy decode pass.

    Args:
        model: the model
        run: runs the captured launches
        mode: "full", or "piecewise" for graphs that end at attention and at fetches
        between: runs the launches between the graphs
    """
    batches = first_batches((model.rows,), ("greedy",))
    return DecodePasses(model, run, Dispatcher(mode, (model.rows,)), batches=batches, between=between)


def fetch_rate(engine: Engine, memory: Offloaded | HostLayers, nbytes: int) -> float:
    """Return the GB/s of a graph that contains only the fetches of one pass."""
    places = memory.fetched if isinstance(memory, Offloaded) else memory.places

    def all_layers() -> None:
        for source, target in zip(memory.source, memory.target):
            fetch(None, places, source, target, config=engine.model.fetch_config)

    return nbytes / graph_seconds(engine.device, all_layers) / 1e9


def graph_seconds(device: torch.device, work: Callable[[], None]) -> float:
    """Return the median seconds of a replay of a graph that captures what `work()` enqueues."""
    return median(time_runs(captured(device, work), RATE_RUNS))


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
    returned, recomputed = (1e3 * median(times[key]) for key in (True, False))
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
