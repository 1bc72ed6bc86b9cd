"""Chat templates: Jinja programs that come with a checkpoint, run in a sandbox by a child process with limits."""

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from .errors import NO_CHAT, PromptError

WORKER = Path(__file__).with_name("template_worker.py")
START_LIMIT = 60.0  # seconds for the child's imports, on a disk that is slow


@dataclass(frozen=True)
class Limits:
    """What one render may take: seconds on the clock, bytes of memory, characters of output."""

    seconds: float = 5.0
    memory: int = 512 << 20
    characters: int = 16 << 20


class ChatTemplate:
    """A template's source and the special tokens it may name (bos_token, eos_token, ...), rendered as text.

    The sandbox keeps a template from Python's objects; the child process, which lives as long as this object, keeps it
    from files and bounds its time, memory and output. file: where the source is from, for messages.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], file: Path | str | None = None, limits: Limits | None = None
    ):
        self.source, self.special_tokens = source, special_tokens
        self.limits = limits or Limits()
        self._name = "the chat template" if file is None else f"the chat template in {file}"
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._stop = None  # ends the process; called at the latest when this object or the program ends
        self._ready, self._owner = False, None

    def start(self) -> None:
        """Start the child, which takes some 60 ms, without waiting for it; `render` does so too where it must."""
        with self._lock, suppress(PromptError):
            self._child()

    def render(self, messages: list[dict], variables: dict) -> str:
        """The prompt's text; PromptError with the template's own words where it refuses, or with what went wrong."""
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **variables}
        with self._lock:
            found = self._ask(given | {"messages": messages})
        match found.get("failure"):
            case None:
                # A literal of the template may hold half a surrogate pair.
                return found["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            case "refused":
                raise PromptError(f"{self._name} refused these messages: {found['reason']}")
            case "broken":
                raise PromptError(f"{self._name} is broken, {found['reason']}; {NO_CHAT}")
            case "failed":
                raise PromptError(f"{self._name} failed on these messages: {found['reason']}")
            case "memory":
                raise PromptError(f"{self._name} needs more than {self.limits.memory >> 20} MiB of memory; {NO_CHAT}")
            case _:
                limit = f"{self.limits.characters:,} characters"
                raise PromptError(f"{self._name} wrote more than {limit}; shorten the chat, or {NO_CHAT}")

    def variables(self) -> frozenset[str]:
        """Names that the template reads and that `render` may give it; none where that cannot be found out."""
        try:
            with self._lock:
                found = self._ask(None)
        except PromptError:
            return frozenset()
        names = json.loads(found.get("text", "[]"))
        return frozenset(names) - {"messages", "add_generation_prompt", *self.special_tokens}

    def _ask(self, given: dict | None) -> dict:
        """The child's answer, to None the names that the template reads. A child that gives none is ended; so is one
        that ran out of memory. The next call starts another."""
        try:
            child = self._child()
            if not self._ready:
                self._exchange(child, b"", START_LIMIT, "did not start")
                self._ready = True
            line = self._exchange(child, _line(given), self.limits.seconds, "was stopped")
            found = json.loads(line)
        except BaseException:  # Ctrl-C too: the answer to an abandoned question must not be taken for the next one's
            if self._stop:
                self._stop()
            raise
        if found.get("failure") == "memory":
            self._stop()
        return found

    def _exchange(self, child: subprocess.Popen, request: bytes, seconds: float, what: str) -> bytes:
        began = time.monotonic()
        clock = threading.Timer(seconds, child.kill)
        clock.daemon = True
        clock.start()
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(request)
                child.stdin.flush()
            line = child.stdout.readline(8 * self.limits.characters + 1000)  # no character takes more in JSON
        finally:
            clock.cancel()
        if line.endswith(b"\n"):
            return line
        if time.monotonic() - began >= seconds:
            raise PromptError(f"{self._name} {what} after {seconds:g} s; {NO_CHAT}")
        child.kill()
        raise PromptError(f"{self._name}: its process ended with code {child.wait()}; {NO_CHAT} if that happens again")

    def _child(self) -> subprocess.Popen:
        if self._process and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        if self._stop:
            self._stop()
        limits = (self.limits.memory, 2 * ceil(self.limits.seconds), self.limits.characters)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for this process, not for the child
            )
        except OSError as error:
            raise PromptError(f"{self._name}: no process can be started for it ({error.strerror})") from None
        self._ready, self._owner = False, os.getpid()
        self._stop = weakref.finalize(self, _end, self._process, self._owner)
        with suppress(BrokenPipeError):
            self._process.stdin.write(_line(self.source))
            self._process.stdin.flush()
        return self._process


def _line(value) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:  # a fork of it has the pipes too, and must leave the child alone
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what it never read
            pipe.close()
