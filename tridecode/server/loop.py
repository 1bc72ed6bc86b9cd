"""The thread that runs the engine, and its connection to asyncio.

The buffer between the two sides is the list of a request's output chunks, which only grows and is no longer than the
context. The thread appends chunks and schedules one callback on the asyncio side, unless one is already scheduled. A
call then reads all new chunks. Therefore no client stalls the thread, a slow client receives several tokens at once,
and no token is lost.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ..engine import Engine
from ..errors import EngineClosed, counted
from ..serve.request import Request
from .errors import ApiError, bad_request
from .settings import TICK_SECONDS

if TYPE_CHECKING:
    from .call import Call

R = TypeVar("R")
PREPARING = 8  # Number of threads that render and encode prompts.
GRAMMAR_THREADS = 16  # Number of threads for requests with a grammar. They wait for its compilation.
log = logging.getLogger("tridecode.server")


class Loop:
    """Runs the engine's passes in a thread, and wakes calls in asyncio.

    Only `_run` and the methods that it calls run in the thread; all others run in asyncio.

    Args:
        max_queue: number of requests that may wait for a slot.
        keep_alive: seconds of silence after which a stream sends a comment.
    """

    _asyncio: asyncio.AbstractEventLoop  # `start` sets this attribute and _on_failure.
    _on_failure: Callable[[], None] | None

    def __init__(self, engine: Engine, max_queue: int, keep_alive: float):
        self.engine, self._keep_alive = engine, keep_alive
        self._max_requests = engine.slots + max_queue
        self._calls: set[Call] = set()
        self._work, self._notified, self._stopping = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._pool = ThreadPoolExecutor(PREPARING, "prompt")
        self._grammar_pool = ThreadPoolExecutor(GRAMMAR_THREADS, "grammar")
        self.failure: BaseException | None = None  # The error that ended the engine.
        self.refusing: str | None = None  # The reason why new calls are refused, or None.

    async def start(self, on_failure: Callable[[], None]) -> None:
        """Start the thread. `on_failure` is called once in asyncio if the engine fails."""
        self._asyncio, self._on_failure = asyncio.get_running_loop(), on_failure
        self._thread.start()
        self._ticker = asyncio.create_task(self._tick())

    def stop(self) -> None:
        """End the thread after the running pass."""
        self._stopping = True
        self._work.set()
        self._ticker.cancel()
        for pool in (self._pool, self._grammar_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout=60)

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def open(self) -> int:
        """Number of requests that run or wait."""
        return sum(call.open for call in self._calls)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                while self.engine.step() and not self._stopping:
                    self._notify()
                self._notify()
                if not self._capture():
                    self._work.wait()
        except EngineClosed:  # The engine was closed, which cancels its requests.
            self._notify()
        except BaseException as error:
            self.failure = error
            log.exception("the engine failed")
            self._notify()

    def _capture(self) -> bool:
        """Capture one deferred graph while the engine is idle; return False if all are captured or a request arrived.

        If a request arrives during a capture, it waits for this capture only. No capture runs before the first answer.
        """
        return not self._work.is_set() and self.engine.scheduler.answered and self.engine.capture_next()

    def _notify(self) -> None:
        if not self._notified and not self._asyncio.is_closed():
            self._notified = True
            self._asyncio.call_soon_threadsafe(self._on_progress)

    # ---- asyncio

    def _on_progress(self) -> None:
        # This is reset first, so that chunks that arrive during this callback schedule another one.
        self._notified = False
        for call in self._calls:
            call.wake()
        if self.failure is not None and self._on_failure is not None:
            on_failure, self._on_failure = self._on_failure, None
            on_failure()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            for call in list(self._calls):
                if call.deadline is not None and now > call.deadline:
                    call.end(
                        ApiError(
                            504,
                            "the request exceeded the time limit of this server; shorten the prompt or the answer",
                            code="timeout",
                        )
                    )
                elif now - call.last_awake > self._keep_alive:
                    call.wake(force=True)

    def check(self, count: int = 1) -> None:
        """Check that `count` more requests can be accepted.

        Raises:
            ApiError: (400) if the server can never accept them, or (503) if it cannot accept them at present.
        """
        if self.failure is not None:
            raise ApiError(503, "the engine has failed; this server is about to stop", code="engine_failed")
        if self.refusing:
            raise ApiError(503, self.refusing, code="stopping")
        if count > self._max_requests:
            needed = f"prompts times n, plus one per prompt for echo with logprobs, are {count:,} requests"
            raise bad_request(f"{needed}: this server accepts at most {self._max_requests:,} at a time; send fewer")
        if self.open + count > self._max_requests:
            limit = counted(self._max_requests, "request")
            raise ApiError(503, f"the queue is full: {limit} running or waiting; try again later", code="queue_full")

    async def run_in_thread(self, work: Callable[[], R]) -> R:
        """Return the result of `work()`, which runs in a thread because it may be slow."""
        return await self._asyncio.run_in_executor(self._pool, work)

    async def begin(
        self, call: "Call", count: int, submit: Callable[[], list[Request]], constrained: bool = False
    ) -> None:
        """Run `submit()` in a thread and attach the `count` requests that it returns to `call`.

        Args:
            constrained: whether the requests have grammars, for which `submit()` may wait.

        Raises:
            ApiError: the requests cannot be accepted; errors of `submit()` are raised unchanged.
        """
        self.check(count)
        call.expected = count
        try:
            call.attach(await self._asyncio.run_in_executor(self._grammar_pool if constrained else self._pool, submit))
        finally:
            self._work.set()

    def add(self, call: "Call") -> None:
        """Register a call, so that it is woken and its deadline is checked."""
        self._calls.add(call)

    def remove(self, call: "Call") -> None:
        """Remove a call that has ended."""
        self._calls.discard(call)

    def end_all(self, error: ApiError) -> None:
        """End all calls with `error`."""
        for call in list(self._calls):
            call.end(error)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` in asyncio after `seconds`."""
        self._asyncio.call_later(seconds, action)
