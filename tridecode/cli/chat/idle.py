"""Background capture of CUDA graphs while a chat waits for input: prompt passes and passes that verify drafts."""

import threading
import weakref
from contextlib import suppress

from ...engine import Engine
from ...errors import EngineClosed

PAUSE = 0.01  # Seconds between two captures. An answer may start in this time.


class IdleCapture(threading.Thread):
    """A thread that captures passes until all are captured, the engine is freed, or `end` is called.

    It holds only a weak reference to the engine.
    """

    def __init__(self, engine: Engine):
        super().__init__(daemon=True)
        self._engine, self._ended = weakref.ref(engine), threading.Event()
        self.start()

    def run(self) -> None:
        """Capture one pass after the other until all are captured or `end` is called."""
        with suppress(EngineClosed, RuntimeError):  # The next turn reports the loss of a GPU.
            while (engine := self._engine()) is not None and engine.capture_next():
                del engine
                if self._ended.wait(PAUSE):
                    return

    def end(self) -> None:
        """Stop the thread after the capture in progress."""
        self._ended.set()
        self.join()
