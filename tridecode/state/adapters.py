"""Adapters on the device: a pool with places for a fixed number of adapters, and the choice of those that it holds.

The pool never moves, so captured passes read it. A thread loads an adapter into a place that no request uses, while
passes run. The least recently used adapter leaves the pool first. All adapters stay in host memory, so none is read
from a file again.
"""

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch

from ..blocks.adapter import Adapter
from ..blocks.declarations import Linear
from ..blocks.spec import ModelSpec
from ..errors import EngineClosed
from ..kernels.linear.adapters import MAX_PARTS, RANK_STEP, LinearAdapters
from ..kernels.linear.shrink import MAX_SPLIT
from ..kernels.sort_pairs import TILE_FIELDS, PairTiles
from ..tensors import aligned, short_repr

TILE = 8  # Maximum number of rows of a tile of rows with the same adapter.
PROMPT_TILE = 16  # The same in prompt passes.
STAGED_BYTES = 2**23  # Bytes of each of two staging buffers, through which adapters are copied to the device.
log = logging.getLogger("tridecode")


class RowAdapters(NamedTuple):
    """The adapters of the rows of a pass.

    Args:
        numbers, listed, ordered, tile, y: see LinearAdapters. y has room for each linear.
    """

    numbers: torch.Tensor
    listed: torch.Tensor
    ordered: PairTiles
    tile: int
    y: torch.Tensor


class Place(NamedTuple):
    """The part of an adapter's row of the pool that belongs to one linear.

    Args:
        number: number of the linear.
        a, b, end: where its matrices begin, and where B ends.
        linear: the declaration of the linear.
    """

    number: int
    a: int
    b: int
    end: int
    linear: Linear

    @property
    def ends(self) -> tuple[int, ...]:
        """For each part of the linear, the row at which it ends."""
        ends, at = [], 0
        for part in self.linear.parts:
            at += part.rows
            ends.append(at)
        return tuple(ends)


Places = Mapping[tuple[int, str], Place]


