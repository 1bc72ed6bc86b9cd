"""bench offload with more ways to read K/V in host memory than engines use: copies of pages or layers, direct reads.

    python -m benchmarks.offload --preset qwen3-4b --context 32000 --runs 3 --steps 8

It has the options of `bench offload` for K/V: --preset, --context, --steps, --runs, --host and --ring.
"""

import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.rows import options, run
from tridecode.cli.bench.measure import need_gpu
from tridecode.cli.bench.offload import (
    Variant,
    captured_passes,
    graph_seconds,
    graph_variants,
    kv_on_host,
    offloaded,
)
from tridecode.cli.bench.rows import Row
from tridecode.cli.bench.run import with_commands
from tridecode.cli.bench_options import add_script
from tridecode.engine import Engine
from tridecode.state.offload import Offloaded
from tridecode.step.graphs import DecodePasses, launcher
from tridecode.step.run import Run, launch
from tridecode.tensors import ALIGNED, REGISTERED_BYTES


def parse(argv: list[str] | None):
    """The options of a command line."""
    parser = options("offload", __doc__)
    add_script(parser, "offload", ("runs", "preset", "context", "steps", "host", "ring"))
    parser.set_defaults(what="offload-ways", model=None, weights=None)
    return parser.parse_args(argv)


def measure(args, output) -> list[Row]:
    """Return a row for each share of --host and each way to read K/V."""
    need_gpu()
    return with_commands("python -m benchmarks.offload", args, kv_on_host(args, output, variants, copy_rate))


def variants(engine: Engine, host: int) -> Iterator[Variant]:
    """Yield the ways to read `host` pages of host memory, roughly from the slowest to the fastest."""
    model, run, (slots, memory) = engine.model, launcher(engine.model), offloaded(engine)
    send, layerwise = partial(slots.send, 0, host), partial(captured_passes, model, run, "piecewise")
    if host:
        by_page, by_layer = Copies(launch, model, host, by_layer=False), Copies(launch, model, host, by_layer=True)
        yield "eager, a copy a page", DecodePasses(model, by_page), send
        yield "eager, a copy a layer", DecodePasses(model, by_layer), send
        yield (
            "a graph a layer, a copy a layer, waits",
            layerwise(waiting(by_layer)),
            send,
        )
        yield "a graph a layer, a copy a layer", layerwise(by_layer), send
        yield "one graph, a copy a layer", captured_passes(model, by_layer), send
        if first_cell(memory) is not None:
            direct = captured_passes(model, without_fetches(run))
            yield "one graph, attention reads the host", direct, partial(read_directly, engine, host)
    yield from graph_variants(engine, send)


def waiting(run: Run) -> Run:
    """Wrap `run` so that the host waits for each layer's graph before the next launch."""

    def run_waiting(role: str, op, *args, **options) -> None:
        if role == "attention":
            torch.cuda.current_stream().synchronize()
        run(role, op, *args, **options)

    return run_waiting


def without_fetches(run: Run) -> Run:
    """Wrap `run` without the launches that fill the ring."""

    def run_without(role: str, op, *args, **options) -> None:
        if role not in ("fetch", "fetched"):
            run(role, op, *args, **options)

    return run_without


def first_cell(offload: Offloaded) -> int | None:
    """Return the index of the first whole cell in host memory, relative to the cells of the device.

    The result is None if the index does not fit in a page table.
    """
    cell = offload.cells[0].nbytes
    first = -((offload.cells.data_ptr() - offload.host.data_ptr()) // cell)
    end = first + offload.host.shape[0] * offload.host.shape[1]
    return first if cell % ALIGNED == 0 and -(2**31) <= first and end < 2**31 else None


def read_directly(engine: Engine, host: int) -> None:
    """Send the pages, and write the addresses of host memory, which the device can read, into the page tables.

    Attention then reads K/V of other positions, which takes the same time.
    """
    kv, (slots, memory) = engine.model.kv, offloaded(engine)
    slots.send(0, host)
    layers, first = len(memory.tables), first_cell(memory)
    assert first is not None, "no table can hold the cells of the host's memory"
    places = kv.page_table[0, :host] - len(kv.pool)
    pages = memory.fetched[1:][places.long()]
    numbers = torch.arange(layers, dtype=torch.int32, device=pages.device)[:, None]
    memory.tables[:, 0, :host] = first + pages * layers + numbers


class Copies:
    """A wrapper of `run` that replaces the fetch kernel by copies from host memory.

    There is one copy per page, or with `by_layer` one per layer. A copy per layer reads contiguous memory and therefore
    K/V of other positions, which takes the same time.
    """

    def __init__(self, run: Run, model, host: int, by_layer: bool):
        self._run, self._by_layer, self._count = run, by_layer, host
        offload = model.kv.offload
        self._cell = offload.target[0].shape[1]
        self._pages = offload.fetched[1 : 1 + host].tolist()
        self._flat = offload.host.view(torch.int64).as_strided((offload.host.untyped_storage().nbytes() // 8,), (1,), 0)
        self._words = REGISTERED_BYTES // 8 - offload.source[0].stride(0)

    def __call__(self, role: str, op, *args, **options) -> None:
        if role != "fetch":
            self._run(role, op, *args, **options)
            return
        _, _, source, ring = args
        if self._by_layer:
            layer, count = source.storage_offset() // self._cell, self._count * self._cell
            each = max(
                self._words // count, 1
            )  # Number of layers in the first registered part of host memory. A copy must not cross two parts.
            ring.view(-1)[:count].copy_(self._flat[layer % each * count :][:count], non_blocking=True)
            return
        for place, page in enumerate(self._pages):
            ring[place].copy_(source[page], non_blocking=True)


def copy_rate(memory: Offloaded, host: int) -> dict[str, float]:
    """Return the GB/s of copies of `host` pages of four layers.

    Each page of a layer is a copy, and one graph contains all.
    """
    sources, layers = memory.fetched[1 : 1 + host].tolist(), min(4, len(memory.source))

    def some_layers() -> None:
        for source, target in zip(memory.source[:layers], memory.target):
            for place, page in enumerate(sources):
                target[place].copy_(source[page], non_blocking=True)

    return {
        "copy_gbs": 8 * memory.target[0].shape[1] * host * layers / graph_seconds(memory.host.device, some_layers) / 1e9
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run(args, lambda output: measure(args, output))


if __name__ == "__main__":
    sys.exit(main())
