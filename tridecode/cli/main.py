"""Entry point of the command line: dispatch, logging, and conversion of errors to one line and an exit code."""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import import_module

from ..errors import DeviceError, TridecodeError
from .explain import explain, option
from .options import SAMPLING
from .parser import make_parser
from .signals import Ended, called_at_exit_of_library, ended_by_interrupt, ending
from .terminal import Output, echo_disabled, repair_streams, switch_streams_to_utf8

NEED_GPU = ("bench", "profile", "tune")
FUNCTIONS = {  # Command -> (module of this package, function).
    "chat": ("chat.command", "chat"),
    "generate": ("generate.command", "generate"),
    "serve": ("serve", "serve"),
    "fleet": ("fleet", "fleet"),
    "sessions": ("sessions", "run"),
    "models": ("models", "run"),
    "info": ("info", "info"),
    "doctor": ("info", "info"),
    "precompile": ("precompile", "precompile"),
    "quantize": ("quantize", "quantize"),
    "convert": ("convert", "convert"),
    "merge": ("merge", "merge"),
    "config": ("configuration", "show"),
    "bench": ("bench.run", "run"),
    "profile": ("profile.command", "run"),
    "tune": ("tune", "run"),
}
INTERRUPTED = 130
BROKEN_PIPE = 141  # The exit code that a shell reports for a program that SIGPIPE ended.


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code. Invalid options raise SystemExit(2), as in argparse."""
    try:
        with ending():
            return flushed(argv)
    except Ended as ended:
        ended.end()
        raise
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def flushed(argv: list[str] | None) -> int:
    """Run one command and return the exit code, also if stdout or stderr cannot be written."""
    repair_streams()
    try:
        return guarded(argv)
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError:  # stderr cannot be written either.
        return 1
    finally:
        discard_unwritten_output()


def guarded(argv: list[str] | None) -> int:
    """Run one command and return the exit code. Errors become one line on stderr."""
    if encoding := switch_streams_to_utf8():
        Output().error(f"text cannot be read and written as {encoding}; unset PYTHONIOENCODING, or set it to utf-8")
        return 1
    output, args = Output(), None
    try:
        parser = make_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stdout)
            return 0
        set_up_logging(args.verbose)
        if "configuration" in args and args.configuration.warning and not getattr(args, "quiet", False):
            output.note(args.configuration.warning)
        code = run(args, output)
        sys.stdout.flush()  # The program can still report a failure here.
        return code
    except BrokenPipeError:
        raise
    except Exception as error:
        if args is not None and args.verbose:
            logging.getLogger("tridecode").exception("%s failed", args.command)
        in_file = args is not None and args.command == "fleet"
        why = explain(error, None if in_file else [name for name in (*SAMPLING, "n") if hasattr(args, name)])
        for name, origin in getattr(args, "origins", {}).items():
            why += f" ({option(name)} is set by {origin})" if re.match(rf"{option(name)}\b", why) else ""
        if isinstance(error, DeviceError) and args is not None and args.command in NEED_GPU:
            why += "; see tridecode doctor"
        output.error(why)
        return 1


def discard_unwritten_output() -> None:
    """Discard text that the streams could not write. Python flushes them again at exit, and this must not fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run(args, output: Output) -> int:
    """Run the command of parsed arguments. Return the exit code."""
    try:
        os.getcwd()
    except OSError as error:  # Libraries of torch would end the program, which could not restore the terminal.
        why = f"the working directory cannot be used ({error.strerror}); change to another one: cd ~"
        raise TridecodeError(why) from None
    if args.command == "chat" and output.tty and sys.stdin.isatty():
        from .chat.lines import shows_editor

        # The program inherited this setting from nohup or from a shell that started it in the background.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Text that the user types or pastes during the imports and the load of the model belongs to the first prompt.
        with echo_disabled(True, lambda: None, lambda: None, paste=shows_editor()) as output.keys:
            with ended_by_interrupt(output.keys.release), called_at_exit_of_library(output.keys.release):
                command = imported(args.command)
            return command(args, output)
    with ended_by_interrupt():
        command = imported(args.command)
    return command(args, output)


def imported(command: str) -> Callable:
    """Return the function of a command. The commands import torch, so they are imported only now."""
    module, function = FUNCTIONS[command]
    return getattr(import_module(f"{__package__}.{module}"), function)


def set_up_logging(verbose: bool) -> None:
    """Send the package's log to stderr if `verbose`, otherwise nowhere."""
    logger = logging.getLogger("tridecode")
    handler: logging.Handler = logging.NullHandler()  # The commands show the engine's notes themselves.
    if verbose:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.NOTSET)
