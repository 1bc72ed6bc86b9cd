"""Slots: writes one request's state to its own place on the device, in stream order."""

from array import array
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from .. import layout
from ..layout import Chunk, packed
from ..sampling import SamplingParams
from .kv import KVCache
from .pages import PagePool
from .prefix import Node, PrefixCache


class SlotModel(Protocol):
    """The parts of a model (step/model.py: DecodeModel) that slots write."""

    workspace: Any
    prompt: Any
    kv: KVCache
    fixed_chunk: int

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
    def next(self):
        """A row of each tensor that no copy reads any more; those that begin within are waited for before its reuse."""
        number = self._used % len(self._rows)
        self._used += 1
        if self._copied[number] is not None:
            self._copied[number].synchronize()  # mostly done long ago
        try:
            yield self._rows[number]
        finally:  # also where an interrupt came behind the first copy
            if self._copied[number] is not None:
                self._copied[number].record(torch.cuda.current_stream(self._device))


@dataclass
class Held:
    """What a slot's request has; an idle slot has nothing. tokens: those whose K/V its pages hold; pages: in the order
    of positions; shared: positions of the first pages, which others may read as well; node: the last that it uses of
    what can be found; goes_on: as the Match did that it began with."""

    tokens: array = field(default_factory=lambda: packed(()))
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    node: Node | None = None
    goes_on: bool = False
    salt: str = ""
    generation: int = 0
    busy: bool = False


