"""Passes without requests, for benchmarks, profiles and tests: set the rows' positions, then enqueue passes."""

from collections.abc import Sequence

from ...arguments import Integer
from ...engine import Engine
from ...errors import ParameterError, counted
from ...plan import threads
from ...sampling import SamplingParams
from ...serve.request import step_kind
from ...serve.scheduler import Scheduler
from ...state.rewind import rewind_slots


def rewind(
    engine: Engine, position: int | Sequence[int], params: SamplingParams, rows: int = 1, known: int = 0
) -> None:
    """Set the positions of the first `rows` rows, for passes with `enqueue`. The content of the cache is unchanged.

    Each row gets a separate slot and a share of the free pages. All requests of the engine are cancelled.

    Args:
        position: the position of all rows, or a list with the position of each row
        params: sampling parameters with a seed
        rows: number of rows
        known: number of tokens after each position that the passes embed but do not sample

    Raises:
        ParameterError: an argument is out of range
        OutOfPages: the rows need more pages than the engine has
        EngineClosed: the engine is closed
    """
    rows = Integer(1, engine.slots, "the engine's slots, ").check("rows", rows)
    positions = [position] * rows if isinstance(position, int) else list(position)
    if len(positions) != rows:
        raise ParameterError(f"position: expected one for each of {counted(rows, 'row')}, got {len(positions):,}")
    positions = [Integer(0, engine.capacity - 1).check("position", each) for each in positions]
    engine._driver.exclusively(_rewind, positions, params, known)


def _rewind(scheduler: Scheduler, positions: list[int], params: SamplingParams, known: int) -> None:
    scheduler.cancel_all()
    # With this flag, the next request finds all rows idle and all pages free.
    scheduler._incomplete = True
    rewind_slots(scheduler.slots, positions, params, known)


def enqueue(engine: Engine, params: SamplingParams, rows: int = 1, tokens: int = 1, adapters: bool = False) -> None:
    """Enqueue one pass and return; on a GPU the pass may still run then.

    Args:
        params: sampling parameters, which select the kind of pass
        rows: number of requests in the pass
        tokens: rows of each request, where the engine speculates
        adapters: whether the pass applies adapters

    Raises:
        EngineClosed: the engine is closed
    """
    engine._open()
    threads.use(engine.threads)
    engine.steps.replay(step_kind(params), rows, tokens=tokens, adapters=adapters)
