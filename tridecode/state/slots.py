"""Slots: writes one request's state to its own place on the device, in stream order."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from .. import layout
from ..layout import Chunk, packed
from ..sampling import SamplingParams
from .kv import KVCache
from .pages import PagePool
from .prefix import Node, PrefixCache
from .slot import Slot

if TYPE_CHECKING:
    from ..step.workspace import PromptBuffers, Workspace


class SlotModel(Protocol):
    """The parts of a model (step/model.py: DecodeModel) that slots write."""

    @property
    def workspace(self) -> "Workspace": ...

    @property
    def prompt(self) -> "PromptBuffers": ...

    @property
    def kv(self) -> KVCache: ...

    @property
    def fixed_chunk(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def rows(self) -> int: ...


RECORDS = 4  # writes of one kind that may wait for the GPU before the host waits for the oldest


class Records:
    """Host memory from which rows of some tensors are written: pinned, so that no copy need be waited for before
    `count` others have begun."""

    def __init__(self, *tensors: torch.Tensor, count: int = RECORDS):
        self._device, self._used = tensors[0].device, 0
        pin = self._device.type == "cuda"
        self._rows = list(zip(*(torch.zeros(count, *t.shape[1:], dtype=t.dtype, pin_memory=pin) for t in tensors)))
        self._copied = [torch.cuda.Event() if pin else None for _ in range(count)]

    @contextmanager
    def next(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield a row of each tensor that no copy reads. Copies that begin within the context end before its reuse."""
        number = self._used % len(self._rows)
        self._used += 1
        if copied := self._copied[number]:
            copied.synchronize()  # mostly done long ago
        try:
            yield self._rows[number]
        finally:  # also if an interrupt came after the first copy
            if copied:
                copied.record(torch.cuda.current_stream(self._device))