class Slots:
    """The slots of a model, the pages that each of them has, and what requests before have left to be found.

    Book-keeping is such that `recover` makes it right after an interrupt at any line: the slots' lists of pages and the
    tree of the cache are the truth, and `tokens` never says more than the pages hold.
    """

    def __init__(self, model: SlotModel, sharing: bool = True):
        self.model, self.page, self._sharing = model, model.kv.page, sharing
        self.pages = PagePool(model.kv.pages)
        self.cache = PrefixCache(self.pages, self.page)
        self.held = [Held() for _ in range(len(model.workspace.tokens))]
        ws = model.workspace
        several = max(len(self.held), RECORDS)  # as many requests may begin within a pass
        self._texts = Records(ws.tokens, model.kv.page_table, count=several)
        self._states = Records(ws.meta, ws.samp, count=several)
        self._biases, self._chunks = Records(ws.bias), Records(model.prompt.chunks[None])

    # ---- the host's book-keeping

    def most_read(self) -> int:
        """Tokens of prompts in one pass."""
        return self.model.prompt.rows - self.model.rows

    def room(self, slot: int) -> int:
        """Positions that have pages."""
        return len(self.held[slot].pages) * self.page

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page)

    def available(self) -> int:
        """Pages that are free, or would be without what nobody uses."""
        return self.pages.free + self.cache.evictable()

    def admit(self, ids: array, positions: int, salt: str = "") -> tuple[int, int] | None:
        """Give an idle slot pages for the beginning of `ids`, as far as they are there, and have free those that it
        needs beside for `positions`; returns it with how many tokens are there, or None where pages are short."""
        match = self.cache.match(ids, salt)
        goes_on = match.goes_on
        if self.model.fixed_chunk:
            match = match.whole
        shared, tail = [node.page for node in match.nodes], match.tail
        slot = next(i for i, held in enumerate(self.held) if not held.busy)
        held = self.held[slot]
        held.pages = shared if tail is None else [*shared, tail.page]  # held, so that nobody evicts them
        self.pages.share(held.pages)
        self._use(held, match.end)
        fresh = self.pages_for(positions) - len(shared)
        lacks = fresh - self.available()
        if tail is not None and (goes_on or lacks > 0) and self.cache.hand_over(tail, with_more=lacks == 1):
            fresh, tail = fresh - 1, None  # nobody else has it: what is written there needs no copy
        if fresh > self.available():
            self._give_all_back(held)
            return None
        self.make_room(fresh)
        if tail is not None:
            (own,) = self._take(1)
            self._copy_page(tail.page, own)
            held.pages[-1] = own
            self.pages.give_back([tail.page])
        self.cache.find(match)
        self._use(held, match.nodes[-1] if match.nodes else None)
        read = match.tokens(self.page)
        held.busy, held.tokens, held.shared = True, ids[:read], len(shared) * self.page
        held.salt, held.goes_on = salt, goes_on
        return slot, read

    @torch.inference_mode()
    def _copy_page(self, source: int, target: int) -> None:
        self.model.kv.pool[target].copy_(self.model.kv.pool[source])

    def publish(self, slot: int, ids: array) -> None:
        """Let others find the whole pages of `ids`, whose K/V the passes enqueued so far write."""
        held = self.held[slot]
        held.tokens = ids[: len(ids) // self.page * self.page]
        self._insert(held, held.tokens)

    def _insert(self, held: Held, ids: array) -> None:
        if self._sharing:
            pages = held.pages[: self.pages_for(len(ids))]
            self._use(held, self.cache.insert(ids, pages, held.salt, held.goes_on, held.node))

    def _use(self, held: Held, node: Node | None) -> None:
        """Of what can be found the slot uses this node now, with all before it, and no other one."""
        before, held.node = held.node, node
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
        """Pages that a request may take beyond those that it needs: a share of what is free then, an equal one for each
        slot, so that with one slot it is all of it and its table is written once."""
        return max(self.pages.free - max(needed, 0), 0) // len(self.held)

    def release(self, slot: int) -> None:
        """The slot's request has gone; what it has computed can be found, and the other pages are free. In the
        batch-invariant mode only what was published: what decode passes write has other bits than a prompt's."""
        held = self.held[slot]
        if not self.model.fixed_chunk:
            self._insert(held, held.tokens)
        self._give_all_back(held)
        held.busy = False

    def discredit(self, slot: int, ids: Sequence[int]) -> None:
        """What the slot's request has found and computed of `ids` is not to be trusted."""
        self.held[slot].tokens = packed(())
        self.cache.forget(ids, salt=self.held[slot].salt)

    def _give_all_back(self, held: Held) -> None:
        self._use(held, None)
        given, held.pages, held.tokens, held.shared = held.pages, [], packed(()), 0
        self.pages.give_back(reversed(given))  # to be taken in their order again

    @torch.inference_mode()
    def recover(self) -> None:
        """Make all slots idle, on the device too, and count the pages anew, whatever was interrupted."""
        self.model.workspace.meta[:, layout.STATUS].fill_(layout.LIMIT_REACHED)
        for held in self.held:
            held.node = None
        self.cache.recover()
        self.pages.recount([*(held.pages for held in self.held), self.cache.pages()])
        for slot, held in enumerate(self.held):
            if len(held.tokens) > self.room(slot):
                held.tokens = packed(())
            self.release(slot)

    def rewind(self, positions: list[int], params: SamplingParams, given: int = 0) -> None:
        """Put rows and slots 0, 1, ... at `positions` with whatever the cache holds, and so many given tokens behind.
        Each has its share of the pages, up to the capacity, and the same ones every time. Raises OutOfPages."""
        capacity = self.model.kv.capacity
        self.recover()
        self.cache.clear()
        self.pages.recount(held.pages for held in self.held)
        for slot, position in enumerate(positions):
            spare = self.pages.free - sum(self.pages_for(later + 1) for later in positions[slot:])
            room = (self.pages_for(position + 1) + max(spare, 0) // (len(positions) - slot)) * self.page
            known = min(position + 1 + given, capacity)
            self.write_tokens(slot, [0] * known, min(room, capacity))
            self.begin(slot, slot, params, position=position, n_known=known, limit=capacity + 1, stop_ids=())

    def assert_consistent(self) -> None:
        """Every page is free, a slot's, or can be found, and counted as often; only what can be found is two slots',
        and no slot claims more than its pages hold."""
        found = self.cache.pages()
        self.cache.assert_consistent(held.node for held in self.held)
        self.pages.assert_consistent([*(held.pages for held in self.held), found])
        own = [page for held in self.held for page in held.pages[held.shared // self.page :]]
        assert len(set(own)) == len(own), "a page is written by two slots"
        for slot, held in enumerate(self.held):
            assert len(held.tokens) <= self.room(slot), f"slot {slot} claims more than its pages hold"
            assert held.busy or not held.pages, f"slot {slot} is idle and keeps pages"

    # ---- writes to the device, in stream order

    @torch.inference_mode()
    def write_tokens(self, slot: int, ids: Sequence[int], positions: int) -> None:
        """Put a request's tokens, and pages for `positions`, where prompts and steps find them. The slot must have no
        running request; `begin` follows. Raises OutOfPages."""
        ws, held = self.model.workspace, self.held[slot]
        held.pages += self._take(max(self.pages_for(positions) - len(held.pages), 0))
        with self._texts.next() as (tokens, table):
            tokens.numpy()[: len(ids)] = packed(ids)
            ws.tokens[slot, : len(ids)].copy_(tokens[: len(ids)], non_blocking=True)
            self._write_table(slot, table, held.pages)

    def _write_table(self, slot: int, table: torch.Tensor, pages: Sequence[int]) -> None:
        """The slot's row of the page table, from a row of pinned memory."""
        table.numpy()[: len(pages)] = pages
        self.model.kv.page_table[slot, : len(pages)].copy_(table[: len(pages)], non_blocking=True)

    @torch.inference_mode()
    def begin(
        self,
        slot: int,
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
        """Start the slot's request as `row` of the passes, at `position`; returns its generation.

        n_known: tokens that are given, of which the first `prompt` (by default all) are the prompt's and the others
        were drawn before. params: with a seed. source: the row of the prompt pass that has just read that position.
        """
        ws, held = self.model.workspace, self.held[slot]
        prompt = n_known if prompt is None else prompt
        held.generation = held.generation % layout.MAX_GENERATION + 1
        if params.logit_bias:
            with self._biases.next() as (bias,):
                bias.zero_()
                for token, value in params.logit_bias.items():
                    bias[token] = value
                ws.bias[slot].copy_(bias, non_blocking=True)
        with self._states.next() as (meta, samp):
            state = slot, held.generation, position, n_known, limit, stop_ids, self.room(slot)
            fill_meta(meta.numpy(), params, *state)
            meta[layout.SOURCE] = source
            fill_samp(samp.numpy(), params)
            ws.samp[row].copy_(samp, non_blocking=True)
            if params.penalties:
                given, drawn = ws.tokens[slot, :n_known].long().tensor_split([prompt])
                ws.counts[slot].zero_().index_fill_(0, given, 1)
                ws.counts[slot].index_add_(0, drawn, torch.full_like(drawn, 2, dtype=ws.counts.dtype))
            ws.meta[row].copy_(meta, non_blocking=True)
        return held.generation

    @torch.inference_mode()
    def write_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Say whose rows the next prompt pass has."""
        with self._chunks.next() as (table,):
            table.zero_()
            table.numpy()[: len(chunks)] = chunks
            self.model.prompt.chunks.copy_(table, non_blocking=True)

    @torch.inference_mode()
    def grow(self, slot: int, row: int, pages: int) -> None:
        """Give the slot that many pages more; a row that waits for them runs. Numbers travel as arguments of launches:
        nothing is copied from the host, nothing waited for. Raises OutOfPages."""
        held, meta = self.held[slot], self.model.workspace.meta
        have = len(held.pages)
        held.pages += self._take(pages)
        self._extend_table(slot, have)
        meta[row, layout.ROOM].fill_(self.room(slot))
        status = meta[row, layout.STATUS]
        status.masked_fill_(status == layout.WAIT, layout.RUN)  # one that has ended meanwhile stays as it is

    def _extend_table(self, slot: int, have: int) -> None:
        """The entries of the slot's pages from the `have`th on."""
        for place in range(have, len(self.held[slot].pages)):
            self.model.kv.page_table[slot, place].fill_(self.held[slot].pages[place])

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


def common_prefix(held: array, ids: array) -> int:
    """Leading tokens that both have."""
    most, first, step = min(len(held), len(ids)), 0, 256
    while first < most and held[first : first + step] == ids[first : first + step]:  # far faster than one by one
        first += step
    return next((i for i in range(first, most) if held[i] != ids[i]), most)


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
