"""Slots: writes one request's state to its own place on the device, in stream order, waiting for nobody."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .. import layout
from ..cache.pages import PagePool
from ..sampling import SamplingParams
from ..step.state import DecodeModel

RECORDS = 4  # requests whose writes may wait for the GPU before the host waits for the oldest


class Record:
    """Host memory from which a slot is written: pinned, so that the copies need not be waited for."""

    def __init__(self, model: DecodeModel):
        ws, pin = model.workspace, model.device.type == "cuda"

        def host(tensor: torch.Tensor) -> torch.Tensor:
            return torch.zeros(tensor.shape[1:], dtype=tensor.dtype, pin_memory=pin)

        self.meta, self.samp, self.tokens, self.bias = (host(t) for t in (ws.meta, ws.samp, ws.tokens, ws.bias))
        self.table = host(model.kv.page_table)
        self.copied = torch.cuda.Event() if pin else None


@dataclass
class Held:
    """What a slot keeps between requests. tokens: those whose K/V its pages hold; pages: in the order of positions."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    generation: int = 0


class Slots:
    """The slots of a model, and the pages that each of them has."""

    def __init__(self, model: DecodeModel):
        self.model = model
        self.pages = PagePool(len(model.kv.pool))
        self.held = [Held() for _ in range(len(model.workspace.tokens))]
        self._records = [Record(model) for _ in range(RECORDS)]
        self._begun = 0

    @torch.inference_mode()
    def write_tokens(self, slot: int, ids: Sequence[int], positions: int) -> None:
        """Put a request's tokens, and pages for `positions`, where prompts and steps find them. The slot must have no
        running request; `begin` follows. Raises OutOfPages."""
        ws, held = self.model.workspace, self.held[slot]
        missing = -(-positions // self.model.kv.page) - len(held.pages)
        held.pages += self.pages.take(max(missing, 0))
        record = self._next_record()
        record.tokens.numpy()[: len(ids)] = ids
        record.table.numpy()[: len(held.pages)] = held.pages
        ws.tokens[slot, : len(ids)].copy_(record.tokens[: len(ids)], non_blocking=True)
        table = self.model.kv.page_table[slot, : len(held.pages)]
        table.copy_(record.table[: len(held.pages)], non_blocking=True)

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
    ) -> int:
        """Start the slot's request as `row` of the passes, at `position`; returns its generation.

        n_known: tokens that are given. params: with a seed.
        """
        ws, held, record = self.model.workspace, self.held[slot], self._records[self._begun % RECORDS]
        held.generation = held.generation % layout.MAX_GENERATION + 1
        fill_meta(record.meta.numpy(), params, slot, held.generation, position, n_known, limit, stop_ids)
        fill_samp(record.samp.numpy(), params)
        ws.samp[row].copy_(record.samp, non_blocking=True)
        if params.penalties:
            ws.counts[slot].zero_()
            ws.counts[slot].index_fill_(0, ws.tokens[slot, :n_known].long(), 1)
        if params.logit_bias:
            record.bias.zero_()
            for token, value in params.logit_bias.items():
                record.bias[token] = value
            ws.bias[slot].copy_(record.bias, non_blocking=True)
        ws.meta[row].copy_(record.meta, non_blocking=True)
        if record.copied is not None:
            record.copied.record(torch.cuda.current_stream(self.model.device))
        self._begun += 1
        return held.generation

    def _next_record(self) -> Record:
        record = self._records[self._begun % RECORDS]
        if record.copied is not None:
            record.copied.synchronize()  # done long ago, unless RECORDS requests began within a pass
        return record


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
    row[layout.SLOT], row[layout.GENERATION] = slot, generation
    row[layout.N_KNOWN], row[layout.LIMIT], row[layout.ROOM] = n_known, limit, room or limit
    row[layout.SEED_LO], row[layout.SEED_HI] = _as_int32(params.seed), _as_int32(params.seed >> 32)
    row[layout.TOP_K], row[layout.N_LOGPROBS] = params.top_k, params.logprobs or 0
    row[layout.N_STOP] = len(stop_ids)
    row[layout.STOP_IDS : layout.STOP_IDS + len(stop_ids)] = stop_ids
    row[layout.POSITION], row[layout.STEP], row[layout.STATUS] = position, 0, layout.RUN


def fill_samp(row: np.ndarray, params: SamplingParams) -> None:
    """A row of samp, fp32 [SAMP_WIDTH]."""
    row[layout.TEMPERATURE], row[layout.TOP_P], row[layout.MIN_P] = params.temperature, params.top_p, params.min_p
    row[layout.REPETITION_PENALTY] = params.repetition_penalty
    row[layout.PRESENCE_PENALTY], row[layout.FREQUENCY_PENALTY] = params.presence_penalty, params.frequency_penalty


def _as_int32(value: int) -> int:
    """The low 32 bits, as the signed number that an int32 takes."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
