"""Passes without requests, for benchmarks, profiles and tests: put rows at a position, then enqueue passes."""

from collections.abc import Sequence

from ...arguments import Integer
from ...engine import Engine
from ...errors import ParameterError, counted
from ...plan import threads
from ...sampling import SamplingParams
from ...serve.request import step_kind
from ...serve.scheduler import Scheduler
from ...state.offloaded_slots import OffloadedSlots
from ...state.slots import Slots


def rewind(
    engine: Engine, position: int | Sequence[int], params: SamplingParams, rows: int = 1, given: int = 0
) -> None:
    """Put the first `rows` rows at a position, with whatever the cache holds; `enqueue` then runs passes.

    Each row has a slot of its own and a share of the free pages. All requests of the engine are cancelled.

    Args:
        position: the position of all rows, or a list with the position of each row
        params: sampling parameters with a seed
        rows: number of rows
        given: number of tokens after each position that the passes embed but do not sample

    Raises:
        ParameterError: an argument is out of range
        OutOfPages: the rows need more pages than the engine has
        EngineClosed: the engine is closed
    """
    rows = Integer(1, engine.slots, "the engine's slots, ").check("rows", rows)
    positions = [position] * rows if isinstance(position, int) else list(position)
    if len(positions) != rows:
        raise ParameterError(f"position: a list has one for each of {counted(rows, 'row')}, got {len(positions):,}")
    positions = [Integer(0, engine.capacity - 1).check("position", each) for each in positions]
    engine._driver.exclusively(_rewind, positions, params, given)


def _rewind(scheduler: Scheduler, positions: list[int], params: SamplingParams, given: int) -> None:
    scheduler.cancel_all()
    scheduler._unsettled = True  # the next request finds all rows idle and all pages free
    rewind_slots(scheduler.slots, positions, params, given)


def rewind_slots(slots: Slots, positions: list[int], params: SamplingParams, given: int = 0) -> None:
    """Put rows and slots 0, 1, ... at `positions`, with `given` known tokens after each. Raises OutOfPages.

    Each slot has its share of the pages, up to the capacity, and the same pages every time. With offload, every page
    gets a place as if it had been written, the oldest pages on the host.
    """
    capacity, page = slots.model.kv.capacity, slots.page
    slots.recover()
    slots.cache.clear()
    slots.pages.recount(slot.pages for slot in slots)
    for row, position in enumerate(positions):
        spare = slots.pages.free - sum(slots.pages_for(later + 1) for later in positions[row:])
        room = (slots.pages_for(position + 1) + max(spare, 0) // (len(positions) - row)) * page
        known = min(position + 1 + given, capacity)
        slots.write_tokens(slots[row], [0] * known, min(room, capacity))
        slots.begin(slots[row], row, params, position=position, n_known=known, limit=capacity + 1, stop_ids=())
    if isinstance(slots, OffloadedSlots):
        for row in range(len(positions)):
            for first in range(0, slots.room(slots[row]), page):
                slots.ensure(slots[row], first, first + 1)
        slots.before_pass()


def enqueue(engine: Engine, params: SamplingParams, rows: int = 1, tokens: int = 1) -> None:
    """Enqueue one pass and return; on a GPU the pass may still run then.

    Args:
        params: sampling parameters, which select the kind of pass
        rows: number of requests in the pass
        tokens: rows of each request, where the engine speculates

    Raises:
        EngineClosed: the engine is closed
    """
    engine._open()
    threads.use(engine.threads)
    engine.steps.replay(step_kind(params), rows, tokens=tokens)
