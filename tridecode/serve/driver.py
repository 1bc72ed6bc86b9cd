"""Driver: the one lock around a scheduler. Every thread that waits for a request steps for all requests."""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

from ..errors import EngineClosed, QueueFull, TridecodeError, brief
from ..results import Result, Timings, Usage
from .request import Request
from .scheduler import Scheduler

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
HANDOVER = 2e-5  # seconds for which a thread leaves the lock to others after a step, because a lock has no queue


class Driver:
    """The lock around a scheduler, and the submissions and cancellations for the thread that has the lock.

    scheduler: None after `close`. prepare: called in the thread that steps, before each step.
    """

    def __init__(self, scheduler: Scheduler, prepare: Callable[[], None]):
        self.scheduler: Scheduler | None = scheduler
        self._prepare = prepare
        self._slots = len(scheduler.slots)
        self._lock = threading.Lock()  # held while the device state changes, never while a caller has control
        self._wanting: set[int] = set()  # threads that wait for it
        # The thread that has the lock adds and cancels these requests, so no other thread waits for a pass.
        self._submitted: deque[weakref.ref[Request]] = deque()
        self._dropped: deque[Request] = deque()
        self._entrance = threading.Lock()  # so that no two submissions take the last place in the queue

    def opened(self) -> Scheduler:
        """Raises EngineClosed."""
        if (scheduler := self.scheduler) is None:
            raise EngineClosed
        return scheduler

    def exclusively(self, action: Callable[[Scheduler, *Ts], R], *args: *Ts) -> R:
        """Return action(scheduler, *args), called between the steps of all threads. Raises EngineClosed."""
        me = threading.get_ident()
        if self._lock.locked():
            self._wanting.add(me)
        try:
            with self._lock:
                scheduler = self.opened()
                self._catch_up(scheduler)
                return action(scheduler, *args)
        finally:
            self._wanting.discard(me)

    def _catch_up(self, scheduler: Scheduler) -> None:
        """Process submissions and cancellations queued by other threads.

        A dropped request was submitted before, so it is read first and cancelled after all additions.
        """
        while True:
            dropped = self._dropped[0] if self._dropped else None
            while self._submitted:
                scheduler.add(self._submitted[0])
                self._submitted.popleft()
            if dropped is None:
                return
            scheduler.cancel(dropped)
            self._dropped.popleft()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Step for all requests until `ready` returns True."""
        while not ready():
            try:
                self.exclusively(self._step, ready)
            except EngineClosed:
                if not ready():  # the end of the engine may have ended the request
                    raise
            if self._wanting:
                time.sleep(HANDOVER)

    def _step(self, scheduler: Scheduler, ready: Callable[[], bool]) -> None:
        if not ready():
            self._prepare()
            scheduler.step()

    def step(self) -> bool:
        """Step once for all requests; return whether any is left. Raises EngineClosed."""
        self.exclusively(self._step, lambda: self.scheduler is None or not self.scheduler.busy)
        if self._wanting:
            time.sleep(HANDOVER)
        scheduler = self.scheduler
        return scheduler is not None and (scheduler.busy or bool(self._submitted))

    def submit(self, request: Request) -> Request:
        """Put the request in the queue and return it. Raises QueueFull and EngineClosed."""
        scheduler = self.opened()
        with self._entrance:
            scheduler.check_queue(len(self._submitted), len(self._dropped))
            request.driver = self  # first: if an interrupt comes now, the request is dropped and thereby cancelled
            self._submitted.append(request.ref)  # if the engine closes before it is added, `wait` raises EngineClosed
        if self._lock.acquire(blocking=False):
            try:
                if self.scheduler is not None:
                    self._catch_up(self.scheduler)
            finally:
                self._lock.release()
        return request

    def cancel(self, request: Request) -> bool:
        return not request.ended and self.exclusively(Scheduler.cancel, request)

    def drop(self, request: Request) -> None:
        """Cancel the request without waiting. Garbage is collected at any moment, also in the middle of a step."""
        if not request.ended:
            self.drop_later(request)
            if not self._lock.locked() and not sys.is_finalizing():
                with suppress(EngineClosed, RuntimeError):  # the next step reports a lost GPU
                    self.exclusively(lambda scheduler: None)

    def drop_later(self, request: Request) -> None:
        """Let the next step cancel the request; its place in the queue is free at once."""
        if not (request.ended or request.cancelled):
            request.cancelled = True
            self._dropped.append(request)

    def gather(
        self, make: Sequence[Callable[[], Request]], progress: Callable[[int, int], None] | None
    ) -> list[Result]:
        """Return the results of many requests in order, and call progress(done, total) when requests end.

        `make` makes each request shortly before it can run. If that raises, the result has the error.
        """
        results: dict[int, Result] = {}
        running: dict[int, Request] = {}
        following, done = 0, 0
        try:
            while done < len(make):
                while following < len(make) and len(running) < 2 * self._slots:
                    try:
                        running[following] = self.submit(make[following]())
                    except EngineClosed:
                        raise
                    except QueueFull as error:
                        if running:
                            break  # until one of them has ended
                        results[following] = failed(error)
                    except Exception as error:
                        results[following] = failed(error)
                    following += 1
                self.wait(lambda: not running or any(request.finish_reason for request in running.values()))
                for i in [i for i, request in running.items() if request.finish_reason]:
                    try:
                        results[i] = running.pop(i).result()
                    except Exception as error:
                        results[i] = failed(error)
                if (ended := following - len(running)) > done:
                    done = ended
                    if progress:
                        progress(done, len(make))
        finally:
            for request in running.values():  # after an error or an interrupt
                self.drop(request)
        return [results[i] for i in range(len(make))]

    def close(self) -> None:
        """Cancel all requests; later ones raise EngineClosed."""
        with self._lock:
            if self.scheduler is not None:
                try:
                    self._catch_up(self.scheduler)
                    self.scheduler.cancel_all()
                finally:
                    self.scheduler = None  # with its memory


def failed(error: Exception) -> Result:
    """Return the result of a request that could not begin, or that an error has ended."""
    line = str(error) if isinstance(error, TridecodeError) else f"{type(error).__name__}: {brief(error)}"
    return Result("", (), "error", Usage(0, 0, 0), Timings(0.0, 0.0, 0.0), seed=0, error=line)
