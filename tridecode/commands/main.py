"""Dispatch, logging, and what the shell sees of an error: one line and an exit code."""

import logging
import os
import sys

from ..errors import TridecodeError
from .parser import make_parser
from .terminal import Output, foreign_encoding, one_line, tolerant_streams

INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Wrong options end in SystemExit(2), as argparse does."""
    tolerant_streams()
    if encoding := foreign_encoding():
        Output().error(f"text cannot be read and written as {encoding}; unset PYTHONIOENCODING, or set it to utf-8")
        return 1
    args = make_parser().parse_args(argv)
    set_up_logging(args.verbose)
    output = Output()
    try:
        code = run(args, output)
        sys.stdout.flush()  # here, where a reader that has gone can still be handled
        return code
    except KeyboardInterrupt:
        output.errors.print()
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if args.verbose:
            logging.getLogger("tridecode").exception("%s failed", args.command)
        output.error(explain(error))
        return 1


def run(args, output: Output) -> int:
    # The commands bring torch with them, so they are imported only now.
    if args.command == "chat":
        from .chat import chat

        return chat(args, output)
    if args.command == "generate":
        from .generate import generate

        return generate(args, output)
    if args.command == "bench":
        from .bench import run as bench

        return bench(args)
    if args.command == "profile":
        from .profile import run as profile

        return profile(args, output)
    if args.command == "tune":
        from .tune import run as tune

        return tune(args, output)
    from .info import info

    return info(args, output)


def explain(error: Exception) -> str:
    """One line about any error; those that are not the user's say how to learn more."""
    if isinstance(error, TridecodeError):
        return one_line(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory; choose a smaller --max-seq-len or model"
    if isinstance(error, OSError) and error.strerror:  # a full disk, a file that may not be read
        return one_line(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
    text = one_line(error)
    return f"{type(error).__name__}{': ' if text else ''}{text} (--verbose shows the traceback)"


def set_up_logging(verbose: bool) -> None:
    logger = logging.getLogger("tridecode")
    handler = logging.NullHandler()  # the commands show the engine's notes themselves
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.NOTSET)
