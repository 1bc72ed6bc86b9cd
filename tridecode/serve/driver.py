"""Driver: the one lock around a scheduler. Each thread that waits for a request runs steps for all requests."""

import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

import torch

from ..errors import EngineClosed, QueueFull, TridecodeError, brief
from ..results import Result, Timings, Usage
from .request import Request
from .scheduler import Scheduler

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
FORKED = "this engine belongs to the parent process; start processes by spawn, not by fork, and load an engine in each"
YIELD_SECONDS = 2e-5  # Seconds of pause after a step, in which other threads can take the lock. The lock is not fair.


class Driver:
    """The lock of a scheduler, with queues of submissions and cancellations for the thread that has the lock.

    Args:
        scheduler: the scheduler; the attribute is None after `close`.
        prepare: called before each step, in the thread that steps.
    """

    def __init__(self, scheduler: Scheduler, prepare: Callable[[], None]):
        self.scheduler: Scheduler | None = scheduler
        self._prepare = prepare
        self._slots = len(scheduler.slots)
        # A thread holds the lock while it changes device state, and never while it runs code of callers other than
        # readers.
        self._lock = threading.Lock()
        self._waiting_threads: set[int] = set()  # Ids of the threads that wait for the lock.
        # The thread that holds the lock adds and cancels these requests, so that other threads do not wait for a pass.
        self._submitted: deque[weakref.ref[Request]] = deque()
        self._dropped: deque[Request] = deque()
        # This lock prevents two submissions from taking the last place in the queue.
        self._submit_lock = threading.Lock()
        self._owner = os.getpid()
        self._inherited: Scheduler | None = None

    def opened(self) -> Scheduler:
        """Return the scheduler. Raises EngineClosed."""
        if (scheduler := self.scheduler) is None:
            raise self.closed_error()
        return scheduler

    def closed_error(self) -> EngineClosed:
        """Return the error of each call after `close`, or in a process that inherited the engine by a fork."""
        return EngineClosed(FORKED) if self._owner != os.getpid() else EngineClosed()

    def exclusively(self, action: Callable[[Scheduler, *Ts], R], *args: *Ts) -> R:
        """Return action(scheduler, *args), which runs between the steps of all threads. Raises EngineClosed."""
        me = threading.get_ident()
        if self._lock.locked():
            self._waiting_threads.add(me)
        try:
            with self._lock:
                scheduler = self.opened()
                self._catch_up(scheduler)
                return action(scheduler, *args)
        finally:
            self._waiting_threads.discard(me)

    def _catch_up(self, scheduler: Scheduler) -> None:
        """Process submissions and cancellations queued by other threads.

        The next dropped request is read before submissions are processed, and cancelled after that, because
        its own submission may still be in the queue.
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

    def _try_to_catch_up(self) -> None:
        """Process the queued submissions and cancellations, unless a thread holds the lock.

        Python runs signal handlers at calls, and an error of a handler between `acquire` and `try` would leave the lock
        held. `for` calls `acquire` without such a place.
        """
        for acquired in map(self._lock.acquire, [False]):
            try:
                if acquired and self.scheduler is not None:
                    self._catch_up(self.scheduler)
            finally:
                if acquired:
                    self._lock.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Run steps for all requests until `ready` returns True."""
        while not ready():
            try:
                self.exclusively(self._step, ready)
            except EngineClosed:
                if not ready():  # The request may have ended because the engine was closed.
                    raise
            if self._waiting_threads:
                time.sleep(YIELD_SECONDS)

    def _step(self, scheduler: Scheduler, ready: Callable[[], bool]) -> None:
        if not ready():
            self._prepare()
            scheduler.step()

    def step(self) -> bool:
        """Run one step for all requests. Return whether any request is left. Raises EngineClosed."""
        self.exclusively(self._step, lambda: self.scheduler is None or not self.scheduler.busy)
        if self._waiting_threads:
            time.sleep(YIELD_SECONDS)
        scheduler = self.scheduler
        return scheduler is not None and (scheduler.busy or bool(self._submitted))

    def submit(self, request: Request) -> Request:
        """Put the request in the queue and return it. Raises QueueFull and EngineClosed."""
        scheduler = self.opened()
        with self._submit_lock:
            scheduler.check_queue(len(self._submitted), len(self._dropped))
            request.driver = self  # This comes first. An interrupt after it drops the request, and thereby cancels it.
            self._submitted.append(request.ref)  # If the engine is closed now, `wait` raises EngineClosed.
        self._try_to_catch_up()
        return request

    def cancel(self, request: Request) -> bool:
        """Cancel the request; return False if it has ended already. Raises EngineClosed."""
        return not request.ended and self.exclusively(Scheduler.cancel, request)

    def drop(self, request: Request) -> None:
        """Cancel the request without waiting. The garbage collector may call this at any time, even during a step.

        It never waits for the lock: the garbage collector may run in a thread that holds a lock of its own. In a thread
        that uses another stream, for example to copy adapters, the next step cancels the request.
        """
        if not request.ended:
            self.drop_later(request)
            if not sys.is_finalizing() and not _on_other_stream():
                with suppress(RuntimeError):  # If the GPU is lost, the next step reports it.
                    self._try_to_catch_up()

    def drop_later(self, request: Request) -> None:
        """Let the next step cancel the request; its place in the queue is free at once."""
        if not (request.ended or request.cancelled):
            request.cancelled = True
            self._dropped.append(request)

    def gather(
        self, make: Sequence[Callable[[], Request]], progress: Callable[[int, int], None] | None
    ) -> list[Result]:
        """Return the results of many requests in order.

        Args:
            make: functions that create the requests. Each is called shortly before its request can run. If it raises an
                error, the result contains the error.
            progress: called as progress(done, total) when requests end.
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
                            break  # Wait until one of the requests has ended.
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
            for request in running.values():  # This loop has work only after an error or an interrupt.
                self.drop(request)
        return [results[i] for i in range(len(make))]

    def disown(self) -> None:
        """Make all calls raise EngineClosed. This is for a process that inherited the driver by a fork.

        In that process, no thread would release the locks or finish the pass of the parent process, and the GPU does
        not work. The scheduler is kept, because its memory on the GPU belongs to the parent process.
        """
        self._lock, self._submit_lock = threading.Lock(), threading.Lock()
        self._inherited, self.scheduler = self.scheduler, None

    def close(self) -> None:
        """Cancel all requests, and stop the copies of adapters; later requests raise EngineClosed."""
        me = threading.get_ident()
        self._waiting_threads.add(me)  # A thread that steps then pauses after its step.
        try:
            with self._lock:
                # This comes first: a thread that sees that its request has ended also sees that the engine is closed.
                scheduler, self.scheduler = self.scheduler, None
                if scheduler is not None:
                    self._catch_up(scheduler)
                    scheduler.slots.close()
                    scheduler.cancel_all()
        finally:
            self._waiting_threads.discard(me)


def failed(error: Exception) -> Result:
    """Return the result of a request that could not begin, or that ended with an error."""
    line = str(error) if isinstance(error, TridecodeError) else f"{type(error).__name__}: {brief(error)}"
    return Result("", (), "error", Usage(0, 0, 0), Timings(0.0, 0.0, 0.0), seed=0, error=line)


def _on_other_stream() -> bool:
    """Return whether work that this thread gives to the GPU is not in the stream of the passes."""
    return torch.cuda.is_initialized() and torch.cuda.current_stream() != torch.cuda.default_stream()
