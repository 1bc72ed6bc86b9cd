"""Child processes with limits, for code of a checkpoint that is not trusted and cannot be interrupted.

A child process runs one function of this package: `make(setup)` returns `answer(message)`. Setup, messages and results
are lines of JSON over a socket pair. After its imports, a child cannot open files or sockets, start processes, or
exceed its memory limit. The parent kills it at its time limit.
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

START_SECONDS = 60.0  # Seconds for the imports of a child process, which are slow on a slow disk.
MAX_REASON_CHARACTERS = 300  # Maximum characters of the error message of a child process.
STARTING = -1  # Value of `_Child.user` while `Sandbox.start` starts the child process.
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from tridecode.text import sandbox; sandbox.main(*sys.argv[2:])"


class SandboxError(Exception):
    """A child returned no result for a message.

    Attributes:
        kind: type name of the exception that the child raised; None if the child ended or was killed.
        ready: whether the child was ready for the message. If not, the message is not the reason.
    """

    def __init__(self, reason: str, kind: str | None = None, ready: bool = True):
        super().__init__(reason)
        self.kind, self.ready = kind, ready


class Program(NamedTuple):
    """The function that a child runs, and the limits of the child."""

    function: str  # "module:name" of a function of this package. Its argument is the setup.
    setup: Callable[[], Any]  # Called in the parent process when a child process starts.
    memory: int  # Bytes of address space.
    seconds: float  # Time limit of the setup in seconds.
    max_answer_bytes: int
    stack: int = 0  # Bytes of the stack, which are part of `memory`. 0 is the operating system's size.
    max_children: int = 1  # Maximum number of children that `call` starts. `start` may start more.


class Sandbox:
    """One or more child processes that run the same program. They end when this object is closed or deleted.

    A child that has ended is replaced at the next call. After a timeout, an interrupt, a panic or a memory error, the
    child is killed, because its next answer could be wrong.
    """

    def __init__(self, program: Program):
        self._program, self._children = program, [_Child(program)]
        self._closings, self._released = 0, threading.Condition()
        _sandboxes.add(self)

    def start(self, children: int = 1) -> None:
        """Start children in the background, up to this number in total. `call` reports their errors."""
        with self._released:
            self._children += [_Child(self._program) for _ in range(children - len(self._children))]
            for child in self._children:
                if child.user is None and not child.ready:
                    child.user, child.killed = STARTING, False
                    threading.Thread(target=self._start, args=(child,), daemon=True).start()

    def wait(self) -> None:
        """Wait until each child that `start` is starting is ready or has failed."""
        with self._released:
            self._released.wait_for(lambda: all(child.user != STARTING for child in self._children))

    def call(self, message: Any, seconds: float, cpu_seconds: int | None = None) -> Any:
        """Return a child's answer to `message`.

        Args:
            seconds: time limit.
            cpu_seconds: limit of CPU time. By default it is larger than `seconds`, and only ends a child process whose
                parent has ended.

        Raises:
            SandboxError: the child raised an error, ended, or did not answer in time.
        """
        child = self._take()
        try:
            return child.call(message, seconds, cpu_seconds)
        finally:
            self._release(child)

    def close(self) -> None:
        """Kill all children. The next call starts a new one.

        Calls in progress end with a SandboxError, also those that wait for a child.
        """
        with self._released:
            self._closings += 1
            self._released.notify_all()
            for child in self._children:
                if child.user in (None, threading.get_ident()):
                    child.end()
                else:
                    child.kill()  # The thread that uses the child then ends it.
            self._released.wait_for(lambda: all(child.user != STARTING for child in self._children))

    @property
    def pids(self) -> list[int]:
        """The process ids of the children that are ready."""
        return [child.process.pid for child in self._children if child.process and child.ready]

    def _start(self, child: "_Child") -> None:
        try:
            # `call` starts the child again and reports its error. When the program exits, the socket may be closed.
            with suppress(Exception):
                child.start()
        finally:
            self._release(child)

    def _take(self) -> "_Child":
        """Reserve a child that no other thread uses, preferably one that is ready. Wait if all are in use."""
        # If an interrupt prevented an earlier release, this thread already has a child process and may take it again.
        me, closings = threading.get_ident(), self._closings
        with self._released:
            while not (free := [child for child in self._children if child.user in (None, me)]):
                if len(self._children) < self._program.max_children:
                    self._children.append(_Child(self._program))
                else:
                    self._released.wait()
                if self._closings != closings:
                    raise SandboxError("its process was stopped", ready=False)
            child = max(free, key=lambda child: child.ready)
            child.user, child.killed = me, False
            return child

    def _release(self, child: "_Child") -> None:
        with self._released:
            if child.user == STARTING:
                self._released.notify_all()  # `wait` and `_take` may both be waiting.
            child.user = None
            self._released.notify()


def _after_fork() -> None:
    """Release what other threads of the parent process held at the fork. They do not exist in this process."""
    for sandbox in _sandboxes:
        sandbox._released = threading.Condition()
        for child in sandbox._children:
            child.user = None


_sandboxes: weakref.WeakSet[Sandbox] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


class _Child:
    """A child process, started at its first use.

    Attributes:
        user: id of the thread that uses the child; STARTING while `Sandbox.start` starts it; None if it is free.
        killed: whether another thread has called `kill` for this user.
    """

    def __init__(self, program: Program):
        self._program = program
        self.user: int | None = None
        self.killed = False
        self.process: subprocess.Popen | None = None
        self._socket: socket.socket
        self._owner = 0  # Id of the process that started the child process. A fork of it starts its own child process.
        self._started = False
        self._end: Callable[[], object] = lambda: None

    @property
    def ready(self) -> bool:
        """Whether the process runs, has completed its setup, and belongs to this process."""
        return self._started and self._owner == os.getpid() and self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises SandboxError."""
        self.end()
        program, package = self._program, str(Path(__file__).parents[2])
        limits = str(program.memory), str(program.stack)
        command = [sys.executable, "-P", "-c", BOOT, package, program.function, *limits]
        try:
            self._socket, child_end = socket.socketpair()
            with child_end:
                # The child process has its own session, so that Ctrl-C in the terminal interrupts only the parent.
                self.process = subprocess.Popen(
                    command,
                    stdin=child_end.fileno(),
                    stdout=child_end.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxError(f"no process can be started for it ({error.strerror})", ready=False) from None
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self.process, self._socket, self._owner)
        try:
            if self.killed:  # `kill` may have been called before this process existed.
                raise SandboxError("its process was stopped")
            self._exchange(b"", START_SECONDS, "its process did not start")
            limit = ceil(program.seconds) + 2
            self._exchange(_line([program.setup(), limit]), program.seconds, "its process was stopped")
        except BaseException as error:
            self.end()
            if isinstance(error, SandboxError):
                error.ready = False
            raise
        self._started = True

    def call(self, message: Any, seconds: float, cpu_seconds: int | None) -> Any:
        """Return the answer to `message`. Raises SandboxError."""
        if not self.ready:
            self.start()
        try:
            limit = cpu_seconds or ceil(seconds) + 2
            answer = self._exchange(_line([message, limit]), seconds, "its process was stopped")
        except BaseException:  # Otherwise the next call would receive the answer to this one.
            self.end()
            raise
        if "error" not in answer:
            return answer["result"]
        if answer["unsafe"]:
            self.end()
        raise SandboxError(answer["reason"], answer["error"])

    def end(self) -> None:
        """Kill the process and close the connection. Only the user of the child may call this."""
        self._started = False
        self._end()

    def kill(self) -> None:
        """Kill the process from any thread. The thread that waits for its answer gets a SandboxError."""
        self.killed = True
        if self.process is not None and self._owner == os.getpid():
            self.process.kill()

    def _exchange(self, request: bytes, seconds: float, problem: str) -> Any:
        """Send a line and return the answer. On a timeout, raise a SandboxError that begins with `problem`."""
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
                if not piece or len(answer) > self._program.max_answer_bytes:
                    self.process.kill()
                    raise SandboxError(f"its process ended with code {self.process.wait()}")
        except TimeoutError:
            raise SandboxError(f"{problem} after {seconds:g} s") from None
        return json.loads(answer)


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _end(process: subprocess.Popen, connection: socket.socket, owner: int) -> None:
    if os.getpid() == owner:  # A fork also has the socket, but must not kill the child process.
        process.kill()
        process.wait()
    connection.close()


