"""Dispatch, logging, and what the shell sees of an error: one line and an exit code."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable

from ..errors import NO_CHAT, TridecodeError
from .parser import SAMPLING, make_parser
from .signals import Ended, ended_by_interrupt, ending
from .terminal import Output, foreign_encoding, one_line, tolerant_streams

INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended
LOADING = ("model", "device", "backend", "dtype", "max_seq_len", "graph")  # arguments of Engine.load, each an option


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong options end in SystemExit(2), as argparse does."""
    try:
        with ending():
            return flushed(argv)
    except Ended as asked:
        asked.end()
        raise
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def flushed(argv: list[str] | None) -> int:
    """`main`, but for signals."""
    tolerant_streams()
    try:
        return guarded(argv)
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError:  # stderr takes nothing either: nobody can be told
        return 1
    finally:
        drop_unwritten()


def guarded(argv: list[str] | None) -> int:
    """`main`, but for streams that fail while the error itself is told."""
    if encoding := foreign_encoding():
        Output().error(f"text cannot be read and written as {encoding}; unset PYTHONIOENCODING, or set it to utf-8")
        return 1
    output, args = Output(), None
    try:
        args = make_parser().parse_args(argv)
        set_up_logging(args.verbose)
        code = run(args, output)
        sys.stdout.flush()  # here, where what fails can still be told
        return code
    except BrokenPipeError:
        raise
    except Exception as error:
        if args is not None and args.verbose:
            logging.getLogger("tridecode").exception("%s failed", args.command)
        output.error(explain(error, (*SAMPLING, "n")))
        return 1


def drop_unwritten() -> None:
    """Python flushes its streams once more at exit: what they could not write must not fail again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(args, output: Output) -> int:
    with ended_by_interrupt():
        command = imported(args.command)
    return command(args, output)


def imported(name: str) -> Callable:
    """The function of a command. The commands bring torch with them, so they are imported only now."""
    if name == "chat":
        from .chat import chat

        return chat
    if name == "generate":
        from .generate import generate

        return generate
    if name == "bench":
        from .bench import run as bench

        return lambda args, output: bench(args)
    if name == "profile":
        from .profile import run as profile

        return profile
    if name == "tune":
        from .tune import run as tune

        return tune
    from .info import info

    return info


def explain(error: Exception, arguments: Iterable[str] = ()) -> str:
    """One line about any error; those that are not the user's say how to learn more.

    arguments: those that were given as options, beside LOADING; the line names their options.
    """
    if isinstance(error, TridecodeError):
        return one_line(with_options(str(error), (*LOADING, *arguments)))
    if type(error).__name__ == "OutOfMemoryError":  # torch's, on a GPU
        return "out of memory; choose a smaller --max-seq-len or model"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "out of memory on this machine; shorten the input or end other programs"
    if isinstance(error, OSError) and error.strerror:  # a full disk, a file that may not be read
        return one_line(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
    text = one_line(error)
    return f"{type(error).__name__}{': ' if text else ''}{text} (--verbose shows the traceback)"


def with_options(text: str, arguments: Iterable[str]) -> str:
    """An error of the library, which names Python's arguments, with their options in place of them.

    Some are words as well: they count at the beginning and as name="value", those with an underscore everywhere.
    """
    names = "|".join(arguments)
    text = re.sub(rf'\b({names})="(\w+)"', lambda found: f"{option(found[1])} {found[2]}", text)
    text = re.sub(rf"^({names})(?= must |: )", lambda found: option(found[1]), text)
    text = re.sub(rf"(?<![\w-])({names})(?!\w)", lambda found: option(found[1]) if "_" in found[1] else found[1], text)
    return text.replace(NO_CHAT, "use --raw")


def option(argument: str) -> str:
    return "--" + argument.replace("_", "-")


def set_up_logging(verbose: bool) -> None:
    logger = logging.getLogger("tridecode")
    handler = logging.NullHandler()  # the commands show the engine's notes themselves
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.NOTSET)
