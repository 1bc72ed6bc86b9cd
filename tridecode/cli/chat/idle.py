"""What a chat does while its user thinks: prompt passes of more sizes, and passes that verify drafts, are captured, one
at a time."""

import threading
import weakref
from contextlib import suppress

from ...engine import Engine
from ...errors import EngineClosed

PAUSE = 0.01  # seconds between two sizes, in which an answer may begin


class IdleCapture(threading.Thread):
    """Captures until nothing is left, the engine is gone, or `end` is called; it does not keep the engine alive."""

    def __init__(self, engine: Engine):
        super().__init__(daemon=True)
        self._engine, self._ended = weakref.ref(engine), threading.Event()
        self.start()

    def run(self) -> None:
        with suppress(EngineClosed, RuntimeError):  # of a lost GPU the next turn tells
            while (engine := self._engine()) is not None and engine.capture_next():
                del engine
                if self._ended.wait(PAUSE):
                    return

    def end(self) -> None:
        """Wait for the size that is being captured."""
        self._ended.set()
        self.join()