# ---- the child process


def main(function: str, memory: str, stack: str) -> None:
    """Answer messages until the parent closes the socket."""
    if int(stack):  # The stack of the first thread cannot grow beyond its size at the start of the process.
        threading.stack_size(int(stack))
        thread = threading.Thread(target=_answer_messages, args=(function, int(memory)))
        thread.start()
        thread.join()
    else:
        _answer_messages(function, int(memory))


def _answer_messages(function: str, memory: int) -> None:
    module, name = function.split(":")
    make = getattr(importlib.import_module(module), name)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_NOFILE, 3)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_CORE, 0)
    lines, answer = sys.stdin.buffer, None
    _reply("started")
    for line in lines:
        message, cpu_seconds = json.loads(line)
        _limit(resource.RLIMIT_CPU, ceil(time.process_time()) + cpu_seconds, permanent=False)
        if answer is None:
            answer = _make_or_fail(make, message)
            _reply("ready")
            continue
        try:
            _reply({"result": answer(message)})
        except BaseException as error:  # A panic of a Rust library is not an Exception.
            unsafe = isinstance(error, MemoryError) or not isinstance(error, Exception)
            reason = brief(error, MAX_REASON_CHARACTERS) or type(error).__name__
            _reply({"error": type(error).__name__, "reason": reason, "unsafe": unsafe})


def _make_or_fail(make: Callable[[Any], Callable[[Any], Any]], setup: Any) -> Callable[[Any], Any]:
    """Return make(setup). If it fails, return a function that raises the same error for each message."""
    try:
        return make(setup)
    except BaseException as caught:
        error = caught

    def answer(message: Any) -> Any:
        raise error.with_traceback(None)

    return answer


def _limit(kind: int, value: int, permanent: bool = True) -> None:
    """Set the soft limit of a resource, and with `permanent` also the hard limit, which cannot be raised again."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value if permanent else hard))


def _reply(value: Any) -> None:
    sys.stdout.buffer.write(_line(value))
    sys.stdout.buffer.flush()
