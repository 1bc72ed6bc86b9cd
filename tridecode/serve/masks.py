"""Masks: what the grammars of requests allow next, computed in threads while the device runs."""

import os
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
THREADS = min(8, os.cpu_count() or 1)
PATIENCE = 2e-3  # seconds for which a pass that would have to do without a mask waits for it


class Masks:
    """The masks of all slots of a model.

    A pass finds the mask of a row by its stamp. Without it the pass leaves the row unchanged, so a slow grammar delays
    only its own request.
    """

    def __init__(self, model: DecodeModel):
        self._masks, self._stamps = model.workspace.mask.numpy(), model.workspace.mask_stamp.numpy()
        self._pool = ThreadPoolExecutor(THREADS, "mask")  # it starts its threads when they are needed

    def follow(self, grammar: Grammar, sampled: list[int]) -> "Following":
        """Begin the masks of a request with these sampled tokens."""
        return Following(self, grammar, sampled)

    def submit(self, work: Callable[[*Ts], R], *args: *Ts) -> Future[R]:
        return self._pool.submit(work, *args)

    def write(self, slot: int, mask: np.ndarray, stamp: int) -> None:
        self._masks[slot] = mask
        self._stamps[slot] = stamp  # last: a pass that reads the stamp finds the whole mask


def failing_alone(work: Callable[[*Ts], R]) -> Callable[[*Ts], R]:
    """Make all errors of a function for one request GenerationErrors, which end only this request."""

    @wraps(work)
    def go(*args: *Ts) -> R:
        try:
            return work(*args)
        except (GenerationError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            why = f"{type(error).__name__}: {brief(error)}"
            raise GenerationError(f"the grammar cannot be followed: {why}") from error

    return go


class Following:
    """One request's way through its grammar: prepared while its prompt is read, then a mask for each token."""

    _matcher: Matcher  # set by _prepare
    _slot: int  # set by `begin`, as is _generation
    _generation: int

    def __init__(self, masks: Masks, grammar: Grammar, sampled: list[int]):
        self._masks, self._turn, self._gone = masks, threading.Lock(), False
        self._prepared = masks.submit(self._prepare, grammar, sampled)
        self._coming: Future[np.ndarray] | Future[None] = self._prepared

    @failing_alone
    def _prepare(self, grammar: Grammar, sampled: list[int]) -> np.ndarray:
        self._matcher = grammar.matcher(sampled)
        return self._matcher.allowed() if sampled else grammar.first

    def begin(self, slot: int, generation: int, position: int) -> None:
        """The request has its row: its first mask goes where the pass at `position` looks for it."""
        self._slot, self._generation, prepared = slot, generation, self._prepared
        if prepared.done():
            with suppress(GenerationError):  # `check` says it
                self._first(prepared, position)
        else:
            self._coming = self._masks.submit(self._first, prepared, position)

    def _first(self, prepared: Future[np.ndarray], position: int) -> None:
        self._put(prepared.result(), position)

    @failing_alone
    def accept(self, token: int) -> bool:
        """Go on behind a drawn token; True where the answer ends with it. Raises GenerationError."""
        return self._matcher.accept(token)

    def next(self, position: int) -> None:
        """Have the mask for the pass at `position` made."""
        self._coming = self._masks.submit(self._make, position)

    @failing_alone
    def _make(self, position: int) -> None:
        self._put(self._matcher.allowed(), position)

    def _put(self, mask: np.ndarray, position: int) -> None:
        with self._turn:
            if not self._gone:
                self._masks.write(self._slot, mask, layout.mask_stamp(self._generation, position))

    def check(self) -> None:
        """Raises GenerationError where a mask could not be made."""
        if self._coming.done():
            self._coming.result()

    def wait(self, seconds: float) -> None:
        """Raises TimeoutError, and GenerationError as `check`."""
        self._coming.result(seconds)

    @property
    def late(self) -> bool:
        return not self._coming.done()

    def drop(self) -> None:
        """Nothing more is written: the slot may be another's."""
        with self._turn:
            self._gone = True


def wait_for(followings: list[Following]) -> None:
    """Until their masks are there, but for no longer than PATIENCE."""
    end = time.perf_counter() + PATIENCE
    for following in followings:
        with suppress(TimeoutError, GenerationError):
            following.wait(max(end - time.perf_counter(), 0))
