"""Options that the command line does not set: TRIDECODE_* of the environment, then the user's config.toml.

A key is the name of a declared option, and its value passes the option's constraint.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import platformdirs

from ..arguments import Choice, Flag, Option, Pair, nearest
from ..errors import ParameterError, TridecodeError, as_json, brief
from .inputs import read_bytes
from .options import SAMPLING
from .terminal import did_you_mean

PREFIX = "TRIDECODE_"
OTHER_VARIABLES = ("TRIDECODE_API_KEY",)  # Environment variables that are not options.
# Kubernetes and Docker set variables such as TRIDECODE_PORT=tcp://10.0.0.1:8000 for a service called tridecode.
LINK = re.compile(r"\w+_PORT=(tcp|udp|sctp)://.*")
LARGEST = 1_000_000  # Maximum bytes of the file.
TABLES = ("chat", "generate", "serve")  # The keys of such a table are for that command only.


@dataclass(frozen=True)
class Setting:
    """A value and its source: the name of a variable or of the file."""

    value: object
    origin: str


def config_path() -> Path:
    """Return the path of the user's configuration file, which may not exist."""
    try:
        return Path(platformdirs.user_config_dir("tridecode", appauthor=False)) / "config.toml"
    except RuntimeError:  # The user has no home directory, and so no file.
        return Path("/nonexistent/.config/tridecode/config.toml")


