"""Driver: the one lock around a scheduler, and requests as their callers have them: whoever waits steps for all."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count

from ..errors import EngineClosed, QueueFull, TridecodeError, brief
from ..results import Piece, Result, Timings, Usage
from .request import Job
from .scheduler import Scheduler

HANDOVER = 2e-5  # seconds that who has stepped leaves the lock to others who wait for it: a lock knows no queue


class Driver:
    """scheduler: None from `close` on. prepare: called in the thread that steps, before each step."""

    def __init__(self, scheduler: Scheduler, prepare: Callable[[], None]):
        self.scheduler: Scheduler | None = scheduler
        self._prepare = prepare
        self._slots = len(scheduler.slots.held)
        self._lock = threading.Lock()  # held while the device state changes, never while a caller has control
        self._wanting: set[int] = set()  # threads that wait for it
        self._submitted: deque[Job] = deque()  # who has the lock puts them in the queue: a submission waits for no pass
        self._entrance = threading.Lock()  # so that no two take the last place in the queue
        self._dropped: deque[Job] = deque()  # jobs whose readers have gone; who has the lock cancels them

    def opened(self) -> Scheduler:
        """Raises EngineClosed."""
        if (scheduler := self.scheduler) is None:
            raise EngineClosed
        return scheduler

    def exclusively(self, action: Callable, *args):
        """The result of action(scheduler, *args), which nobody else's step comes between. Raises EngineClosed."""
        me = threading.get_ident()
        if self._lock.locked():
            self._wanting.add(me)
        try:
            with self._lock:
                scheduler = self.opened()
                self._catch_up()
                return action(scheduler, *args)
        finally:
            self._wanting.discard(me)

    def _catch_up(self) -> None:
        """Do what others have left to who has the lock. What is seen to be dropped was submitted before."""
        while True:
            dropped = self._dropped[0] if self._dropped else None
            while self._submitted:
                self.scheduler.add(self._submitted[0])
                self._submitted.popleft()
            if dropped is None:
                return
            self.scheduler.cancel(dropped)
            self._dropped.popleft()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Step until it is so, whoever's tokens come by that."""
        while not ready():
            try:
                self.exclusively(self._step, ready)
            except EngineClosed:
                if not ready():  # its end may be what was waited for
                    raise
            if self._wanting:
                time.sleep(HANDOVER)

    def _step(self, scheduler: Scheduler, ready: Callable[[], bool]) -> None:
        if not ready():
            self._prepare()
            scheduler.step()

    def step(self) -> bool:
        """Step once for whatever runs or waits; False where nothing does afterwards. Raises EngineClosed."""
        self.exclusively(self._step, lambda: not self.scheduler.busy)
        if self._wanting:
            time.sleep(HANDOVER)
        scheduler = self.scheduler
        return scheduler is not None and (scheduler.busy or bool(self._submitted))

    def submit(self, job: Job) -> "Request":
        """Raises QueueFull and EngineClosed."""
        scheduler = self.opened()
        with self._entrance:
            scheduler.check_queue(len(self._submitted), len(self._dropped))
            request = Request(self, job)  # before the job is there: whatever interrupts what follows, it goes with it
            self._submitted.append(job)  # if the engine is closed meanwhile, who waits for the request hears it
        if self._lock.acquire(blocking=False):
            try:
                if self.scheduler is not None:
                    self._catch_up()
            finally:
                self._lock.release()
        return request

    def cancel(self, job: Job) -> bool:
        return not job.ended and self.exclusively(Scheduler.cancel, job)

    def drop(self, job: Job) -> None:
        """Cancel it without ever waiting: garbage is collected at any moment, in the middle of a step too."""
        if not job.ended:
            self.drop_later(job)
            if not self._lock.locked() and not sys.is_finalizing():
                with suppress(EngineClosed, RuntimeError):  # of a lost GPU hears who steps next
                    self.exclusively(lambda scheduler: None)

    def drop_later(self, job: Job) -> None:
        """Let whoever steps next cancel it; its place in the queue is free at once."""
        if not (job.ended or job.gone):
            job.gone = True
            self._dropped.append(job)

    def gather(self, jobs: Sequence[Callable[[], Job]], progress: Callable[[int, int], None] | None) -> list[Result]:
        """The results of all jobs in their order; each is made shortly before it can run, and what that raises is its
        own result's. progress(done, total) is called as they end."""
        results: list[Result | None] = [None] * len(jobs)
        running: dict[int, Request] = {}
        following, done = 0, 0
        while done < len(jobs):
            while following < len(jobs) and len(running) < 2 * self._slots:
                try:
                    running[following] = self.submit(jobs[following]())
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
                    progress(done, len(jobs))
        return results

    def close(self) -> None:
        """Cancel all that runs or waits; whatever comes after is refused."""
        with self._lock:
            if self.scheduler is not None:
                try:
                    self._catch_up()
                    self.scheduler.cancel_all()
                finally:
                    self.scheduler = None  # with all that it holds