class Slots:
    """The slots of a model, their pages, and the prefix tree over the pages of earlier requests.

    The slots' lists of pages and the prefix tree are the truth, and `filled` of a slot never exceeds what its pages
    hold. Therefore `recover` repairs all other counts after an interrupt at any line.
    """

    def __init__(self, model: SlotModel, sharing: bool = True):
        self.model, self.page, self._sharing = model, model.kv.page, sharing
        self.pages = PagePool(model.kv.pages)
        self.cache = PrefixCache(self.pages, self.page)
        self._slots = [Slot(number) for number in range(len(model.workspace.tokens))]
        ws = model.workspace
        several = max(len(self), RECORDS)  # as many requests may begin within a pass
        self._texts = Records(ws.tokens, model.kv.page_table, count=several)
        self._states = Records(ws.meta, ws.samp, count=several)
        self._biases, self._chunks = Records(ws.bias), Records(model.prompt.chunks[None])

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    # ---- the host's book-keeping

    def most_read(self) -> int:
        """Tokens of prompts in one pass."""
        return self.model.prompt.rows - self.model.rows

    def room(self, slot: Slot) -> int:
        """Positions that have pages."""
        return len(slot.pages) * self.page

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page)

    def available(self) -> int:
        """Pages that are free, or would be without what nobody uses."""
        return self.pages.free + self.cache.evictable()

    def admit(self, ids: "array[int]", positions: int, salt: str = "") -> Slot | None:
        """Give an idle slot to a request that begins with `ids`, or return None if there are too few pages.

        The slot shares the pages with the longest known prefix of `ids`, whose length is its `filled`. The other pages
        that it needs for `positions` positions are free afterwards.
        """
        match = self.cache.match(ids, salt)
        goes_on = match.goes_on
        if self.model.fixed_chunk:
            match = match.whole
        shared, tail = [node.page for node in match.nodes], match.tail
        slot = next(slot for slot in self if not slot.busy)
        slot.pages = shared if tail is None else [*shared, tail.page]  # the slot holds them, so they are not evicted
        self.pages.share(slot.pages)
        self._use(slot, match.end)
        fresh = self.pages_for(positions) - len(shared)
        lacks = fresh - self.available()
        if tail is not None and (goes_on or lacks > 0) and self.cache.hand_over(tail, with_more=lacks == 1):
            fresh, tail = fresh - 1, None  # only this slot has it now, so it writes there without a copy
        if fresh > self.available():
            self._give_all_back(slot)
            return None
        self.make_room(fresh)
        if tail is not None:
            (own,) = self._take(1)
            self._copy_page(tail.page, own)
            slot.pages[-1] = own
            self.pages.give_back([tail.page])
        self.cache.find(match)
        self._use(slot, match.nodes[-1] if match.nodes else None)
        slot.tokens, slot.filled, slot.shared = ids, match.tokens(self.page), len(shared) * self.page
        slot.busy, slot.salt, slot.goes_on = True, salt, goes_on
        return slot

    @torch.inference_mode()
    def _copy_page(self, source: int, target: int) -> None:
        self.model.kv.pool[target].copy_(self.model.kv.pool[source])

    def publish(self, slot: Slot, read: int) -> None:
        """Let other requests find the whole pages of the first `read` tokens, whose K/V the enqueued passes write."""
        slot.filled = read // self.page * self.page
        self._insert(slot)

    def _insert(self, slot: Slot) -> None:
        """Let other requests find what the slot's pages hold."""
        if self._sharing:
            ids, pages = slot.tokens[: slot.filled], slot.pages[: self.pages_for(slot.filled)]
            self._use(slot, self.cache.insert(ids, pages, slot.salt, slot.goes_on, slot.node))

    def _use(self, slot: Slot, node: Node | None) -> None:
        """Let the slot use this node of the prefix tree with all before it, and no other node."""
        before, slot.node = slot.node, node
        self.cache.use(node, before)

    def make_room(self, pages: int) -> bool:
        """Have that many pages free, if need be by forgetting what nobody uses."""
        if pages > self.pages.free:
            self.cache.evict(pages - self.pages.free)
        return pages <= self.pages.free

    def _take(self, pages: int) -> list[int]:
        """So many free pages. Raises OutOfPages."""
        return self.pages.take(pages)

    def spare(self, needed: int) -> int:
        """Return how many pages a request may take beyond the `needed` ones: an equal share of the free pages for each
        slot. With one slot it is all of them, so its table is written once."""
        return max(self.pages.free - max(needed, 0), 0) // len(self)

    def release(self, slot: Slot) -> None:
        """Make the slot idle. Its K/V can be found by other requests, its other pages are free.

        In the batch-invariant mode only published K/V can be found: K/V of decode passes have other bits than those of
        prompt passes.
        """
        if not self.model.fixed_chunk:
            self._insert(slot)
        self._give_all_back(slot)
        slot.busy = False
        self._slots[slot.number] = Slot(slot.number, slot.generation)

    def discredit(self, slot: Slot) -> None:
        """Let no request find the K/V that the slot has found and computed."""
        slot.filled = 0
        self.cache.forget(slot.tokens, salt=slot.salt)

    def _give_all_back(self, slot: Slot) -> None:
        self._use(slot, None)
        given, slot.pages, slot.filled, slot.shared = slot.pages, [], 0, 0
        self.pages.give_back(reversed(given))  # so that they are taken in their order again

    @torch.inference_mode()
    def recover(self) -> None:
        """Make all slots idle, on the device too, and count the pages again, after an interrupt at any line."""
        self.model.workspace.meta[:, layout.STATUS].fill_(layout.LIMIT_REACHED)
        for slot in self:
            slot.node = None
        self.cache.recover()
        self.pages.recount([*(slot.pages for slot in self), self.cache.pages()])
        for slot in [*self]:
            if slot.filled > self.room(slot):
                slot.filled = 0
            self.release(slot)

    def assert_consistent(self) -> None:
        """Check that every page is free, a slot's or in the prefix tree, and counted as often. Only pages in the tree
        are in two slots, and no slot claims more than its pages hold."""
        found = self.cache.pages()
        self.cache.assert_consistent(slot.node for slot in self)
        self.pages.assert_consistent([*(slot.pages for slot in self), found])
        own = [page for slot in self for page in slot.pages[slot.shared // self.page :]]
        assert len(set(own)) == len(own), "a page is written by two slots"
        for number, slot in enumerate(self):
            most = min(self.room(slot), len(slot.tokens))
            assert slot.number == number and slot.filled <= most, f"slot {number} claims more than its pages hold"
            assert slot.busy or not slot.pages, f"slot {number} is idle and keeps pages"

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
        """The slot's row of the page table, from a row of pinned memory."""
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
        source: int = layout.OWN,
    ) -> int:
        """Start the slot's request as `row` of the passes, at `position`; return its generation.

        Args:
            params: sampling parameters with a seed
            n_known: number of known tokens
            prompt: how many of them belong to the prompt, by default all; the others were sampled before
            source: the row of the prompt pass that has just read `position`
        """
        self._reach(slot, position)
        ws, number, room = self.model.workspace, slot.number, self.room(slot)
        prompt = n_known if prompt is None else prompt
        slot.generation = slot.generation % layout.MAX_GENERATION + 1
        if params.logit_bias:
            with self._biases.next() as (bias,):
                bias.zero_()
                for token, value in params.logit_bias.items():
                    bias[token] = value
                ws.bias[number].copy_(bias, non_blocking=True)
        with self._states.next() as (meta, samp):
            fill_meta(meta.numpy(), params, number, slot.generation, position, n_known, limit, stop_ids, room)
            meta[layout.SOURCE] = source
            fill_samp(samp.numpy(), params)
            ws.samp[row].copy_(samp, non_blocking=True)
            if params.penalties:
                given, sampled = ws.tokens[number, :n_known].long().tensor_split([prompt])
                counts = ws.counts[number].zero_().index_fill_(0, given, 1)
                counts.index_add_(0, sampled, torch.full_like(sampled, 2, dtype=counts.dtype))
            ws.meta[row].copy_(meta, non_blocking=True)
        return slot.generation

    def _reach(self, slot: Slot, position: int) -> None:
        """Prepare the page that the slot's first decode pass writes."""

    @torch.inference_mode()
    def write_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Write the chunks of the next prompt pass."""
        with self._chunks.next() as (table,):
            table.zero_()
            table.numpy()[: len(chunks)] = chunks
            self.model.prompt.chunks.copy_(table, non_blocking=True)

    @torch.inference_mode()
    def grow(self, slot: Slot, row: int, pages: int) -> None:
        """Give the slot that many more pages, and run its row again if it waits for them. Raises OutOfPages.

        The numbers are arguments of launches, so nothing is copied from the host and nothing is waited for.
        """
        meta, have = self.model.workspace.meta, len(slot.pages)
        slot.pages += self._take(pages)
        self._extend_table(slot, have)
        meta[row, layout.ROOM].fill_(self.room(slot))
        status = meta[row, layout.STATUS]
        status.masked_fill_(status == layout.WAIT, layout.RUN)  # a row that has ended meanwhile stays so

    def _extend_table(self, slot: Slot, have: int) -> None:
        """The entries of the slot's pages from the `have`th on."""
        for place in range(have, len(slot.pages)):
            self.model.kv.page_table[slot.number, place].fill_(slot.pages[place])

    def before_pass(self) -> None:
        """What the next pass reads is to be written now, if it was not before."""

    @torch.inference_mode()
    def vacate(self, row: int, last: int) -> None:
        """Make the row idle and put the last one in its place."""
        ws = self.model.workspace
        if row != last:
            ws.samp[row].copy_(ws.samp[last])
            ws.meta[row].copy_(ws.meta[last])
        ws.meta[last, layout.STATUS].fill_(layout.LIMIT_REACHED)


def common_prefix(one: "array[int]", other: "array[int]") -> int:
    """Return the number of leading tokens that both have."""
    most, first, step = min(len(one), len(other)), 0, 256
    while first < most and one[first : first + step] == other[first : first + step]:  # far faster than one by one
        first += step
    return next((i for i in range(first, most) if one[i] != other[i]), most)


def fill_meta(
    row: np.ndarray,
    params: SamplingParams,
    slot: int,
    generation: int,
    position: int,
    n_known: int,
    limit: int,
    stop_ids: Sequence[int],
    room: int = 0,
) -> None:
    """A row of meta, int32 [META_WIDTH], with which a request begins. params: with a seed. room: positions that have
    pages, 0 for all up to the limit."""
    assert params.seed is not None
    row[:] = 0
    row[layout.FLAGS] = layout.FLAG_BIAS * bool(params.logit_bias) | layout.FLAG_PENALTIES * params.penalties
    row[layout.FLAGS] |= layout.FLAG_MASK * (params.structure is not None)
    row[layout.SLOT], row[layout.GENERATION] = slot, generation
    row[layout.N_KNOWN], row[layout.LIMIT], row[layout.ROOM] = n_known, limit, room or limit
    row[layout.SEED_LO], row[layout.SEED_HI] = _as_int32(params.seed), _as_int32(params.seed >> 32)
    row[layout.TOP_K], row[layout.N_LOGPROBS] = params.top_k, params.logprobs or 0
    row[layout.N_STOP] = len(stop_ids)
    row[layout.STOP_IDS : layout.STOP_IDS + len(stop_ids)] = stop_ids
    row[layout.POSITION], row[layout.STEP], row[layout.STATUS] = position, 0, layout.RUN
    row[layout.SOURCE] = layout.OWN


def fill_samp(row: np.ndarray, params: SamplingParams) -> None:
    """A row of samp, fp32 [SAMP_WIDTH]."""
    row[layout.TEMPERATURE], row[layout.TOP_P], row[layout.MIN_P] = params.temperature, params.top_p, params.min_p
    row[layout.REPETITION_PENALTY] = params.repetition_penalty
    row[layout.PRESENCE_PENALTY], row[layout.FREQUENCY_PENALTY] = params.presence_penalty, params.frequency_penalty


def _as_int32(value: int) -> int:
    """The low 32 bits, as the signed number that an int32 takes."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