class Configuration:
    """The keys of several commands, and their values in file and environment.

    The file and the environment are read when a value is needed. Any wrong key or value then raises ParameterError,
    even if it belongs to another command. Variables that do not belong to an option are ignored with a warning.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self._environment = environment
        self.keys: dict[str, dict[str, Option]] = {}  # Command -> {key: option}.
        self.path = config_path()

    def add(self, command: str, options: Mapping[str, Option]) -> None:
        """Allow the options of a command as keys, except options that are only for one call."""
        self.keys[command] = {name: each for name, each in options.items() if command not in each.unsaved}

    def settings(self, table: str | None, keys: Iterable[str]) -> dict[str, Setting]:
        """Return the settings of the keys: from the environment, else a table, else the top level of the file."""
        environment, above = self.values[PREFIX], self.values[None]
        every = above | self.values.get(table, {}) | environment
        return {name: every[name] for name in keys if name in every}

    @cached_property
    def values(self) -> dict[str | None, dict[str, Setting]]:
        """Settings by table.

        The key None contains settings of the top level, and PREFIX contains environment variables.

        Raises ParameterError for an invalid key or value.
        """
        settings: dict[str | None, dict[str, Setting]] = {table: {} for table in (PREFIX, None, *TABLES)}
        known = self.options(None)
        for variable, name in self._variables().items():
            text = self._environment[variable]
            if name in known and text.strip():
                settings[PREFIX][name] = Setting(converted(known[name], text, variable), variable)
        for key, value in self._parsed().items():
            if key not in TABLES:
                self._put(settings, None, key, value)
            elif not isinstance(value, dict):
                raise ParameterError(f"{self.path}: {key} must be a table, [{key}], got {as_json(value)}")
            else:
                for inner, each in value.items():
                    self._put(settings, key, inner, each)
        return settings

    def _variables(self) -> dict[str, str]:
        """Map each variable that begins with PREFIX to the name of its option, or to "" if it is not for an option."""
        return {
            variable: "" if LINK.fullmatch(f"{variable}={text}") else variable.removeprefix(PREFIX).lower()
            for variable, text in self._environment.items()
            if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES
        }

    @property
    def warning(self) -> str:
        """A line about the variables that begin with PREFIX and are ignored, or ""."""
        known = self.options(None)
        ignored = {variable: name for variable, name in sorted(self._variables().items()) if name not in known}
        if not ignored:
            return ""
        near = next(filter(None, (nearest(name, known) for name in ignored.values())), None)
        fix = f"did you mean {PREFIX}{near.upper()}?" if near else "tridecode config lists the settings"
        names = ", ".join([*ignored][:3]) + (f" and {len(ignored) - 3} more" if len(ignored) > 3 else "")
        return f"ignored the variables {names}, which set no option; {fix}"

    def _put(self, settings: dict[str | None, dict[str, Setting]], table: str | None, key: str, value) -> None:
        """Add an entry of the file to the settings of a table."""
        name, known = key.replace("-", "_"), self.options(table)
        if name not in known:
            fix = did_you_mean(key, [*known, *([] if table else TABLES)]) or "tridecode config lists them"
            raise ParameterError(f"{self.path}: {f'in [{table}] ' * bool(table)}there is no key {key}; {fix}")
        if name in settings[table]:
            raise ParameterError(
                f"{self.path}: {name} and {name.replace('_', '-')} set the same option; remove one of them"
            )
        settings[table][name] = Setting(converted(known[name], value, f"{self.path}: {key}"), self.path.name)

    def _parsed(self) -> dict:
        try:
            text = b""
            if self.path.exists():  # If the path is a pipe, this is a mistake, and reading it could block forever.
                text = read_bytes(str(self.path), LARGEST, "a regular file with settings", pipes=False)
            # Editors of Windows write a byte order mark before the text.
            settings = tomllib.loads(text.decode("utf-8-sig"))
            str(settings)  # A hexadecimal integer can be too large to be printed.
            return settings
        except TridecodeError as error:
            raise ParameterError(str(error)) from None
        except UnicodeDecodeError:
            raise ParameterError(f"{self.path}: not UTF-8; save it as UTF-8") from None
        except (ValueError, RecursionError) as error:  # An integer is too large.
            raise ParameterError(f"{self.path}: not TOML ({brief(error)}); correct it") from None

    def options(self, table: str | None) -> dict[str, Option]:
        """Return the options of a table, or for None those of all commands, by name."""
        if table:
            return self.keys[table]
        return {name: option for keys in reversed(self.keys.values()) for name, option in keys.items()}


def converted(option: Option, value, place: str):
    """Return a value from the file or the environment as the command line would parse it.

    place: the text with which errors begin. Raises ParameterError.
    """
    if isinstance(option.constraint, Flag):
        value = option.constraint.read(value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise ParameterError(f"{place}: expected true or false, got {as_json(value)}")
        return value
    if option.repeated:
        if isinstance(value, dict) and option.name in ("logit_bias", "adapters"):
            value = [f"{key}={each}" for key, each in value.items()]
        return [one(option, each, place) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        value = ",".join(map(str, value))
    return one(option, value, place)


def one(option: Option, value, place: str):
    """Convert one value of an option from the settings file or the environment. The value is checked later.

    Args:
        option: the option.
        value: the value in the file, or the text of the environment variable.
        place: name of the key or the variable, for error messages.

    Raises:
        ParameterError: the value has a type that the option does not accept.
    """
    constraint = option.constraint.item if option.repeated else option.constraint
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        shown = as_json(value) if isinstance(value, bool | list | dict) else str(value)
        raise ParameterError(f"{place}: expected a text or a number, got {shown}")
    if not isinstance(value, str) and constraint.read("1") == "1":
        raise ParameterError(f"{place}: expected a text, got {as_json(value)}")
    if option.from_file:
        return value
    try:
        return constraint.parse(str(value))
    except ParameterError as error:
        near = did_you_mean(str(value), constraint.choices) if isinstance(constraint, Choice) else ""
        raise ParameterError(f"{place}: {error}{f'; {near}' if near else ''}") from None


def toml(option: Option, value) -> str:
    """Return a value of an option as TOML."""
    if isinstance(option.constraint, Pair):
        value = ":".join(map(str, value))
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], tuple):  # The option is logit_bias or adapters.
            return "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(each)}" for key, each in value) + "}"
        value = list(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # TOML requires this escape.


def lines(configuration: Configuration) -> list[str]:
    """Return the output of `tridecode config`: a configuration file with all keys and, as comments, their sources.

    Keys that are not set are comments.

    Raises ParameterError.
    """
    general = {**configuration.keys["chat"], **configuration.keys["generate"]}
    shown = [f"# {configuration.path}{'' if configuration.path.exists() else ', which does not exist yet'}"]
    settings = configuration.settings(None, general)
    for group, options in groupby(general.values(), lambda option: option.group):
        shown += ["", f"# {group}", *(line(option, settings.get(option.name)) for option in options)]
    for table in TABLES:
        keys = configuration.keys[table]
        own = {name: keys[name] for name in keys if name not in general or name in configuration.values[table]}
        settings = configuration.settings(table, own)
        shown += ["", f"[{table}]"] if own else []
        shown += [line(option, settings.get(name)) for name, option in own.items()]
    return shown


def line(option: Option, setting: Setting | None) -> str:
    """Return the line of `tridecode config` for an option: its setting and origin, or a comment with its default."""
    if setting:
        return f"{f'{option.name} = {toml(option, setting.value)}':<40}  # {setting.origin}"
    default = None if option.name in SAMPLING else option.default
    return f"# {option.name} = {'' if default is None else toml(option, default)}".rstrip()


def show(args, output) -> int:
    """Run `tridecode config`. An invalid setting ends the program with exit code 2, as in the other commands."""
    if args.changes not in ([], ["show"], ["list"]):
        args.wrong(f"config only shows the settings; edit {args.configuration.path} to change them")
    try:
        output.text("".join(f"{each}\n" for each in lines(args.configuration)))
    except ParameterError as error:
        args.wrong(error)
    return 0
