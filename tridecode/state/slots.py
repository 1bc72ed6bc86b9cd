"""Slots: the places of active requests on the device, and the writes that fill them in stream order."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from .. import layout
from ..layout import MAX_SNAPSHOTS, Chunk, packed
from ..sampling import SamplingParams
from .adapters import AdapterPool, Residents
from .kv import KVCache
from .pages import PagePool
from .prefix import Node, PrefixCache
from .records import RecordPool
from .slot import Slot
from .snapshots import Snapshot, SnapshotPool, last_messages, snapshot_positions

if TYPE_CHECKING:
    from ..blocks.adapter import Adapter
    from ..step.workspace import PromptBuffers, Workspace


class SlotModel(Protocol):
    """The parts of a model (step/model.py: DecodeModel) that slots read and write."""

    @property
    def workspace(self) -> "Workspace":
        """Device state of the rows and slots."""
        ...

    @property
    def prompt(self) -> "PromptBuffers":
        """Buffers of prompt passes."""
        ...

    @property
    def kv(self) -> KVCache:
        """K/V of all slots."""
        ...

    @property
    def recurrent(self) -> RecordPool | None:
        """The records of layers with recurrent state, or None."""
        ...

    @property
    def pool(self) -> AdapterPool | None:
        """The adapters on the device, or None."""
        ...

    @property
    def fixed_chunk(self) -> int:
        """Rows of each prompt pass in batch-invariant mode; 0 in other modes."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        ...

    @property
    def rows(self) -> int:
        """Rows of the largest decode pass."""
        ...


# Number of copies of one kind that may be pending on the GPU before the host waits for the oldest one.
STAGED_WRITES = 4


