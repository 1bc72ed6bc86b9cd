"""bench offload: the token step with K/V or weights in host memory, in several ways, against the fetch kernel alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from ...tensors import ALIGNED, PIECE
from ..terminal import counted
from .ablate import stepping
from .measure import GREEDY, WARM_UP, check_running, fill_cache, model_facts, need_gpu, run_facts, spread, time_decode
from .passes import rewind
from .prefill import prompt_ids

RATE_RUNS = 9
SWAP_ROOM = 200  # positions behind a conversation


def offload(args, output) -> list[dict]:
    """A row for each share of --host in each way; or one for each prompt of --prompt-tokens, one for --swap, or one in
    each way for --weights."""
    need_gpu()
    if args.prompt_tokens:
        return [read_and_continue(args, tokens) for tokens in args.prompt_tokens]
    if args.swap:
        return [swap(args)]
    if args.weights:
        return weights(args, output)
    pages = -(-(args.context + args.steps + 2) // PAGE)
    engine = offload_engine(args, args.context + args.steps + 2, pages, Offload(pages, pages, args.ring))
    (slots, memory), rows = offloaded(engine), []
    for share in args.host:
        host = round(share * (args.context // PAGE))  # of those that are full
        rewind(engine, args.context, GREEDY)
        slots.send(0, host)
        nbytes = host * PAGE * kv_bytes_per_token(engine.config, engine.model.weights.dtype)
        rates = {"fetch_gbs": fetch_rate(engine, memory, nbytes), "copy_gbs": copy_rate(memory, host)} if host else {}
        for name, steps, prepare in ways(engine, host):
            with stepping(engine, steps):
                times = time_decode(engine, args.context, args.steps, args.runs, before=prepare)
            check_running(engine, name)
            row = {"bench": "offload"} | model_facts(engine, args) | {"variant": name, "host": share}
            row |= {"context": args.context, "steps": args.steps, "runs": args.runs, "ring": args.ring}
            row |= offload_figures(times, nbytes, rates) | {"captures": getattr(steps, "captures", 0)}
            rows.append(row | run_facts(engine.device))
            output.note(f"{share:.0%} on the host, {name}: {row['us_per_token']:,.0f} µs a token")
    return rows


def offload_engine(args, capacity: int, pages: int | None, offload: Offload | None) -> Engine:
    """Build an engine of the preset with random weights for one request of `capacity` positions, with `pages` pages on
    the device, those of `offload` in host memory, and --weights GiB of weights there."""
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


def ways(engine: Engine, host: int) -> Iterator[tuple[str, DecodePasses, Callable[[], None]]]:
    """Those to read `host` pages of the host, about from the slowest: what runs the passes, and what prepares a run."""
    model, run, (slots, memory) = engine.model, launcher(engine.model), offloaded(engine)
    send = partial(slots.send, 0, host)
    if host:
        by_page, by_layer = Copies(launch, model, host, whole=False), Copies(launch, model, host, whole=True)
        yield "eager, a copy a page", DecodePasses(model, by_page), send
        yield "eager, a copy a layer", DecodePasses(model, by_layer), send
        yield "a graph a layer, a copy a layer, waits", pieces(model, run, waiting(by_layer)), send
        yield "a graph a layer, a copy a layer", pieces(model, run, by_layer), send
        yield "one graph, a copy a layer", captured(model, by_layer), send
        if first_cell(memory) is not None:
            direct = captured(model, without_fetches(run))
            yield "one graph, attention reads the host", direct, partial(read_directly, engine, host)
    yield from graph_ways(engine, send)


def graph_ways(engine: Engine, prepare: Callable[[], None]) -> Iterator[tuple]:
    """Those with the fetch kernel."""
    model, run = engine.model, launcher(engine.model)
    yield "eager", DecodePasses(model, run), prepare
    yield "a graph a layer", pieces(model, run, launch), prepare
    yield "one graph", engine.steps, prepare


def pieces(model, run: Run, between: Run) -> DecodePasses:
    return captured(model, run, "piecewise", between)


def captured(model, run: Run, mode: str = "full", between: Run = launch) -> DecodePasses:
    batches = first_batches((model.rows,), ("greedy",))
    return DecodePasses(model, run, Dispatcher(mode, (model.rows,)), batches=batches, between=between)


def waiting(run: Run) -> Run:
    """`run`, whose host waits for each layer's graph before it goes on."""

    def run_waiting(role: str, op, *args, **how) -> None:
        if role == "attention":
            torch.cuda.current_stream().synchronize()
        run(role, op, *args, **how)

    return run_waiting


