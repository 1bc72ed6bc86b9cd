"""Loop: the one thread that owns the device, and the calls that asyncio has under way.

The list of a request's pieces only grows, so it is the buffer between both sides; it is no longer than the context. The
thread appends pieces and wakes asyncio at most once until asyncio has looked. A call then takes all new pieces. So no
client stalls the thread, a slow client gets several tokens at once, and no token is lost.
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
from .errors import ApiError, refusal
from .settings import TICK

if TYPE_CHECKING:
    from .call import Call

R = TypeVar("R")
PREPARING = 8  # prompts that are rendered and encoded at the same time
FORMS = 16  # and those beside them whose requests may wait for a grammar
log = logging.getLogger("tridecode.server")


class Loop:
    """Steps `engine` while any request runs.

    All but the thread's own function belongs to the asyncio side.

    Args:
        max_queue: requests that may wait for a slot
    """

    _asyncio: asyncio.AbstractEventLoop  # set by `start`, as is _died
    _died: Callable[[], None] | None

    def __init__(self, engine: Engine, max_queue: int, keep_alive: float):
        self.engine, self._keep_alive = engine, keep_alive
        self._most = engine.slots + max_queue
        self._calls: set[Call] = set()
        self._work, self._told, self._stopping = threading.Event(), False, False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._pool, self._forms = ThreadPoolExecutor(PREPARING, "prompt"), ThreadPoolExecutor(FORMS, "form")
        self.failure: BaseException | None = None  # what ended the engine
        self.refusing: str | None = None  # why new calls are turned away

    async def start(self, died: Callable[[], None]) -> None:
        """died: called once, by asyncio, when the engine has failed."""
        self._asyncio, self._died = asyncio.get_running_loop(), died
        self._thread.start()
        self._ticker = asyncio.create_task(self._tick())

    def stop(self) -> None:
        """End the thread, after the pass that runs."""
        self._stopping = True
        self._work.set()
        self._ticker.cancel()
        for pool in (self._pool, self._forms):
            pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout=60)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                while self.engine.step() and not self._stopping:
                    self._tell()
                self._tell()
                if not self._capture():
                    self._work.wait()
        except EngineClosed:  # which has cancelled what ran
            self._tell()
        except BaseException as error:
            self.failure = error
            log.exception("the engine failed")
            self._tell()

    def _capture(self) -> bool:
        """Use time in which nothing runs for one of the captures that could wait: whoever comes meanwhile waits for it
        alone, and before the first answer for none. False where none is left."""
        return not self._work.is_set() and self.engine.scheduler.answered and self.engine.capture_next()

    def _tell(self) -> None:
        if not self._told and not self._asyncio.is_closed():
            self._told = True
            self._asyncio.call_soon_threadsafe(self._hear)

    # ---- asyncio

    def _hear(self) -> None:
        self._told = False  # first: what comes from now on is told anew
        for call in self._calls:
            call.look()
        if self.failure is not None and self._died is not None:
            died, self._died = self._died, None
            died()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            for call in list(self._calls):
                if call.deadline is not None and now > call.deadline:
                    call.end(ApiError(504, "the request took longer than this server allows", code="timeout"))
                elif now - call.heard > self._keep_alive:
                    call.look(anyway=True)

    def check(self, count: int = 1) -> None:
        """Raises ApiError where `count` more requests cannot be taken now, or never."""
        if self.failure is not None:
            raise ApiError(503, "the engine has failed; this server is about to end", code="engine_failed")
        if self.refusing:
            raise ApiError(503, self.refusing, code="stopping")
        if count > self._most:
            asked = f"prompts times n, and each prompt again for echo with logprobs, come to {count:,} requests"
            raise refusal(f"{asked}: this server takes at most {self._most:,} at a time; ask for fewer")
        if sum(call.open for call in self._calls) + count > self._most:
            most = counted(self._most, "request")
            raise ApiError(503, f"{most} under way or waiting, as many as may be; try again later", code="queue_full")

    async def prepared(self, work: Callable[[], R]) -> R:
        """Return the result of work(), which runs in a thread because it may be slow."""
        return await self._asyncio.run_in_executor(self._pool, work)

    async def begin(self, call: "Call", count: int, submit: Callable[[], list[Request]], formed: bool = False) -> None:
        """Give `call` the `count` requests that submit() returns. Raises ApiError and the errors of submit().

        formed: the requests have grammars, which submit() may wait for
        """
        self.check(count)
        call.expected = count
        try:
            call.follow(await self._asyncio.run_in_executor(self._forms if formed else self._pool, submit))
        finally:
            self._work.set()

    def add(self, call: "Call") -> None:
        self._calls.add(call)

    def forget(self, call: "Call") -> None:
        self._calls.discard(call)

    def end_all(self, error: ApiError) -> None:
        for call in list(self._calls):
            call.end(error)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._asyncio.call_later(seconds, action)