class StagingBuffer:
    """Pinned host memory from which rows of device tensors are written without waiting.

    The host waits for a copy only when `count` later copies have been started.

    Args:
        tensors: device tensors [rows, ...]. Each staged row has the shape and dtype of one of their rows.
        count: number of staged rows.
    """

    def __init__(self, *tensors: torch.Tensor, count: int = STAGED_WRITES):
        self._device, self._used = tensors[0].device, 0
        pin = self._device.type == "cuda"
        self._rows = list(zip(*(torch.zeros(count, *t.shape[1:], dtype=t.dtype, pin_memory=pin) for t in tensors)))
        self._copied = [torch.cuda.Event() if pin else None for _ in range(count)]

    @contextmanager
    def next(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield a staged row of each tensor that no copy reads.

        Copies that are started within the context end before the row is reused.
        """
        number = self._used % len(self._rows)
        self._used += 1
        if copied := self._copied[number]:
            copied.synchronize()  # Usually the copy has ended long ago.
        try:
            yield self._rows[number]
        finally:  # This also runs after an interrupt, because the first copy may have started.
            if copied:
                copied.record(torch.cuda.current_stream(self._device))


class Slots:
    """The slots of a model, their pages and records, and the prefix tree over those of earlier requests.

    `recover` can rebuild all counts from the list of pages of each slot and the prefix tree, after an interrupt at any
    line. `filled` of a slot never exceeds the positions that its pages store.

    Args:
        model: the model whose workspace and K/V cache the slots write.
        sharing: whether later requests may reuse the pages and snapshots of earlier ones.
    """

    def __init__(self, model: SlotModel, sharing: bool = True):
        self.model, self.page, self._sharing = model, model.kv.page, sharing
        self._slots = [Slot(number) for number in range(len(model.workspace.tokens))]
        self.pages = PagePool(model.kv.pages)
        self.snapshots = SnapshotPool(len(self), model.recurrent.snapshots) if model.recurrent else None
        self.cache = PrefixCache(self.pages, self.page, self.snapshots)
        self.reset_records()
        self.adapters = Residents(model.pool) if model.pool is not None else None
        ws = model.workspace
        several = max(len(self), STAGED_WRITES)  # One pass may start a request in every slot.
        self._texts = StagingBuffer(ws.tokens, model.kv.page_table, count=several)
        self._states = StagingBuffer(ws.meta, ws.samp, count=several)
        self._prompt_tables = model.prompt.chunks, model.prompt.records, model.prompt.snapshots
        self._biases = StagingBuffer(ws.bias)
        self._chunks = StagingBuffer(*(table[None] for table in self._prompt_tables))

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def close(self) -> None:
        """Stop the copies of adapters."""
        if self.adapters is not None:
            self.adapters.close()

    # ---- bookkeeping on the host

    def max_prompt_tokens(self) -> int:
        """Return the maximum number of prompt tokens in one pass."""
        return self.model.prompt.rows - self.model.rows

    def allocated(self, slot: Slot) -> int:
        """Return the number of positions that the slot's pages can store."""
        return len(slot.pages) * self.page

    def pages_for(self, positions: int) -> int:
        """Return the number of pages that store `positions` positions."""
        return -(-positions // self.page)

    def available(self) -> int:
        """Return the number of pages that are free or can be evicted from the prefix tree."""
        return self.pages.free + self.cache.evictable()

    def admit(self, ids: "array[int]", positions: int, salt: Hashable = "") -> Slot | None:
        """Assign an idle slot to a request whose tokens start with `ids`; return None if too few pages are available.

        The slot shares the pages that hold the longest cached prefix of `ids`; its `filled` is the length of that
        prefix. After this call, enough pages are free for the rest of the `positions` positions. If the model has
        recurrent state, the slot begins with a copy of the snapshot at the end of that prefix.
        """
        match = self.cache.match(ids, salt)
        pages = match.pages or match
        extends_leaf = pages.extends_leaf
        if self.model.fixed_chunk:
            match = match.whole_pages
        shared, tail = [node.page for node in match.nodes], match.tail
        slot = next(slot for slot in self if not slot.busy)
        # The slot's reference prevents the eviction of these pages.
        slot.pages = shared if tail is None else [*shared, tail.page]
        self.pages.share(slot.pages)
        self._use(slot, match.end)
        needed = self.pages_for(positions) - len(shared)
        lacking = needed - self.available()
        # If more pages are missing, the request waits, and the tree keeps the end of the conversation.
        if tail is not None and lacking <= 1 and (extends_leaf or lacking == 1):
            released = self.cache.release_to_user(tail, with_descendants=lacking == 1, end=match.tokens(self.page))
            if released is not None:
                needed, tail = needed - 1, None  # The slot is now the only user, so it writes the page without a copy.
                slot.snapshots = released
        if needed > self.available():
            self._release_pages(slot)
            return None
        self.make_room(needed)
        if tail is not None:
            (own,) = self._take(1)
            self._copy_page(tail.page, own)
            slot.pages[-1] = own
            self.pages.release([tail.page])
        self.cache.touch(match)
        self._use(slot, match.nodes[-1] if match.nodes else None)
        slot.tokens, slot.shared = ids, len(shared) * self.page
        slot.filled = slot.reused = match.tokens(self.page)
        slot.busy, slot.salt, slot.extends_leaf = True, salt, extends_leaf
        if match.snapshot and self.model.recurrent:
            self.model.recurrent.copy(match.snapshot.record, slot.records[0])
        slot.covered, slot.reach = slot.filled, pages.tokens(self.page)
        return slot

    @torch.inference_mode()
    def _copy_page(self, source: int, target: int) -> None:
        self.model.kv.pool[target].copy_(self.model.kv.pool[source])

    def publish(self, slot: Slot, read: int) -> None:
        """Add the whole pages of the first `read` tokens to the prefix tree. Enqueued passes write their K/V.

        The last of these passes was enqueued without an error, so the slot continues with the record that it writes.
        """
        slot.records.reverse()
        slot.covered = read
        slot.snapshots, slot.taking = slot.snapshots + slot.taking, []
        slot.filled = read // self.page * self.page
        self._insert(slot)

    def _insert(self, slot: Slot) -> None:
        """Add the slot's filled pages and their snapshots to the prefix tree, if requests share prefixes."""
        if self._sharing:
            ids, pages = slot.tokens[: slot.filled], slot.pages[: self.pages_for(slot.filled)]
            complete = [snapshot for snapshot in slot.snapshots if snapshot.position <= slot.filled]
            self._use(slot, self.cache.insert(ids, pages, slot.salt, slot.extends_leaf, slot.node, complete))
            slot.snapshots = [snapshot for snapshot in slot.snapshots if snapshot not in complete]

    def _use(self, slot: Slot, node: Node | None) -> None:
        """Register the slot as a user of this node and its ancestors in the prefix tree, and of no other node."""
        before, slot.node = slot.node, node
        self.cache.use(node, before)

    def make_room(self, pages: int) -> bool:
        """Evict unused pages until `pages` pages are free; return whether that succeeded."""
        if pages > self.pages.free:
            self.cache.evict(pages - self.pages.free)
        return pages <= self.pages.free

    def _take(self, pages: int) -> list[int]:
        """Take `pages` free pages. Raises OutOfPages."""
        return self.pages.take(pages)

    def extra_pages(self, needed: int) -> int:
        """Return how many pages a request may take in addition to the `needed` ones.

        Each slot gets an equal share of the free pages. With one slot the share is all of them, so the page table is
        written once.
        """
        return max(self.pages.free - max(needed, 0), 0) // len(self)

    def release(self, slot: Slot) -> None:
        """Make the slot idle: add its filled pages and its record to the prefix tree and free its other pages.

        In batch-invariant mode the tree gets only state that was published before, because K/V of decode passes and of
        prompt passes differ in their bits.
        """
        if not self.model.fixed_chunk:
            self._give_record(slot)
            self._insert(slot)
        self._release_pages(slot)
        slot.busy = False
        self._slots[slot.number] = Slot(slot.number, slot.generation, records=slot.records)

    def _give_record(self, slot: Slot) -> None:
        """Make the slot's record a snapshot and give the slot another one, unless a pass in flight writes the record.

        The snapshot is after the first row of the last pass. Updates by accepted drafts are not replayed: the next turn
        of a chat computes these few tokens again, together with its own tokens.
        """
        settled = slot.stopped or not slot.in_flight
        if self._sharing and settled and 0 < slot.covered <= slot.filled:
            if (record := self._take_record()) is not None:
                slot.snapshots.append(Snapshot(slot.covered, slot.records[0]))
                slot.records[0] = record

    def _take_record(self) -> int | None:
        """Take a record for a snapshot. If none is free, drop the least recently used snapshot of the prefix tree."""
        if self.snapshots is None:
            return None
        record = self.snapshots.take()
        return self.snapshots.take() if record is None and self.cache.drop_snapshot() else record

    def plan_snapshots(self, slot: Slot, end: int, chat: bool) -> None:
        """Choose the positions at which the passes that read the slot's tokens up to `end` take snapshots."""
        if self.snapshots is not None and self._sharing:
            messages = last_messages(slot.tokens[:end]) if chat else []
            slot.planned = snapshot_positions(slot.filled, end, slot.reach, messages, self.snapshots.size)

    def _drop_snapshots(self, snapshots: list[Snapshot]) -> None:
        """Free the records of snapshots of a slot, and remove them from its list."""
        for snapshot in snapshots:
            assert self.snapshots is not None
            self.snapshots.free(snapshot.record)
        snapshots.clear()

    def reset_records(self) -> None:
        """Give each slot two records that no snapshot of the prefix tree has, and free all others."""
        if self.snapshots is not None:
            for slot, records in zip(self, self.snapshots.recover(self.cache.snapshots())):
                slot.records = records

    @property
    def residents(self) -> Residents:
        """The adapters on the device, if the engine has memory for adapters."""
        assert self.adapters is not None
        return self.adapters

    def acquire_adapter(self, adapter: "Adapter") -> int | None:
        """Return the number of an adapter on the device. If it is not there, begin to load it, and return None.

        Raises:
            RuntimeError: the adapter could not be copied to the device.
        """
        return self.residents.acquire(adapter, self.used_adapters())

    def prefetch_adapter(self, adapter: "Adapter") -> None:
        """Begin to load an adapter if the device has an empty place."""
        if self.residents.has_room:
            self.acquire_adapter(adapter)

    def used_adapters(self) -> set[int]:
        """Return the numbers of the adapters of active requests."""
        return {slot.adapter for slot in self if slot.busy}

    @torch.inference_mode()
    def set_adapter(self, slot: Slot, number: int) -> None:
        """Let the next passes of a slot use this adapter, in stream order."""
        slot.adapter = number
        if self.adapters is not None:
            self.adapters.pool.slots[slot.number].fill_(number)

    def invalidate(self, slot: Slot) -> None:
        """Remove the K/V and snapshots that the slot reused or computed from the prefix tree."""
        slot.filled = 0
        self._drop_snapshots(slot.snapshots)
        self.cache.forget(slot.tokens, salt=slot.salt)

    def _release_pages(self, slot: Slot) -> None:
        self._use(slot, None)
        for snapshots in (slot.snapshots, slot.taking):
            self._drop_snapshots(snapshots)
        pages, slot.pages, slot.filled, slot.shared = slot.pages, [], 0, 0
        self.pages.release(reversed(pages))  # The order is reversed, so that `take` returns the pages in their order.

    @torch.inference_mode()
    def recover(self) -> None:
        """Make all slots idle, also on the device, and recount the pages. Works after an interrupt at any line."""
        self.model.workspace.meta[:, layout.STATUS].fill_(layout.LIMIT_REACHED)
        for slot in self:
            slot.node, slot.covered = None, 0
        self.cache.recover()
        self.pages.recount([*(slot.pages for slot in self), self.cache.pages()])
        for slot in [*self]:
            if slot.filled > self.allocated(slot):
                slot.filled = 0
            self.release(slot)
        self.reset_records()

    def assert_consistent(self) -> None:
        """Check that reference counts match the slots and the prefix tree.

        Only pages in the tree belong to two slots, and no slot claims more positions than its pages store.
        """
        self.cache.assert_consistent(slot.node for slot in self)
        self.pages.assert_consistent([*(slot.pages for slot in self), self.cache.pages()])
        if self.adapters is not None:
            self.adapters.assert_consistent(self.used_adapters())
        if self.snapshots is not None:
            records = [snapshot.record for slot in self for snapshot in (*slot.snapshots, *slot.taking)]
            records += [record for slot in self for record in slot.records]
            self.snapshots.assert_consistent(self.cache.snapshots(), records)
        own = [page for slot in self for page in slot.pages[slot.shared // self.page :]]
        assert len(set(own)) == len(own), "a page is written by two slots"
        for number, slot in enumerate(self):
            end = min(self.allocated(slot), len(slot.tokens))
            assert slot.number == number and slot.filled <= end, f"slot {number} claims more than its pages store"
            assert slot.busy or not (slot.pages or slot.snapshots), f"slot {number} is idle but has pages"

    # ---- writes to the device, in stream order

    @torch.inference_mode()
    def write_tokens(self, slot: Slot, ids: Sequence[int], positions: int) -> None:
        """Write a request's tokens and its row of the page table, with pages for `positions`.

        No pass may run for the slot until `begin` has been called. Raises OutOfPages.
        """
        ws = self.model.workspace
        slot.pages += self._take(max(self.pages_for(positions) - len(slot.pages), 0))
        with self._texts.next() as (tokens, table):
            tokens.numpy()[: len(ids)] = packed(ids)
            ws.tokens[slot.number, : len(ids)].copy_(tokens[: len(ids)], non_blocking=True)
            self._write_table(slot.number, table, slot.pages)

    def _write_table(self, slot: int, table: torch.Tensor, pages: Sequence[int]) -> None:
        """Write the slot's row of the page table from `table`, a staged row of it."""
        table.numpy()[: len(pages)] = pages
        self.model.kv.page_table[slot, : len(pages)].copy_(table[: len(pages)], non_blocking=True)

    @torch.inference_mode()
    def begin(
        self,
        slot: Slot,
        row: int,
        params: SamplingParams,
        *,
        position: int,
        n_known: int,
        limit: int,
        stop_ids: Sequence[int],
        prompt: int | None = None,
        source: int = layout.OWN_ROW,
    ) -> int:
        """Start the slot's request as `row` of the passes, at `position`; return its generation.

        Args:
            params: sampling parameters, whose seed is set
            position: position of the first decode pass
            n_known: number of known tokens
            limit: number of tokens at which the request ends
            stop_ids: tokens that end the request
            prompt: number of known tokens that belong to the prompt, by default all; the others were sampled before
            source: row of the enqueued prompt pass that reads `position`
        """
        self._prepare_page(slot, position)
        ws, number, allocated = self.model.workspace, slot.number, self.allocated(slot)
        prompt = n_known if prompt is None else prompt
        slot.generation = slot.generation % layout.MAX_GENERATION + 1
        if params.logit_bias:
            with self._biases.next() as (bias,):
                bias.zero_()
                for token, value in params.logit_bias.items():
                    bias[token] = value
                ws.bias[number].copy_(bias, non_blocking=True)
        with self._states.next() as (meta, samp):
            fill_meta(meta.numpy(), params, number, slot.generation, position, n_known, limit, stop_ids, allocated)
            meta[layout.SOURCE] = source
            meta[layout.RECORD] = slot.records[0] if slot.records else 0
            fill_samp(samp.numpy(), params)
            ws.samp[row].copy_(samp, non_blocking=True)
            if params.penalties:
                in_prompt, sampled = ws.tokens[number, :n_known].long().tensor_split([prompt])
                counts = ws.counts[number].zero_().index_fill_(0, in_prompt, 1)
                counts.index_add_(0, sampled, torch.full_like(sampled, 2, dtype=counts.dtype))
            ws.meta[row].copy_(meta, non_blocking=True)
        return slot.generation

    def _prepare_page(self, slot: Slot, position: int) -> None:
        """Prepare the page that the slot's first decode pass writes."""

    @torch.inference_mode()
    def write_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Write the chunks of the next prompt pass, their records, and the snapshots that the pass takes."""
        rows: list[Sequence[Sequence[int]]] = [chunks]
        if self.snapshots is not None:
            rows += [[self._slots[chunk.slot].records for chunk in chunks], self._take_snapshots(chunks)]
        with self._chunks.next() as staged:
            for table, own, filled in zip(self._prompt_tables, staged, rows):
                own.zero_()
                if filled:
                    own.numpy()[: len(filled)] = filled
                table.copy_(own, non_blocking=True)

    def _take_snapshots(self, chunks: Sequence[Chunk]) -> list[tuple[int, int, int]]:
        """Take records for the snapshots of the next prompt pass; return the rows of its table."""
        rows: list[tuple[int, int, int]] = []
        for chunk in chunks:
            slot = self._slots[chunk.slot]
            self._drop_snapshots(slot.taking)  # not empty if an earlier pass could not be enqueued
            for at in sorted(at for at in slot.planned if chunk.start < at <= chunk.end):
                if len(rows) < MAX_SNAPSHOTS and (record := self._take_record()) is not None:
                    slot.taking.append(Snapshot(at, record))
                    rows.append((slot.number, at, record))
        return rows

    @torch.inference_mode()
    def grow(self, slot: Slot, row: int, pages: int) -> None:
        """Give the slot `pages` more pages, and resume its row if it waits for pages. Raises OutOfPages.

        The page numbers are arguments of launches. Therefore there is no copy from host memory to wait for.
        """
        meta, have = self.model.workspace.meta, len(slot.pages)
        slot.pages += self._take(pages)
        self._extend_table(slot, have)
        meta[row, layout.ALLOCATED].fill_(self.allocated(slot))
        status = meta[row, layout.STATUS]
        status.masked_fill_(status == layout.WAIT, layout.RUN)  # A row that has ended in the meantime stays ended.

    def _extend_table(self, slot: Slot, have: int) -> None:
        """Write the slot's entries of the page table from entry `have` on."""
        for place in range(have, len(slot.pages)):
            self.model.kv.page_table[slot.number, place].fill_(slot.pages[place])

    def before_pass(self) -> None:
        """Flush pending writes before the next pass reads them."""

    @torch.inference_mode()
    def remove_row(self, row: int, last: int) -> None:
        """Make the row idle, and move row `last` to its place."""
        ws = self.model.workspace
        if row != last:
            ws.samp[row].copy_(ws.samp[last])
            ws.meta[row].copy_(ws.meta[last])
        ws.meta[last, layout.STATUS].fill_(layout.LIMIT_REACHED)


def common_prefix(one: "array[int]", other: "array[int]") -> int:
    """Return the number of leading tokens that are equal in both arrays."""
    end, first, step = min(len(one), len(other)), 0, 256
    # Slices are compared much faster than single tokens.
    while first < end and one[first : first + step] == other[first : first + step]:
        first += step
    return next((i for i in range(first, end) if one[i] != other[i]), end)


def fill_meta(
    row: np.ndarray,
    params: SamplingParams,
    slot: int,
    generation: int,
    position: int,
    n_known: int,
    limit: int,
    stop_ids: Sequence[int],
    allocated: int = 0,
) -> None:
    """Fill a row of meta for a new request.

    Args:
        row: int32 [META_WIDTH], written.
        params: sampling parameters with a seed.
        allocated: positions that have pages; 0: all positions up to `limit`.
    """
    assert params.seed is not None
    row[:] = 0
    row[layout.FLAGS] = layout.FLAG_BIAS * bool(params.logit_bias) | layout.FLAG_PENALTIES * params.penalties
    row[layout.FLAGS] |= layout.FLAG_MASK * params.masked
    row[layout.SLOT], row[layout.GENERATION] = slot, generation
    row[layout.N_KNOWN], row[layout.LIMIT], row[layout.ALLOCATED] = n_known, limit, allocated or limit
    row[layout.SEED_LO], row[layout.SEED_HI] = _as_int32(params.seed), _as_int32(params.seed >> 32)
    row[layout.TOP_K], row[layout.N_LOGPROBS] = params.top_k, params.logprobs or 0
    row[layout.N_STOP] = len(stop_ids)
    row[layout.STOP_IDS : layout.STOP_IDS + len(stop_ids)] = stop_ids
    row[layout.POSITION], row[layout.STEP], row[layout.STATUS] = position, 0, layout.RUN
    row[layout.SOURCE] = layout.OWN_ROW


def fill_samp(row: np.ndarray, params: SamplingParams) -> None:
    """Fill a row of samp, fp32 [SAMP_WIDTH]."""
    row[layout.TEMPERATURE], row[layout.TOP_P], row[layout.MIN_P] = params.temperature, params.top_p, params.min_p
    row[layout.REPETITION_PENALTY] = params.repetition_penalty
    row[layout.PRESENCE_PENALTY], row[layout.FREQUENCY_PENALTY] = params.presence_penalty, params.frequency_penalty


def _as_int32(value: int) -> int:
    """Return the low 32 bits of `value` as a signed int32."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
