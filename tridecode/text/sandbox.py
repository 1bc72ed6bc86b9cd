"""Child processes with limits, for code and data of a checkpoint that this process cannot trust or interrupt.

A child runs one function of this package: `make(setup)` returns `answer(message)`. Setup, messages and results are
lines of JSON over a socket pair. Once its imports are done a child can open no files and no sockets, start no processes
and use no more memory than its limit. The parent ends it when its time is over.
"""

import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import brief

START_SECONDS = 60.0  # for the imports of a child, on a slow disk
LONGEST_REASON = 300  # characters of an error of a child
STARTING = -1  # the user of a child that `start` starts
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from tridecode.text import sandbox; sandbox.main(*sys.argv[2:])"


class SandboxError(Exception):
    """A message has no result.

    Attributes:
        kind: the name of the type of the child's error; None if the child ended or was stopped.
    """

    def __init__(self, reason: str, kind: str | None = None):
        super().__init__(reason)
        self.kind = kind


class Program(NamedTuple):
    """The function that a child runs, and its limits."""

    function: str  # "module:name", a function of this package that takes the setup
    setup: Callable[[], Any]  # called in the parent when a child starts
    memory: int  # bytes of address space
    seconds: float  # for the setup
    longest: int  # bytes of an answer


class Sandbox:
    """One child process or several that run the same program. They end with this object.

    A child that has ended is replaced at the next message. A child that was stopped or interrupted, panicked or ran out
    of memory is ended, because its next answer could be wrong.
    """

    def __init__(self, program: Program):
        self._program, self._children = program, [_Child(program)]
        self._released = threading.Condition()

    def start(self, children: int = 1) -> None:
        """Start this many children in the background. `ask` reports their errors."""
        with self._released:
            self._children += [_Child(self._program) for _ in range(children - len(self._children))]
            for child in self._children:
                if child.user is None and not child.ready:
                    child.user = STARTING
                    threading.Thread(target=self._start, args=(child,), daemon=True).start()

    def wait(self) -> None:
        """Wait until the children that `start` starts are ready, or have failed."""
        with self._released:
            self._released.wait_for(lambda: all(child.user != STARTING for child in self._children))

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the child's answer to `message`.

        Args:
            seconds: the time limit. If this process ends meanwhile, the child ends after as much CPU time.

        Raises:
            SandboxError: the child raised an error, ended, or gave no answer in time.
        """
        child = self._take()
        try:
            return child.ask(message, seconds)
        finally:
            self._release(child)

    def close(self) -> None:
        """End all children; the next message starts another."""
        for child in self._children:
            child.end()

    @property
    def pids(self) -> list[int]:
        """The process ids of the children that are ready."""
        return [child.process.pid for child in self._children if child.process and child.ready]

    def _start(self, child: "_Child") -> None:
        try:
            with suppress(SandboxError):
                child.start()
        finally:
            self._release(child)

    def _take(self) -> "_Child":
        """Wait for a child that no other thread uses; prefer one that is ready."""
        me = threading.get_ident()  # after an interrupt that came before the release it has one already
        with self._released:
            while not (free := [child for child in self._children if child.user in (None, me)]):
                self._released.wait()
            child = max(free, key=lambda child: child.ready)
            child.user = me
            return child

    def _release(self, child: "_Child") -> None:
        with self._released:
            if child.user == STARTING:
                self._released.notify_all()  # `wait` waits too
            child.user = None
            self._released.notify()


class _Child:
    """A process that is started at the first message. One thread uses it at a time: `user`."""

    def __init__(self, program: Program):
        self._program = program
        self.user: int | None = None
        self.process: subprocess.Popen | None = None
        self._socket: socket.socket
        self._owner = 0  # the process that started it: a fork has to start its own
        self._started = False
        self._end: Callable[[], object] = lambda: None

    @property
    def ready(self) -> bool:
        return self._started and self._owner == os.getpid() and self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises SandboxError."""
        self.end()
        program, package = self._program, str(Path(__file__).parents[2])
        command = [sys.executable, "-P", "-c", BOOT, package, program.function, str(program.memory)]
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                # A session of its own: Ctrl-C in the terminal is for the parent.
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxError(f"no process can be started for it ({error.strerror})") from None
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self.process, self._socket, self._owner)
        try:
            self._exchange(b"", START_SECONDS, "its process did not start")
            self._exchange(_line([program.setup(), program.seconds]), program.seconds, "its process was stopped")
        except BaseException:
            self.end()
            raise
        self._started = True

    def ask(self, message: Any, seconds: float) -> Any:
        if not self.ready:
            self.start()
        try:
            answer = self._exchange(_line([message, seconds]), seconds, "its process was stopped")
        except BaseException:  # the answer must not be taken for that of the next message
            self.end()
            raise
        if "error" not in answer:
            return answer["result"]
        if answer["unsafe"]:
            self.end()
        raise SandboxError(answer["reason"], answer["error"])

    def end(self) -> None:
        self._started = False
        self._end()

    def _exchange(self, request: bytes, seconds: float, problem: str) -> Any:
        assert self.process is not None
        until, answer = time.monotonic() + seconds, bytearray()
        try:
            self._socket.settimeout(seconds)
            with suppress(ConnectionError):
                self._socket.sendall(request)
            while not answer.endswith(b"\n"):
                self._socket.settimeout(max(until - time.monotonic(), 1e-3))
                piece = b""
                with suppress(ConnectionError):
                    piece = self._socket.recv(1 << 16)
                answer += piece
                if not piece or len(answer) > self._program.longest:
                    self.process.kill()
                    raise SandboxError(f"its process ended with code {self.process.wait()}")
        except TimeoutError:
            raise SandboxError(f"{problem} after {seconds:g} s") from None
        return json.loads(answer)


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _end(process: subprocess.Popen, ours: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # a fork has the socket too, and must not end the child
        process.kill()
        process.wait()
    ours.close()


# ---- the child


def main(function: str, memory: str) -> None:
    """Answer messages until the parent closes the socket."""
    module, name = function.split(":")
    make = getattr(importlib.import_module(module), name)
    _limit(resource.RLIMIT_AS, int(memory))
    _limit(resource.RLIMIT_NOFILE, 3)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_CORE, 0)
    lines, answer = sys.stdin.buffer, None
    _reply("started")
    for line in lines:
        message, seconds = json.loads(line)
        # The clock of the parent stops it before; this limit is for a child whose parent is gone.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 2 + ceil(seconds), for_good=False)
        if answer is None:
            answer = _made(make, message)
            _reply("ready")
            continue
        try:
            _reply({"result": answer(message)})
        except BaseException as error:  # a panic of a library is not an Exception
            unsafe = isinstance(error, MemoryError) or not isinstance(error, Exception)
            reason = brief(error, LONGEST_REASON) or type(error).__name__
            _reply({"error": type(error).__name__, "reason": reason, "unsafe": unsafe})


def _made(make: Callable[[Any], Callable[[Any], Any]], setup: Any) -> Callable[[Any], Any]:
    """Return make(setup), or a function that raises its error for each message."""
    try:
        return make(setup)
    except BaseException as caught:
        error = caught

    def answer(message: Any) -> Any:
        raise error.with_traceback(None)

    return answer


def _limit(kind: int, value: int, for_good: bool = True) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value if for_good else hard))


def _reply(value: Any) -> None:
    sys.stdout.buffer.write(_line(value))
    sys.stdout.buffer.flush()
