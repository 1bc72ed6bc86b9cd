"""argparse as the commands have it: errors of one line, and options that settings may give too."""

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import takewhile

from ..errors import ParameterError
from .configuration import Configuration
from .explain import option
from .options import Option, add_options
from .terminal import one_line


class Parser(argparse.ArgumentParser):
    """argparse, with errors on one line instead of the whole usage."""

    def __init__(self, **kwargs):
        # No abbreviations: a script's --to must not change its meaning when an option is added.
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self._command = ""
        self._within: dict[str, tuple[str, ...]] = {}
        self._configuration: Configuration | None = None
        self._without: dict[str, tuple[str, ...]] = {}
        self._words: tuple[str, Callable[[list[str]], bool]] | None = None

    def configure(self, command: str, configuration: Configuration) -> None:
        """Add the declared options of `command`. Those that the command line does not set come from `configuration`.

        In the parsed arguments, `origins` names where such values come from, and `typed` has the options of the command
        line as they were written.
        """
        configuration.add(command, add_options(self, command))
        self._command, self._configuration = command, configuration

    def without(self, flag: str, *names: str) -> None:
        """Refuse options of these names beside the option `flag`; where that is given they are None."""
        self._without[flag] = names

    def words(self, option: str, fit: Callable[[list[str]], bool]) -> None:
        """Words that stand by themselves, of which there may be none, are meant for that option where they `fit`."""
        self._words = option, fit

    def parse_known_args(self, args=None, namespace=None):
        """Each command refuses what it does not know itself: argparse would leave that to the parser above it."""
        namespace = namespace or argparse.Namespace()
        keys = self._configuration.keys[self._command] if self._configuration else {}
        for name in (*keys, *(name for names in (*self._without.values(), *self._within.values()) for name in names)):
            setattr(namespace, name, None)  # argparse's own defaults would look as if they were given
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and (command := self._meant(args, unknown, namespace)):
            message = f"unrecognized arguments: {' '.join(unknown)}; did you mean: {command}"
            self.exit(2, f"tridecode: error: {one_line(message)}\n")
        if unknown:
            typed = next((word for word in unknown if word.startswith("-")), "")
            near = self.near(typed.split("=")[0].lstrip("-"))
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if keys:
            namespace.typed = self._typed(args)
            self._fill(namespace, keys)
        for flag, names in self._without.items():
            self._part(namespace, flag, names)
        for flag, names in self._within.items():
            self._part(namespace, flag, names, needed=True)
        return namespace, unknown

    def _typed(self, args: list[str]) -> dict[str, str]:
        """The options of a command line, by what they set: several may set the same."""
        words = (arg.split("=", 1)[0] for arg in takewhile("--".__ne__, args))
        return {self._option_string_actions[word].dest: word for word in words if word in self._option_string_actions}

    def _meant(self, args: list[str], unknown: list[str], namespace) -> str | None:
        """The command with the words that nothing takes behind the option that they are meant for, if that is one."""
        if self._words is None:
            return None
        (name, fit), options = self._words, self._option_string_actions
        groups = (group._group_actions for group in self._mutually_exclusive_groups)
        beside = {other.dest for group in groups if options[name] in group for other in group} - {options[name].dest}
        words: list[str] = []
        rest: list[str] = []
        taker = None
        parts = (part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{name}=") else [arg]))
        for arg in parts:
            mine = taker == name or not taker and not arg.startswith("-")
            if mine or arg != name:
                (words if mine else rest).append(arg)
            taker = arg if not taker and arg in options and options[arg].nargs != 0 else None
        if not set(unknown) <= set(words) or not fit(words) or any(getattr(namespace, other) for other in beside):
            return None
        return f"{self.prog} {shlex.join([name, ' '.join(words), *rest])}"

    def within(self, flag: str, *names: str) -> None:
        """Refuse options of these names without the option `flag`; if it is not set they are None."""
        self._within[flag] = names

    def _part(self, namespace, flag: str, names: tuple[str, ...], needed: bool = False) -> None:
        """Give `names` their defaults if `flag` is set as they need it; refuse them otherwise."""
        given = next((name for name in names if getattr(namespace, name) is not None), None)
        if bool(getattr(namespace, flag)) == needed:
            for name in names:
                if getattr(namespace, name) is None:
                    setattr(namespace, name, self.get_default(name))
        elif given and needed:
            self.error(f"{option(given)} needs {option(flag)}; add that, or leave out {option(given)}")
        elif given:
            self.error(f"{option(given)} does not go with {option(flag)}, which has no use for it; leave out one")

    def _fill(self, namespace, keys: dict[str, Option]) -> None:
        """Set the options that the command line does not set."""
        assert self._configuration is not None
        try:
            found = self._configuration.settings(self._command)
        except ParameterError as error:
            self.wrong(error)
        namespace.origins = {}
        for name in keys:
            if getattr(namespace, name) is None and name in found:
                setattr(namespace, name, found[name].value)
                namespace.origins[name] = found[name].origin
        for name, declared in keys.items():
            if getattr(namespace, name) is None:
                default = self.get_default(name)
                for key, other in declared.defaults.items():
                    if key == self._command or getattr(namespace, key, None) is not None:
                        default = other
                setattr(namespace, name, default)

    def near(self, typed: str) -> list[str]:
        """Options that begin as `typed` does, or the nearest one. Their hyphens, which all of them share, count not."""
        known = {name.lstrip("-"): name for action in self._actions for name in action.option_strings}
        begun = [known[word] for word in known if len(typed) > 2 and word.startswith(typed)]
        return begun[:3] or [known[word] for word in difflib.get_close_matches(typed, known, n=1, cutoff=0.66)]

    def _print_message(self, message, file=None):
        """argparse would hide that stdout cannot be written."""
        file = file or sys.stderr
        with suppress(OSError) if file is sys.stderr else nullcontext():  # an exit code still tells
            file.write(message)
            file.flush()

    def wrong(self, error: ParameterError) -> None:
        """End as wrong options do, but for the help, which tells nothing of settings."""
        self.exit(2, f"tridecode: error: {one_line(error)}\n")

    def error(self, message):
        self.exit(2, f"tridecode: error: {one_line(message)} (see {self.prog} --help)\n")
