"""A child process that answers lines of JSON: a checkpoint's own programs run there, bounded in time and memory."""

import json
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

START_LIMIT = 60.0  # seconds for the child's imports, on a disk that is slow


class WorkerFailure(Exception):
    """No answer came; the text says why ("its process was stopped after 5 s")."""


class Child(subprocess.Popen[bytes]):
    """A process with pipes to its input and from its output."""

    stdin: IO[bytes]
    stdout: IO[bytes]


class Worker:
    """Runs `script` with `arguments` as long as this object lives, and anew whenever the process is gone.

    The script reads what `source` returns as its first line, says that it is ready, then answers each line with one.
    All lines are JSON; `longest` bounds an answer's bytes.
    """

    def __init__(self, script: Path, arguments: tuple, source: Callable, longest: int):
        self._script, self._arguments, self._source, self._longest = script, arguments, source, longest
        self._lock = threading.Lock()
        self.process: Child | None = None
        self._stop: Callable[[], object] | None = (
            None  # ends the process; called at the latest when this object or the program ends
        )
        self._ready = False
        self._owner: int | None = None

    def start(self) -> None:
        """Start the child without waiting for it; `ask` does so too where it must."""
        with self._lock, suppress(WorkerFailure):
            self._child()

    @property
    def busy(self) -> bool:
        """Whether somebody is asking it."""
        return self._lock.locked()

    def ask(self, request, seconds: float):
        """The child's answer to `request`. Raises WorkerFailure: it gave none within `seconds`, or ended. A child that
        gave none is ended, as it is by Ctrl-C; the next call starts another."""
        with self._lock:
            try:
                child = self._child()
                if not self._ready:
                    self._exchange(child, b"", START_LIMIT, "its process did not start")
                    self._ready = True
                return json.loads(self._exchange(child, _line(request), seconds, "its process was stopped"))
            except BaseException:  # the answer to an abandoned question must not be taken for the next one's
                if self._stop:
                    self._stop()
                raise

    def stop(self) -> None:
        """End the child; the next call starts another."""
        with self._lock:
            if self._stop:
                self._stop()

    def _exchange(self, child: Child, request: bytes, seconds: float, what: str) -> bytes:
        began = time.monotonic()
        clock = threading.Timer(seconds, child.kill)
        clock.daemon = True
        clock.start()
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(request)
                child.stdin.flush()
            line = child.stdout.readline(self._longest)
        finally:
            clock.cancel()
        if line.endswith(b"\n"):
            return line
        if time.monotonic() - began >= seconds:
            raise WorkerFailure(f"{what} after {seconds:g} s")
        child.kill()
        raise WorkerFailure(f"its process ended with code {child.wait()}")

    def _child(self) -> Child:
        if self.process and self._owner == os.getpid() and self.process.poll() is None:
            return self.process
        if self._stop:
            self._stop()
        try:
            self.process = Child(
                [sys.executable, "-P", str(self._script), *map(str, self._arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for this process, not for the child
            )
        except OSError as error:
            raise WorkerFailure(f"no process can be started for it ({error.strerror})") from None
        self._ready, self._owner = False, os.getpid()
        self._stop = weakref.finalize(self, _end, self.process, self._owner)
        with suppress(BrokenPipeError):
            self.process.stdin.write(_line(self._source()))
            self.process.stdin.flush()
        return self.process


class Pool:
    """Workers for those who ask at the same time. The first serves whoever asks alone: the others cost nothing then."""

    def __init__(self, size: int, make: Callable[[], Worker]):
        self._workers = [make() for _ in range(size)]
        self.first = self._workers[0]

    def one(self) -> Worker:
        """One that nobody is asking now, or any where there is none; nothing is held that could be lost."""
        return next((worker for worker in self._workers if not worker.busy), None) or random.choice(self._workers)


def _line(value) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _end(process: Child, owner: int) -> None:
    if os.getpid() == owner:  # a fork of it has the pipes too, and must leave the child alone
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what it never read
            pipe.close()
