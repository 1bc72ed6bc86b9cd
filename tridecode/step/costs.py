"""Costs of passes that verify drafts, measured once when an engine is built."""

from itertools import product

from ..layout import MAX_QUERIES
from ..sampling import SamplingParams
from ..state.rewind import rewind_slots
from ..state.slots import Slots
from .dispatch import QUERIES, BatchDescriptor, Costs
from .graphs import DecodePasses

POSITION = 1024  # Position of the measured rows. It is lower if there are too few pages.
PASSES = 3  # Number of passes over which each time is averaged.
PARAMS = {"greedy": SamplingParams(temperature=0.0, seed=0), "sample": SamplingParams(seed=0)}


def measure_costs(steps: DecodePasses, slots: Slots) -> Costs:
    """Return the seconds of captured greedy and sampling passes.

    Sizes whose passes of several rows are not captured are left out. No request may be active; all slots are idle
    afterwards.
    """
    kv = steps.model.kv
    seconds: Costs = {}
    # Known tokens after the position serve as drafts that are always right, so all rows remain active.
    known = MAX_QUERIES * (PASSES + 1)
    for (kind, params), requests in product(PARAMS.items(), steps.dispatcher.sizes):
        room = min(kv.capacity, kv.positions // kv.page // requests * kv.page)
        position = min(POSITION, room - known - 1)
        keys = {rows: BatchDescriptor(kind, requests, rows, adapters=steps.model.adapter_forms[0]) for rows in QUERIES}
        replays = {rows: steps.graphs.get(key) for rows, key in keys.items()}
        if position < 0 or requests > len(slots) or not any(replays[rows] for rows in QUERIES[1:]):
            continue
        seconds[kind, requests] = {}
        for rows, replay in replays.items():
            if replay is not None and steps.place is not None:
                rewind_slots(slots, [position] * requests, params, known)
                seconds[kind, requests][rows] = steps.place.seconds(replay, PASSES)
    slots.recover()
    return seconds
