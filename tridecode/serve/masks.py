"""Masks of allowed next tokens, computed from the requests' grammars in threads while the device runs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from typing import TypeVar, TypeVarTuple

import numpy as np

from .. import layout
from ..errors import GenerationError, brief
from ..step.model import DecodeModel
from ..text.grammar import Grammar, Matcher

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
# Threads that compute masks, also on a machine with fewer cores: a slow grammar occupies a thread.
THREADS = 8
MASK_WAIT = 2e-3  # Seconds to wait for a late mask before a pass runs without it.


class Masks:
    """The masks of all slots of a model.

    A pass identifies the mask of a row by its stamp. If the mask is not ready, the pass leaves the row unchanged. A
    slow grammar therefore delays only its own request.
    """

    def __init__(self, model: DecodeModel):
        self._masks, self._stamps = model.workspace.mask.numpy(), model.workspace.mask_stamp.numpy()
        self._pool = ThreadPoolExecutor(THREADS, "mask")  # The pool starts threads when they are needed.
        # Held while a mask is written. A thread that holds it may collect garbage and thereby drop requests. Therefore
        # it is reentrant. All slots share it, so that a write that a drop interrupts ends before the slot's next one.
        self.lock = threading.RLock()

    def follow(self, grammar: Grammar, sampled: list[int]) -> "GrammarMasks":
        """Start computing the masks of a request that has sampled these tokens."""
        return GrammarMasks(self, grammar, sampled)

    def submit(self, work: Callable[[*Ts], R], *args: *Ts) -> Future[R]:
        """Run work(*args) in a thread."""
        return self._pool.submit(work, *args)

    def write(self, slot: int, mask: np.ndarray, stamp: int) -> None:
        """Write the mask of a slot, then its stamp."""
        self._masks[slot] = mask
        # The stamp is written last. A pass that reads the stamp therefore reads the complete mask.
        self._stamps[slot] = stamp


def as_generation_error(work: Callable[[*Ts], R]) -> Callable[[*Ts], R]:
    """Convert all errors of a function to GenerationErrors, which end only the request that the function works for."""

    @wraps(work)
    def wrapper(*args: *Ts) -> R:
        try:
            return work(*args)
        except (GenerationError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of the grammar library is not an Exception.
            why = f"{type(error).__name__}: {brief(error)}"
            raise GenerationError(f"the grammar cannot be enforced: {why}") from error

    return wrapper


class GrammarMasks:
    """The masks of one request. They are prepared while its prompt is read, and computed after each token."""

    _matcher: Matcher  # _prepare sets this attribute.
    _slot: int  # `begin` sets this attribute.
    _generation: int  # `begin` sets this attribute.

    def __init__(self, masks: Masks, grammar: Grammar, sampled: list[int]):
        self._masks, self._dropped = masks, False
        self._prepared = masks.submit(self._prepare, grammar, sampled)
        self._pending: Future[np.ndarray] | Future[None] = self._prepared

    @as_generation_error
    def _prepare(self, grammar: Grammar, sampled: list[int]) -> np.ndarray:
        self._matcher = grammar.matcher(sampled)
        return self._matcher.allowed() if sampled else grammar.first

    def begin(self, slot: int, generation: int, position: int) -> None:
        """Write the first mask for the pass at `position`, when the request gets its row."""
        self._slot, self._generation, prepared = slot, generation, self._prepared
        if prepared.done():
            with suppress(GenerationError):  # `check` raises the error.
                self._first(prepared, position)
        else:
            self._pending = self._masks.submit(self._first, prepared, position)

    def _first(self, prepared: Future[np.ndarray], position: int) -> None:
        self._put(prepared.result(), position)

    @as_generation_error
    def accept(self, token: int) -> bool:
        """Advance the grammar by a sampled token; return True if the output ends with it. Raises GenerationError."""
        return self._matcher.accept(token)

    def next(self, position: int) -> None:
        """Start computing the mask for the pass at `position`."""
        self._pending = self._masks.submit(self._make, position)

    @as_generation_error
    def _make(self, position: int) -> None:
        self._put(self._matcher.allowed(), position)

    def _put(self, mask: np.ndarray, position: int) -> None:
        with self._masks.lock:
            if not self._dropped:
                self._masks.write(self._slot, mask, layout.mask_stamp(self._generation, position))

    def check(self) -> None:
        """Raise the error of a mask that could not be computed, a GenerationError."""
        if self._pending.done():
            self._pending.result()

    def wait(self, seconds: float) -> None:
        """Wait for the mask that is being computed. Raises TimeoutError, and GenerationError as `check` does."""
        self._pending.result(seconds)

    @property
    def late(self) -> bool:
        """Whether the mask of the next pass is not ready."""
        return not self._pending.done()

    def drop(self) -> None:
        """Stop writing masks, because another request may get the slot."""
        with self._masks.lock:
            self._dropped = True


def wait_for(requests: list[GrammarMasks]) -> None:
    """Wait until the masks are ready, at most MASK_WAIT seconds."""
    end = time.perf_counter() + MASK_WAIT
    for masks in requests:
        with suppress(TimeoutError, GenerationError):
            masks.wait(max(end - time.perf_counter(), 0))
