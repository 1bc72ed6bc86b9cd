"""What signals do: Ctrl-C, Ctrl-Z, and the end that another program or a closed terminal asks for."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress

SHOW_CURSOR = "\x1b[?25h"
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the last one is Ctrl-\ in mid-answer


class Ended(SystemExit):
    """A signal asked the program to end. It is raised so that the terminal and temporary files are put in order."""

    def __init__(self, signum: int):
        super().__init__(128 + signum)
        self.signum = signum

    def end(self) -> None:
        """End by the signal, as whoever sent it expects; it does nothing more where that is not possible."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(self.signum, signal.SIG_DFL)
        os.kill(os.getpid(), self.signum)


@contextmanager
def ending():
    """Within, the signals in _ENDS raise Ended, once; one that the caller has set to something else stays that."""

    def end(signum, frame):
        for each in changed:  # a closed terminal sends more than one; what is put in order must not be cut short
            signal.signal(each, signal.SIG_IGN)
        if in_background():  # suspended, with the terminal in order: to change it there would stop this program again
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), sys.stdin.fileno())
        asked.append(Ended(signum))
        raise asked[0]

    changed: list[signal.Signals] = []
    asked: list[Ended] = []
    try:
        with suppress(ValueError):  # not the main thread
            for each in _ENDS:
                if signal.getsignal(each) is signal.SIG_DFL:
                    signal.signal(each, end)
                    changed.append(each)
        try:
            yield
        finally:
            if asked:  # what came on the way, such as the error of a terminal that has gone, changes nothing
                raise asked[0] from None
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def ending_task():
    """Within, in a task of an event loop, a signal for `ending` cancels the task instead, as asyncio does for Ctrl-C:
    what is raised in a loop's callbacks can be swallowed there. `ending` raises Ended once the loop has ended."""
    import asyncio  # not for the start of every command

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def end(signum, frame):
        try:
            before[signum](signum, frame)
        except Ended:
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits

    main = threading.current_thread() is threading.main_thread()  # elsewhere signals cannot be set
    before = {each: found for each in _ENDS if main and callable(found := signal.getsignal(each))}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in before:
            if signal.getsignal(each) is end:
                signal.signal(each, before[each])


def in_background() -> bool:
    """Whether the terminal of stdin is another program's now, such as that of the shell."""
    with suppress(OSError, ValueError):  # no terminal
        return os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp()
    return False


@contextmanager
def ended_by_interrupt(put_away: Callable[[], None] | None = None):
    """Within, Ctrl-C ends the program as the system does it, once `put_away` has returned. For imports: torch swallows
    a KeyboardInterrupt that comes while it starts, and would be left half made."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(signum, frame):
        if put_away is not None:
            put_away()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, end if put_away else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def heed_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt though the program was started with SIGINT ignored, as a script may do."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def one_interrupt(enabled: bool):
    """Within, the first Ctrl-C raises KeyboardInterrupt and later ones do nothing: impatience must not end the chat."""
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
def suspendable(put_away: Callable[[], None], take_out: Callable[[], None]):
    """Within, Ctrl-Z calls `put_away`, stops the program, and calls `take_out` once it goes on; the cursor is shown."""
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:  # ignored: there is nobody who could let it go on
        yield
        return

    def suspend(signum, frame):
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # another one would come amid of this
        try:
            put_away()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    if stream.isatty():
                        os.write(stream.fileno(), SHOW_CURSOR.encode())
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)
        finally:
            signal.signal(signal.SIGTSTP, suspend)
            take_out()

    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