class Request:
    """A generation that was submitted: iterate over its pieces as they come, or wait for its result.

    It goes on while anybody waits for any request of its engine, and its tokens are kept until they are read; each
    iterator begins at the first piece. Closing or dropping an iterator, or the request itself, cancels it.
    """

    def __init__(self, driver: Driver, job: Job):
        self._driver, self._job = driver, job

    def __repr__(self) -> str:
        return f"Request(prompt_tokens={len(self._job.ids)}, finish_reason={self.finish_reason!r})"

    def __del__(self):
        self._driver.drop(self._job)

    @property
    def finish_reason(self) -> str | None:
        """None while it waits or runs; then "stop", "length", "error" or "cancelled"."""
        job = self._job
        if job.failure is not None:
            return "error"
        return job.pieces[-1].finish_reason if job.pieces else None

    @property
    def pieces(self) -> Sequence[Piece]:
        """Those that came until now; it only grows, while others step."""
        return self._job.pieces

    @property
    def failure(self) -> Exception | None:
        """What the prompt's own pass raised, such as a lack of memory; then no last piece comes."""
        return self._job.failure

    @property
    def completion_tokens(self) -> int:
        """Drawn until now."""
        pieces = self._job.pieces
        return len(pieces) - bool(pieces and pieces[-1].token_id is None)

    def __iter__(self) -> Iterator[Piece]:
        """Yield a Piece a token, then the last one, which has finish_reason, usage and timings. Raises what the
        prompt's own pass raised, such as a lack of memory."""
        job = self._job
        try:
            for taken in count():
                if len(job.pieces) == taken:
                    self._driver.wait(lambda taken=taken: len(job.pieces) > taken or job.failure is not None)
                if len(job.pieces) == taken:
                    raise job.failure
                yield (piece := job.pieces[taken])
                if piece.finish_reason is not None:
                    return
        finally:
            self._driver.drop(job)

    def result(self) -> Result:
        """Wait for the end. With finish_reason "error", `error` says why; raises what the prompt's own pass raised."""
        job = self._job
        try:
            self._driver.wait(lambda: job.ended)
        except BaseException:
            self._driver.drop(job)
            raise
        if job.failure is not None:
            raise job.failure
        *pieces, last = job.pieces
        return Result(
            text="".join(piece.text for piece in job.pieces),
            token_ids=tuple(piece.token_id for piece in pieces),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timings=last.timings,
            seed=job.params.seed,
            logprobs=None if job.params.logprobs is None else tuple(piece.logprobs for piece in pieces),
            error=last.error,
        )

    def cancel(self) -> bool:
        """End it now, with a last piece of finish_reason "cancelled"; its slot and pages are free at once. False, and
        nothing is done, where it has ended already, so a second call is harmless."""
        return self._driver.cancel(self._job)

    def drop(self) -> None:
        """`cancel` that waits for no pass: who steps next does it."""
        self._driver.drop_later(self._job)


def failed(error: Exception) -> Result:
    """The result of a request that an error has ended, or that could not begin."""
    line = str(error) if isinstance(error, TridecodeError) else f"{type(error).__name__}: {brief(error)}"
    return Result("", (), "error", Usage(0, 0, 0), Timings(0.0, 0.0, 0.0), seed=0, error=line)
