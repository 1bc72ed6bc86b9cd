"""Argument parser of the commands.

Errors are one line. Settings supply options that the command line does not contain.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from itertools import product, takewhile
from textwrap import wrap

from ..arguments import listed, nearest
from ..checkpoint.names import BUNDLED, not_a_name
from ..errors import ParameterError
from ..options import OPTIONS
from .configuration import Configuration
from .options import GROUPS, HEADINGS, SAMPLING, Option, add_options, options_for
from .terminal import Output
from .wrapping import WHOLE, HelpFormatter

# Options of ollama and llama.cpp without which this program does what they ask for.
NOT_NEEDED = frozenset(
    """-ngl --n-gpu-layers --gpu-layers -t --threads -cnv --conversation -i --interactive -mli --multiline-input -fa
    --flash-attn --mlock --no-mmap --jinja --color --log-disable -e -b -ub -cb --no-display-prompt -st
    --single-turn""".split()
)
# Other options of these programs, and their replacements. An option among these may belong to another command.
FOREIGN_OPTIONS = {
    "--format": "--json",
    "-s": "--seed N or --system TEXT",
    "-j": "--json-schema",
    "--json-schema-file": "--json-schema",
    "--grammar-file": "--grammar",
    "-f": "tridecode generate < FILE",
    "--file": "tridecode generate < FILE",
    "-no-cnv": "tridecode generate",
    "--no-conversation": "tridecode generate",
    "--prompt-cache": "--session NAME",
    "--continue": "--resume",
    "-v": "--verbose or --version",
    "-cl": "tridecode models",
    "--cache-list": "tridecode models",
    "-mu": "--model",
    "--model-url": "--model",
    "-hff": "--model",
    "--hf-file": "--model",
    "-ctk": "--kv-dtype",
    "-ctv": "--kv-dtype",
}
BRIEF = 48  # Maximum columns of a short description, so that an option takes one line of 80 columns.


def is_model(word: str) -> bool:
    """Return whether a word looks like a model, and not like a question."""
    return word == BUNDLED.name or bool(re.fullmatch(r"\S*/\S*[^\s?]|[\w.-]+(\.gguf|\.safetensors|:[\w.-]+)", word))


class Formatter(HelpFormatter):
    """Formatter of help whose column of option names is wide enough for most of them."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=31)


class Commands(argparse._SubParsersAction):
    """Action that runs the parser of a command, with the alias as its name if an alias such as `doctor` was typed."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Parse the arguments of the command that `values` begins with."""
        assert isinstance(values, list)
        if command := self._name_parser_map.get(values[0]):
            command.prog = f"{self._prog_prefix} {values[0]}"
        super().__call__(parser, namespace, values, option_string)


