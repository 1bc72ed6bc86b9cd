"""Handling of signals: Ctrl-C, Ctrl-Z, and the signals that end the program."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress

SHOW_CURSOR = "\x1b[?25h"
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # SIGQUIT is Ctrl-\ during an answer.


class Ended(SystemExit):
    """An exception for a signal that ends the program, so that the terminal and temporary files are cleaned up."""

    def __init__(self, signum: int):
        super().__init__(128 + signum)
        self.signum = signum

    def end(self) -> None:
        """End the process by the signal, so that its parent sees the signal. Does nothing if that is not possible."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(self.signum, signal.SIG_DFL)
        os.kill(os.getpid(), self.signum)


@contextmanager
def ending():
    """Make the first signal of _ENDS raise Ended. A signal that is ignored or has a handler is not changed."""

    def end(signum, frame):
        for each in changed:  # A closed terminal sends several signals. A second one must not interrupt the cleanup.
            signal.signal(each, signal.SIG_IGN)
        if in_background():  # A program in the background that changes the terminal is stopped by SIGTTOU.
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), sys.stdin.fileno())
        received.append(Ended(signum))
        raise received[0]

    changed: list[signal.Signals] = []
    received: list[Ended] = []
    try:
        with suppress(ValueError):  # This is not the main thread.
            for each in _ENDS:
                if signal.getsignal(each) is signal.SIG_DFL:
                    signal.signal(each, end)
                    changed.append(each)
        try:
            yield
        finally:
            if received:  # An error of the cleanup, such as a closed terminal, must not replace the signal.
                raise received[0] from None
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def ending_task():
    """Make a signal for `ending` cancel the current task, as asyncio does for Ctrl-C.

    If the signal raised an exception in a callback of the loop, the loop could ignore it. `ending` raises Ended after
    the loop has ended.
    """
    import asyncio  # Most commands do not need this import.

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end(signum, frame):
        try:
            before[signum](signum, frame)
        except Ended:
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # This call wakes a loop that waits.

    main = threading.current_thread() is threading.main_thread()  # Only the main thread can set signal handlers.
    before = {each: handler for each in _ENDS if main and callable(handler := signal.getsignal(each))}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in before:
            if signal.getsignal(each) is end:
                signal.signal(each, before[each])


def in_background() -> bool:
    """Return whether another program, for example the shell, controls the terminal of stdin."""
    with suppress(OSError, ValueError):  # There is no terminal.
        return os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()
    return False


@contextmanager
def ended_by_interrupt(before_stop: Callable[[], None] | None = None):
    """Make Ctrl-C end the process by the signal, after `before_stop`.

    This is for imports. If a KeyboardInterrupt occurs while torch is imported, torch ignores it and is incomplete
    afterwards.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(signum, frame):
        if before_stop is not None:
            before_stop()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, end if before_stop else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def called_at_exit_of_library(function: Callable[[], None]):
    """Call `function` if a library that is imported within the context ends the process, as MKL does after an error.

    Python's cleanup does not run then. Does nothing if the C library has no __cxa_atexit.
    """
    import ctypes

    inside = True
    handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function() if inside else None)
    owner = ctypes.c_int()  # Its address identifies the handler.
    library = ctypes.CDLL(None)
    try:
        library.__cxa_atexit(handler, None, ctypes.byref(owner))
    except AttributeError:
        yield
        return
    try:
        yield
    finally:
        inside = False
        library.__cxa_finalize(ctypes.byref(owner))  # Calls and removes the handler.


@contextmanager
def one_interrupt(enabled: bool):
    """Make the first Ctrl-C raise KeyboardInterrupt, and ignore later ones, which must not end the chat."""
    if not enabled:
        yield
        return

    def interrupt(signum, frame):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def suspendable(before_stop: Callable[[], None], after_continue: Callable[[], None]):
    """Call functions before Ctrl-Z stops the program and after it continues, within the context.

    `before_stop` is called first, then the cursor is shown and the program stops. `after_continue` is called when it
    continues. If contexts are nested, the inner `before_stop` is called first and the inner `after_continue` last.
    """
    outer = signal.getsignal(signal.SIGTSTP)
    if outer in (signal.SIG_IGN, None):  # The signal is ignored, so no shell would continue the program.
        yield
        return

    def suspend(signum, frame):
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # A second Ctrl-Z must not interrupt this handler.
        try:
            before_stop()
            if callable(outer):
                outer(signum, frame)
            else:
                stop()
        finally:
            signal.signal(signal.SIGTSTP, suspend)
            after_continue()

    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, outer)


def stop() -> None:
    """Stop the program, as Ctrl-Z does without a handler, and show the cursor."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream.isatty():
                os.write(stream.fileno(), SHOW_CURSOR.encode())
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTSTP)