@dataclass(frozen=True)
class AdapterPool:
    """The adapters of a model on its device. Adapter i is in row i - 1 of `weights`. 0 means no adapter.

    Args:
        weights: [adapters, elements of all linears]. A smaller rank than the maximum leaves elements unused.
        ranks: int32 [linears, adapters + 1].
        slots: int32 [slots], the adapter of each slot.
        places: (layer, name of the linear) -> its part of a row of `weights`.
        decode, prompt: the adapters of rows, of decode and of prompt passes.
        staged_ranks: int32 [linears], the ranks of the adapter that is being loaded.
    """

    weights: torch.Tensor
    ranks: torch.Tensor
    slots: torch.Tensor
    places: Places
    decode: RowAdapters
    prompt: RowAdapters
    staged_ranks: torch.Tensor

    def __repr__(self) -> str:
        return short_repr(self, self.weights, adapters=len(self), nbytes=self.weights.nbytes)

    def __len__(self) -> int:
        return len(self.weights)

    def rows(self, rows: int, prompt: bool) -> tuple[object, ...]:
        """Return the arguments of `adapter_rows` after the first two, for passes of `rows` rows."""
        own = self.prompt if prompt else self.decode
        return self.slots, own.numbers[:rows], own.listed, own.ordered, len(self), own.tile

    def linear(self, layer: int, name: str, rows: int, prompt: bool, splits: int = 1) -> LinearAdapters:
        """Return the adapters of a linear for passes of `rows` rows.

        Args:
            prompt: whether the pass is a prompt pass.
            splits: number of sums that make up A x.
        """
        place, own = self.places[layer, name], self.prompt if prompt else self.decode
        a, b = self.weights[:, place.a : place.b], self.weights[:, place.b : place.end]
        return LinearAdapters(
            a, b, self.ranks[place.number], own.numbers[:rows], own.listed, own.ordered, own.tile,
            own.y[:splits, :rows], place.linear.k, place.ends,
        )  # fmt: skip

    def fill(self, rank: int) -> None:
        """Fill the pool with random adapters of this rank, for benchmarks. All slots get the first adapter."""
        self.weights.normal_(std=1e-3)
        self.ranks[:, 1:] = aligned(rank, RANK_STEP)
        self.assign(1)

    def assign(self, count: int) -> None:
        """Let the slots use the first `count` adapters in turn, for benchmarks."""
        self.slots.copy_(torch.arange(len(self.slots)) % count + 1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        named = {name: getattr(self, name) for name in ("weights", "ranks", "slots", "staged_ranks")}
        for form, own in ("decode", self.decode), ("prompt", self.prompt):
            tensors = {"numbers": own.numbers, "listed": own.listed, "y": own.y} | own.ordered._asdict()
            named |= {f"{form}.{name}": tensor for name, tensor in tensors.items()}
        return named

    def copies(self, number: int, adapter: Adapter) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies that store an adapter under its number: (target, source in host memory), both 1-D."""
        row = self.weights[number - 1]
        for key, matrices in adapter.linears.items():
            place = self.places[key]
            for begin, matrix in (place.a, matrices.a), (place.b, matrices.b):
                yield row[begin : begin + matrix.numel()], matrix.view(-1)

    def ranks_of(self, adapter: Adapter) -> torch.Tensor:
        """Return the rank of an adapter in each linear, int32 [linears], in host memory."""
        ranks = torch.zeros(len(self.places), dtype=torch.int32)
        for key, matrices in adapter.linears.items():
            ranks[self.places[key].number] = matrices.rank
        return ranks


def places_of(spec: ModelSpec, max_rank: int) -> tuple[dict[tuple[int, str], Place], int]:
    """Return the place of each linear outside of experts in an adapter's row of the pool, and the row's elements."""
    places: dict[tuple[int, str], Place] = {}
    at = 0
    for index, layer in enumerate(spec.layers):
        for linear in (each for each in layer.linears() if not each.experts):
            assert len(linear.parts) <= MAX_PARTS, f"{linear.name} has {len(linear.parts)} parts"
            b = at + len(linear.parts) * max_rank * linear.k
            end = b + linear.n * max_rank
            places[index, linear.name] = Place(len(places), at, b, end, linear)
            at = end
    return places, at


def adapter_bytes(spec: ModelSpec, dtype: torch.dtype, max_rank: int) -> int:
    """Return the bytes of one adapter in the pool."""
    return places_of(spec, max_rank)[1] * dtype.itemsize


def make_adapters(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, count: int, max_rank: int, slots: int, rows: int,
    prompt_rows: int,
) -> AdapterPool:  # fmt: skip
    """Allocate a pool of `count` adapters.

    Args:
        max_rank: largest rank of an adapter, a multiple of adapters.RANK_STEP.
        rows, prompt_rows: rows of the largest decode pass and prompt pass.
    """
    places, width = places_of(spec, max_rank)
    parts = max(len(place.linear.parts) for place in places.values())

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def row_adapters(rows: int, splits: int, tile: int) -> RowAdapters:
        ordered = PairTiles(integers(rows), integers(rows, TILE_FIELDS), integers(1))
        # fp16 cannot hold large sums.
        sums_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        sums = torch.zeros(splits, rows, parts * max_rank, dtype=sums_dtype, device=device)
        return RowAdapters(integers(rows), integers(1 + slots), ordered, tile, sums)

    return AdapterPool(
        weights=torch.zeros(count, width, dtype=dtype, device=device),
        ranks=integers(len(places), count + 1),
        slots=integers(slots),
        places=places,
        decode=row_adapters(rows, MAX_SPLIT, TILE),
        prompt=row_adapters(prompt_rows, 1, PROMPT_TILE),
        staged_ranks=integers(len(places)),
    )


class AdapterLoad(NamedTuple):
    """The adapters on the device: their number, the maximum, and the copies to the device so far."""

    on_device: int
    size: int
    loads: int


@dataclass(eq=False)
class _Resident:
    """An adapter in the pool, or on its way there.

    Args:
        used: the clock when the adapter was last used.
        loading: the copy to the device. None before it begins.
    """

    adapter: Adapter
    used: int
    loading: Future[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether the copy has ended, with or without an error."""
        return self.loading is not None and self.loading.done()

    @property
    def error(self) -> BaseException | None:
        """The error of a copy that has ended, or None."""
        return self.loading.exception() if self.loading is not None and self.loading.done() else None


class Residents:
    """The adapters that the pool holds. It has no lock: only the scheduler calls methods other than `names` and `load`.

    Each change is one assignment, so the state is valid after a KeyboardInterrupt at any line.
    """

    def __init__(self, pool: AdapterPool):
        self.pool = pool
        self._residents: dict[int, _Resident] = {}  # Number of an adapter -> the adapter.
        self._clock = 0
        self._threads = ThreadPoolExecutor(1, "tridecode-adapters")
        self._closed = False
        self.loads = 0  # Number of copies to the device so far.
        device, dtype = pool.weights.device, pool.weights.dtype
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            buffers = torch.empty(2, STAGED_BYTES // dtype.itemsize, dtype=dtype, pin_memory=True)
            self._staging = [(buffer, torch.cuda.Event()) for buffer in buffers]

    def acquire(self, adapter: Adapter, used: Collection[int]) -> int | None:
        """Return the number of an adapter if passes may read it. Otherwise begin to load it, and return None.

        If requests use all adapters of the pool, the adapter is not loaded yet.

        Args:
            used: numbers of adapters that requests use.

        Raises:
            Exception: the error of the copy to the device.
        """
        number = self._number(adapter)
        if number is None:
            number = self._free_place(used)
            if number is None:
                return None
            self._residents[number] = _Resident(adapter, self._tick())
        resident = self._residents[number]
        if resident.loading is None:  # An interrupt may have ended an earlier call here.
            self.loads += 1
            resident.loading = self._threads.submit(self._load, number, adapter, self._passes_before())
        if not resident.ready:
            return None
        if error := resident.error:
            del self._residents[number]
            raise error
        resident.used = self._tick()
        return number

    @property
    def has_room(self) -> bool:
        """Whether the pool has an empty place."""
        return len(self._residents) < len(self.pool)

    def loading(self, adapter: Adapter) -> bool:
        """Return whether an adapter is being loaded."""
        number = self._number(adapter)
        return number is not None and not self._residents[number].ready

    def forget(self, adapter: Adapter, used: Collection[int]) -> None:
        """Remove an adapter from the pool. If requests use it, or it is being loaded, it leaves before all others.

        Args:
            used: numbers of adapters that requests use.
        """
        if (number := self._number(adapter)) is not None:
            if number in used or not self._residents[number].ready:
                self._residents[number].used = -1
            else:
                del self._residents[number]

    def wait(self, seconds: float) -> None:
        """Wait until an adapter is loaded, at most for this time."""
        copies = [resident.loading for resident in self._residents.values() if not resident.ready]
        if pending := [each for each in copies if each is not None]:
            wait_for(pending, seconds, "FIRST_COMPLETED")

    def close(self) -> None:
        """Stop the copies to the device, and wait until their thread has ended."""
        self._closed = True
        self._threads.shutdown()
        self._residents.clear()  # A copy that ended with an error refers to the pool.

    def names(self) -> list[str]:
        """Return the names of the adapters in the pool. Any thread may call this."""
        residents = list(self._residents.values())
        return [resident.adapter.name for resident in residents if resident.ready and resident.error is None]

    def load(self) -> AdapterLoad:
        """Return the number of adapters in the pool, and of copies. Any thread may call this."""
        return AdapterLoad(len(self.names()), len(self.pool), self.loads)

    def assert_consistent(self, used: Collection[int]) -> None:
        """Check that no adapter is in the pool twice, and that the adapters that requests use are ready."""
        adapters = [resident.adapter for resident in self._residents.values()]
        assert len(set(adapters)) == len(adapters), "an adapter is in the pool twice"
        assert set(self._residents) <= set(range(1, len(self.pool) + 1))
        assert all(self._residents[number].ready for number in used if number), (
            "a request uses an adapter that is not ready"
        )

    def _number(self, adapter: Adapter) -> int | None:
        return next((number for number, resident in self._residents.items() if resident.adapter is adapter), None)

    def _free_place(self, used: Collection[int]) -> int | None:
        """Return an empty place, or that of the least recently used adapter that no request uses."""
        if empty := set(range(1, len(self.pool) + 1)) - set(self._residents):
            return min(empty)
        idle = [number for number, resident in self._residents.items() if resident.ready and number not in used]
        return min(idle, key=lambda number: self._residents[number].used, default=None)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _passes_before(self) -> torch.cuda.Event | None:
        """Return an event after all passes that were enqueued. They may read the adapter that leaves the pool."""
        device = self.pool.weights.device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @torch.inference_mode()
    def _load(self, number: int, adapter: Adapter, before: torch.cuda.Event | None) -> None:
        """Copy an adapter to the device. A thread of its own runs this."""
        started, pool = time.perf_counter(), self.pool
        if before is None:
            for place, matrix in self._copies(number, adapter):
                place.copy_(matrix)
            pool.ranks[:, number].copy_(pool.ranks_of(adapter))
        else:
            with torch.cuda.device(pool.weights.device), torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                self._copy(number, adapter)
                self._stream.synchronize()
        size, milliseconds = adapter.nbytes / 2**20, 1e3 * (time.perf_counter() - started)
        log.info("loaded adapter %s (%.1f MiB) in %.0f ms", adapter.name, size, milliseconds)

    def _copies(self, number: int, adapter: Adapter) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies that store an adapter. Raises EngineClosed after `close`."""
        for copy in self.pool.copies(number, adapter):
            if self._closed:
                raise EngineClosed
            yield copy

    def _copy(self, number: int, adapter: Adapter) -> None:
        """Copy an adapter through staging buffers, on the current stream. One is filled while the other is copied."""
        pool, ring, size = self.pool, cycle(self._staging), len(self._staging[0][0])
        for place, matrix in self._copies(number, adapter):
            for to, part in zip(place.split(size), matrix.split(size)):
                buffer, copied = next(ring)
                copied.synchronize()
                staged = buffer[: len(part)]
                staged.copy_(part)
                to.copy_(staged, non_blocking=True)
                copied.record()
        pool.staged_ranks.copy_(pool.ranks_of(adapter))
        pool.ranks[:, number].copy_(pool.staged_ranks)