class HelpAll(argparse.Action):
    """Action that prints the help with all options."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Print the help and exit."""
        parser._print_message(parser.format_help(everything=True), sys.stdout)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, and whose `--help` shows only common options, each on one line."""

    def __init__(self, **kwargs):
        # Abbreviations are disabled. Otherwise a new option could change the meaning of --to in a script.
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)
        self.register("action", "parsers", Commands)
        self._command = ""
        self._configuration: Configuration | None = None
        self._takes_question = False
        self._declared: dict[str, Option] = {}
        self.siblings: Sequence[Parser] = ()  # Parsers of other commands, which may have an option that this one lacks.

    def declare(self, declared: Mapping[str, Option], about: Mapping[str, str] = GROUPS) -> None:
        """Add declared options. `about` has the descriptions of their groups."""
        add_options(self, declared, about)
        self._declared |= declared

    def configure(self, command: str, configuration: Configuration) -> None:
        """Add the declared options of `command`. `configuration` supplies options that the command line does not set.

        In the parsed arguments, `origins` contains the sources of such values, and `typed` contains the options of the
        command line as the user wrote them.
        """
        self.add_argument("--help-all", action=HelpAll, nargs=0, help="show all options, also those of the engine")
        self.declare(options_for(command))
        configuration.add(command, self._declared)
        self._command, self._configuration = command, configuration

    def format_help(self, everything: bool = False) -> str:
        """Return the help: common options with their short descriptions, or with `everything` all options."""
        common = [action for action in self._actions if self._is_common(action)]
        formatter = self._get_formatter()
        formatter.add_usage(self._short_usage() if self._declared else self.usage, self._actions, ())
        formatter.add_text(self.description)
        order = {
            title: place for place, title in enumerate((self._positionals.title, self._optionals.title, *HEADINGS))
        }
        groups = sorted(self._action_groups, key=lambda group: order.get(group.title, len(order)))
        for other, group in product((False, True)[: everything + 1], groups):
            actions = [action for action in group._group_actions if (action in common) != other]
            formatter.start_section(f"{group.title}, other options" if other and group.title in order else group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(actions if everything else map(self._shortened, actions))
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _short_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, [action for action in self._actions if not action.option_strings], (), "")
        usage = formatter.format_help().replace(self.prog, f"{self.prog} [OPTIONS]", 1)
        indent = " " * len("usage: ")
        return f"\n{indent}".join(wrap(" ".join(usage.split()), formatter._width - len(indent), **WHOLE))

    def _is_common(self, action: argparse.Action) -> bool:
        """Return whether `--help` shows an option. It shows all options of a command that has no common ones."""
        declared = self._declared.get(action.dest)
        return not declared or bool(declared.brief) or not any(each.brief for each in self._declared.values())

    def _shortened(self, action: argparse.Action) -> argparse.Action:
        """Return an action with the short description of its option."""
        if (declared := self._declared.get(action.dest)) is None or not declared.brief:
            return action
        short, default = copy(action), declared.described_default
        default = f" (default: {default})" if default not in ("", "none") else ""
        short.help = declared.brief + default * (len(declared.brief + default) <= BRIEF)
        return short

    def add_question(self, help: str) -> None:
        """Accept a question as words without an option: `question` is their text, None if there are none."""
        self._takes_question = True
        self.add_argument("question", nargs="*", default=[], metavar="QUESTION", help=help)

    def parse_known_args(self, args=None, namespace=None):
        """Parse arguments and refuse unknown ones, so that the error refers to the help of the command."""
        namespace = namespace or argparse.Namespace()
        keys = self._configuration.keys[self._command] if self._configuration else {}
        args = sys.argv[1:] if args is None else args
        for name in keys:
            # With argparse's own defaults, the program could not distinguish unset options from set ones.
            setattr(namespace, name, None)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        if self._takes_question:
            namespace.question = self._question(namespace.question)
        typed = self._typed(args)
        if keys:
            namespace.typed = typed
            self._fill(namespace, keys)
        self._refuse_conflicts(namespace, typed)
        return namespace, unknown

    def _typed(self, args: list[str]) -> dict[str, str]:
        """Map the destination of each option of a command line to the option as it was typed."""
        words = (arg.split("=", 1)[0] for arg in takewhile("--".__ne__, args))
        return {self._option_string_actions[word].dest: word for word in words if word in self._option_string_actions}

    def _match_argument(self, action, arg_strings_pattern):
        """Return how many of the following arguments belong to an action. Raises argparse.ArgumentError."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if not action.option_strings or action.nargs is not None:
                raise
            option, choices = action.option_strings[-1], [*map(str, action.choices or ["VALUE"])]
            value = action.metavar or listed(choices)
            raise argparse.ArgumentError(None, f"{option} needs a value: {option} {value}") from None

    def _get_option_tuples(self, option_string):
        """Return the options whose value follows in the same argument: -n64 is -n 64, but -ngl is not -n gl."""
        if re.fullmatch(r"-[A-Za-z]([A-Za-z]\S*)?", option_string):
            return []
        return super()._get_option_tuples(option_string)

    def _hint(self, unknown: list[str]) -> str:
        """Return suggestions for arguments that the command does not have."""
        if len(unknown) == 1 and is_model(unknown[0]) and "--model" in self._option_string_actions:
            foreign = "" if unknown[0].lower().endswith(".gguf") else not_a_name(unknown[0])
            return f"; {foreign or f'did you mean --model {unknown[0]}?'}"
        options = list(dict.fromkeys(word.split("=")[0] for word in unknown if re.match("--?[A-Za-z]", word)))
        several, hints, meant = len(options) > 1, [], []
        if needless := [option for option in options if option in NOT_NEEDED]:
            hints.append(f"tridecode does not need {listed(needless)}: leave {'them' if needless[1:] else 'it'} out")
        for option in options:
            if owners := self._owners(option):
                hints.append(f"{listed(owners)} has {option if several else 'this option'}")
            elif option in FOREIGN_OPTIONS or option not in needless and (near := self.near(option.lstrip("-"))):
                words = self._replacement(option) if option in FOREIGN_OPTIONS else " or ".join(near)
                meant.append(f"{words}{f' for {option}' if several else ''}")
        return "".join(f"; {hint}" for hint in hints) + (f"; did you mean {', '.join(meant)}?" if meant else "")

    def _owners(self, option: str) -> list[str]:
        """Return the other commands that have an option."""
        return [parser.prog for parser in self.siblings if option in parser._option_string_actions]

    def _replacement(self, option: str) -> str:
        """Return what replaces an option of another program, with the command if this one does not have it."""
        words = FOREIGN_OPTIONS[option]
        flag = words.split()[0]
        owners = [] if flag in self._option_string_actions else self._owners(flag)
        return f"{owners[0]} {words}" if owners else words

    def _question(self, words: list[str]) -> str | None:
        if len(words) == 1 and is_model(words[0]):
            self.error(f"{words[0]} looks like a model, not like a question{self._hint(words)}")
        if words and not "".join(words).strip():
            self.error("the question is empty")
        return " ".join(words) if words else None

    def _refuse_conflicts(self, namespace, typed: dict[str, str]) -> None:
        """Refuse options that were typed although others exclude them. If they were not typed, they become None.

        The engine checks its own options and the sampling options.
        """
        for name, declared in self._declared.items():
            if declared in (OPTIONS.get(name), SAMPLING.get(name)):
                continue
            problems = [why for other, (_, why) in declared.excludes.items() if getattr(namespace, other, None)]
            if declared.needs and not getattr(namespace, declared.needs[0]):
                problems.append(declared.needs[1])
            if problems and name in typed:
                self.error(f"{typed[name]}{problems[0]}")
            elif problems:
                setattr(namespace, name, None)

    def _fill(self, namespace, keys: dict[str, Option]) -> None:
        """Set the options that the command line does not set."""
        assert self._configuration is not None
        try:
            settings = self._configuration.settings(self._command, keys)
        except ParameterError as error:
            self.wrong(error)
        namespace.origins = {}
        for name in keys:
            if getattr(namespace, name) is None and name in settings:
                setattr(namespace, name, settings[name].value)
                namespace.origins[name] = settings[name].origin
        for name, declared in keys.items():
            if getattr(namespace, name) is None:
                default = self.get_default(name)
                for key, other in declared.defaults.items():
                    if key == self._command or getattr(namespace, key, None) is not None:
                        default = other
                setattr(namespace, name, default)

    def near(self, typed: str) -> list[str]:
        """Return the options that begin with `typed`, or else the most similar option. Leading hyphens are ignored."""
        known = {name.lstrip("-"): name for action in self._actions for name in action.option_strings}
        matches = [known[word] for word in known if len(typed) > 2 and word.startswith(typed)]
        return matches[:3] or list(filter(None, [nearest(typed, known.values())]))

    def _check_value(self, action, value):
        """Refuse a value that is not a choice of the action, with a suggestion. Raises argparse.ArgumentError."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(
                action, f"{error.message}{f'; did you mean {near}?' if near else ''}"
            ) from None

    def _print_message(self, message, file=None):
        """Write a message. If stdout is not writable, raise the error, which argparse would hide."""
        file = file or sys.stderr
        # If the write fails, the exit code still reports the error.
        with suppress(OSError) if file is sys.stderr else nullcontext():
            file.write(message)
            file.flush()

    def wrong(self, error: ParameterError | str) -> None:
        """Exit as for a wrong option, without a reference to the help, which does not list settings."""
        with suppress(OSError):  # If stderr is not writable, the exit code still reports the error.
            Output().error(error)
        self.exit(2)

    def error(self, message):
        """Print a one-line error that names the command's help, and exit with code 2."""
        self.wrong(f"{message} (see {self.prog} --help)")