def without_fetches(run: Run) -> Run:
    """`run`, where nothing comes into the ring."""

    def run_without(role: str, op, *args, **how) -> None:
        if role not in ("fetch", "fetched"):
            run(role, op, *args, **how)

    return run_without


def first_cell(offload: Offloaded) -> int | None:
    """The number of the host's memory as a cell, counted from the device's: the first whole one behind its beginning.
    None where no table can hold it."""
    cell = offload.cells[0].nbytes
    first = -((offload.cells.data_ptr() - offload.host.data_ptr()) // cell)
    end = first + offload.host.shape[0] * offload.host.shape[1]
    return first if cell % ALIGNED == 0 and -(2**31) <= first and end < 2**31 else None


def read_directly(engine: Engine, host: int) -> None:
    """Send the pages, and let the tables name the host's own memory, all of which the device sees. What is read is
    another text, in the same time."""
    kv, (slots, memory) = engine.model.kv, offloaded(engine)
    slots.send(0, host)
    layers, first = len(memory.tables), first_cell(memory)
    assert first is not None, "no table can hold the cells of the host's memory"
    places = kv.page_table[0, :host] - len(kv.pool)
    pages = memory.fetched[1:][places.long()]
    numbers = torch.arange(layers, dtype=torch.int32, device=pages.device)[:, None]
    memory.tables[:, 0, :host] = first + pages * layers + numbers


class Copies:
    """Runs as `run` does, but what comes from the host's memory comes by copies: one a page, or one a layer (as if the
    host had a layer's pages beside each other: for the time it takes, the text is another one)."""

    def __init__(self, run: Run, model, host: int, whole: bool):
        self._run, self._whole, self._count = run, whole, host
        offload = model.kv.offload
        self._cell = offload.target[0].shape[1]
        self._pages = offload.fetched[1 : 1 + host].tolist()
        self._flat = offload.host.view(torch.int64).as_strided((offload.host.untyped_storage().nbytes() // 8,), (1,), 0)
        self._words = PIECE // 8 - offload.source[0].stride(0)

    def __call__(self, role: str, op, *args, **how) -> None:
        if role != "fetch":
            self._run(role, op, *args, **how)
            return
        _, _, source, ring = args
        if self._whole:
            layer, count = source.storage_offset() // self._cell, self._count * self._cell
            each = max(self._words // count, 1)  # layers within the host's first piece: a copy must not cross two
            ring.view(-1)[:count].copy_(self._flat[layer % each * count :][:count], non_blocking=True)
            return
        for place, page in enumerate(self._pages):
            ring[place].copy_(source[page], non_blocking=True)


def fetch_rate(engine: Engine, memory: Offloaded | HostLayers, nbytes: int) -> float:
    """Return GB/s of the fetches of one pass alone, of pages or of weights, captured in one graph."""
    places = memory.fetched if isinstance(memory, Offloaded) else memory.places

    def all_layers() -> None:
        for source, target in zip(memory.source, memory.target):
            fetch(None, places, source, target, config=engine.model.fetch_config)

    return nbytes / captured_seconds(all_layers) / 1e9


def copy_rate(memory: Offloaded, host: int) -> float:
    """Return GB/s of copies of `host` pages of four layers, a copy for each page of a layer, captured in one graph."""
    sources, layers = memory.fetched[1 : 1 + host].tolist(), min(4, len(memory.source))

    def some_layers() -> None:
        for source, target in zip(memory.source[:layers], memory.target):
            for place, page in enumerate(sources):
                target[place].copy_(source[page], non_blocking=True)

    return 8 * memory.target[0].shape[1] * host * layers / captured_seconds(some_layers) / 1e9


def captured_seconds(enqueue: Callable[[], None]) -> float:
    """Median of the replays of what it enqueues."""
    enqueue()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        enqueue()
    for _ in range(RATE_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return spread(times)[0]


def offload_figures(times: list[float], nbytes: int, rates: dict) -> dict:
    """From seconds a token, bytes a token over PCIe, and GB/s. `over_needed`: the time to that of the bytes alone."""
    median, p5, p95 = spread(times, 1e6)
    found = {"us_per_token": round(median, 2), "us_p5": round(p5, 2), "us_p95": round(p95, 2), "host_bytes": nbytes}
    if rates:
        gbs = nbytes / median / 1e3
        found |= {name: round(rate, 2) for name, rate in rates.items()} | {"pcie_gbs": round(gbs, 2)}
        found |= {"pct_fetch": round(100 * gbs / rates["fetch_gbs"], 1)}
        found |= {"over_needed": round(rates["fetch_gbs"] / gbs, 3)}
    return found


def weights(args, output) -> list[dict]:
    """The step with --weights GiB of the last layers in the host's memory, behind --context tokens on the device."""
    rows = []
    engine = offload_engine(args, args.context + args.steps + 2, None, None)
    on_host = engine.plan.host_layers
    host = engine.model.weights.host
    assert host is not None
    nbytes = sum(source.nbytes for source in host.source)
    rates = {"fetch_gbs": fetch_rate(engine, host, nbytes)}
    for name, steps, _ in graph_ways(engine, lambda: None):
        with stepping(engine, steps):
            times = time_decode(engine, args.context, args.steps, args.runs)
        check_running(engine, name)
        row = {"bench": "offload-weights"} | model_facts(engine, args) | {"variant": name, "host_layers": on_host}
        row |= {"context": args.context, "steps": args.steps, "runs": args.runs}
        row |= offload_figures(times, nbytes, rates) | {"captures": getattr(steps, "captures", 0)}
        rows.append(row | run_facts(engine.device))
        output.note(f"{counted(on_host, 'layer')} on the host, {name}: {row['us_per_token']:,.0f} µs a token")
    return rows


def swap(args) -> dict:
    """Two conversations of --context tokens on a device that holds one: a turn of one that comes back from the host,
    and one whose K/V are computed again."""
    capacity = args.context + SWAP_ROOM
    pages = -(-capacity // PAGE)
    engine = offload_engine(args, capacity, pages, Offload(2 * pages, 0, args.ring))
    params = engine.default_params(temperature=0, max_tokens=1, ignore_eos=True)
    first = prompt_ids(engine.config, args.context)
    second = [(token + 1) % engine.config.vocab_size for token in first]
    times: dict[bool, list[float]] = {True: [], False: []}
    for run in range(args.runs + WARM_UP):
        for back in (False, True):
            engine.generate(second, params)  # which pushes the other one out
            result = engine.generate(first, params, reuse_prefix=back)
            if result.error or (result.usage.reused_tokens > 0) != back:
                raise GenerationError(result.error or "the conversation was not found again")
            if run >= WARM_UP:
                times[back].append(result.timings.ttft)
    nbytes = args.context * kv_bytes_per_token(engine.config, torch.bfloat16)
    returned, anew = (spread(times[key], 1e3)[0] for key in (True, False))
    row = {"bench": "offload-swap"} | model_facts(engine, args) | {"context": args.context, "runs": args.runs}
    row |= {"back_ms": round(returned, 2), "anew_ms": round(anew, 2), "ratio": round(anew / returned, 2)}
    return row | {"both_ways_gbs": round(2 * nbytes / returned / 1e6, 1)} | run_facts(engine.device)


def read_and_continue(args, tokens: int) -> dict:
    """A prompt of so many tokens, with --kv-gib of K/V on the device, and --steps tokens after it."""
    config = PRESETS[args.preset]
    capacity = tokens + args.steps + 1
    wanted = -(-capacity // PAGE)
    device = min(int(args.kv_gib * 2**30) // (PAGE * kv_bytes_per_token(config, torch.bfloat16)), wanted)
    engine = offload_engine(args, capacity, device, Offload(wanted, wanted - device, args.ring))
    ids, found = prompt_ids(engine.config, tokens), []
    params = engine.default_params(temperature=0, max_tokens=args.steps, ignore_eos=True)
    for _ in range(2):  # the first captures and loads what comes for the first time
        result = engine.generate(ids, params, reuse_prefix=False)
        if result.error:
            raise GenerationError(result.error)
        found.append(result)
    used = torch.cuda.max_memory_allocated(engine.device)
    host = wanted - device
    row = {"bench": "offload-prompt"} | model_facts(engine, args) | {"prompt_tokens": tokens, "ring": args.ring}
    row |= {"device_pages": device, "host_pages": host, "kv_gib": args.kv_gib, "steps": args.steps}
    row |= {"ttft_s": round(result.timings.ttft, 3), "tokens_equal": found[0].token_ids == found[1].token_ids}
    row |= {"prompt_tokens_per_second": round(tokens / result.timings.ttft), "allocated_gib": round(used / 2**30, 2)}
    row |= {"us_per_token": round(1e6 * result.timings.decode / max(args.steps - 1, 1), 1)}
    return row | run_facts(engine.device)
