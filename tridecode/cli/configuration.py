"""Options that the command line does not set: TRIDECODE_* of the environment, then the user's config.toml.

A key is the name of a declared option, and its value passes the option's constraint.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import platformdirs

from ..arguments import Choice, Flag, Option, Pair
from ..errors import ParameterError, TridecodeError, as_json
from .inputs import read_bytes
from .options import SAMPLING
from .terminal import did_you_mean

PREFIX = "TRIDECODE_"
OTHERS = ("TRIDECODE_API_KEY",)  # variables that are no option
LARGEST = 1_000_000  # bytes of the file
TABLES = ("chat", "generate", "serve")  # whose keys are for that command only


@dataclass(frozen=True)
class Setting:
    """A value, and where it comes from: a variable's name, the file's, or "" for the option's own default."""

    value: object
    origin: str = ""


def config_path() -> Path:
    return Path(platformdirs.user_config_dir("tridecode", appauthor=False)) / "config.toml"


class Configuration:
    """The keys of several commands, and their values in file and environment.

    Both are read when a value is needed. Any wrong key then raises ParameterError, also one of another command.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self._environment = environment
        self.keys: dict[str, dict[str, Option]] = {}  # by command
        self.path = config_path()

    def add(self, command: str, options: Mapping[str, Option]) -> None:
        """Make the options of a command keys, except those that belong to one call."""
        self.keys[command] = {name: each for name, each in options.items() if command not in each.unsaved}

    def settings(self, command: str) -> dict[str, Setting]:
        """The settings of a command that file or environment contain. Raises ParameterError."""
        content, found = self.content, {}
        for name in self.keys[command]:
            for setting in (self.variable(name), *(self.entry(t, name, content) for t in (command, None))):
                if setting:
                    found[name] = setting
                    break
        return found

    @cached_property
    def content(self) -> dict:
        """The file, {} where there is none; checked, and so are the variables' names."""
        content = self._parsed()
        known = self.options(None)
        for variable in self._environment:
            name = variable.removeprefix(PREFIX).lower()
            if variable.startswith(PREFIX) and variable not in OTHERS and name not in known:
                fix = did_you_mean(variable, [PREFIX + key.upper() for key in known])
                raise ParameterError(f"{variable} is no option's variable; {fix or 'tridecode config lists the keys'}")
        for key, value in content.items():
            if key in TABLES:
                if not isinstance(value, dict):
                    raise ParameterError(f"{self.path}: {key} must be a table, [{key}], got {as_json(value)}")
                for inner in value:
                    self._check(inner, self.options(key), f"in [{key}] ")
                    self.entry(key, inner, content)
            else:
                self._check(key, [*known, *TABLES], "")
                self.entry(None, key, content)
        return content

    def _parsed(self) -> dict:
        try:
            text = b""
            if self.path.exists():  # a pipe there is nobody's on purpose, and would be waited for for ever
                text = read_bytes(str(self.path), LARGEST, "a regular file with settings", pipes=False)
            return tomllib.loads(text.decode("utf-8-sig"))  # editors of Windows put a mark before the text
        except TridecodeError as error:
            raise ParameterError(str(error)) from None
        except UnicodeDecodeError:
            raise ParameterError(f"{self.path}: not UTF-8; save it as that") from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ParameterError(f"{self.path}: not TOML ({error}); correct it") from None

    def options(self, table: str | None) -> dict[str, Option]:
        """The keys of a table, or of all commands."""
        if table:
            return self.keys[table]
        return {name: option for keys in reversed(self.keys.values()) for name, option in keys.items()}

    def _check(self, key: str, known, where: str) -> None:
        if key.replace("-", "_") not in known:
            fix = did_you_mean(key, known) or "tridecode config lists them"
            raise ParameterError(f"{self.path}: {where}there is no key {key}; {fix}")

    def entry(self, table: str | None, name: str, content: dict) -> Setting | None:
        """The file's value of a key, in a table or above all tables."""
        values = content.get(table, {}) if table else content
        keys = [key for key in dict.fromkeys((name, name.replace("_", "-"))) if key in values]
        if len(keys) > 1:
            raise ParameterError(f"{self.path}: {keys[0]} and {keys[1]} are one setting; leave one of them out")
        for key in keys:
            option = self.options(table)[name.replace("-", "_")]
            return Setting(converted(option, values[key], f"{self.path}: {key}"), self.path.name)
        return None

    def variable(self, name: str) -> Setting | None:
        variable = PREFIX + name.upper()
        text = self._environment.get(variable, "")
        return Setting(converted(self.options(None)[name], text, variable), variable) if text.strip() else None


def converted(option: Option, value, where: str):
    """Return a value from the file or the environment as the command line would have it. `where` begins an error.
    Raises ParameterError."""
    if isinstance(option.constraint, Flag):
        value = option.constraint.read(value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise ParameterError(f"{where}: expected true or false, got {as_json(value)}")
        return value
    if option.repeated:
        if isinstance(value, dict) and option.name == "logit_bias":
            value = [f"{key}={bias}" for key, bias in value.items()]
        return [one(option, each, where) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        value = ",".join(map(str, value))
    return one(option, value, where)


def one(option: Option, value, where: str):
    constraint = option.constraint.item if option.repeated else option.constraint
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        shown = as_json(value) if isinstance(value, bool | list | dict) else str(value)
        raise ParameterError(f"{where}: expected a text or a number, got {shown}")
    if not isinstance(value, str) and constraint.read("1") == "1":
        raise ParameterError(f"{where}: expected a text, got {as_json(value)}")
    if option.from_file:
        return value
    try:
        return constraint.parse(str(value))
    except ParameterError as error:
        near = did_you_mean(str(value), constraint.choices) if isinstance(constraint, Choice) else ""
        raise ParameterError(f"{where}: {error}{f'; {near}' if near else ''}") from None


def toml(option: Option, value) -> str:
    if isinstance(option.constraint, Pair):
        value = ":".join(map(str, value))
    if isinstance(value, tuple | list):
        if value and isinstance(value[0], tuple):  # of logit_bias
            return "{" + ", ".join(f"{key} = {bias}" for key, bias in value) + "}"
        value = list(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # which TOML takes escaped only


def lines(configuration: Configuration) -> list[str]:
    """All keys as a file of settings: those that are set with where they come from, the others as comments with their
    defaults. Raises ParameterError."""
    content, every = configuration.content, configuration.options(None)
    general = {**configuration.keys["chat"], **configuration.keys["generate"]}
    shown = [f"# {configuration.path}{'' if configuration.path.exists() else ', which is not there yet'}"]
    group = None
    for name, option in general.items():
        if group != (group := option.group):
            shown += ["", f"# {group}"]
        shown.append(line(name, configuration.variable(name) or configuration.entry(None, name, content), option))
    for table in TABLES:
        own = [name for name in configuration.keys[table] if name not in general]
        named = [key.replace("-", "_") for key in content.get(table, {})]
        shown += ["", f"[{table}]"] if own or named else []
        for name in dict.fromkeys([*own, *named]):
            variable = configuration.variable(name)
            setting = configuration.entry(table, name, content) or configuration.entry(None, name, content)
            shown.append(line(name, variable or setting, every[name]))
    return shown


def line(name: str, setting: Setting | None, option: Option) -> str:
    if setting:
        return f"{f'{name} = {toml(option, setting.value)}':<40}  # {setting.origin}"
    default = None if name in SAMPLING else option.default
    return f"# {name} = {'' if default is None else toml(option, default)}".rstrip()


def show(args, output) -> int:
    """`tridecode config`. args.wrong ends as in the other commands."""
    try:
        shown = lines(args.configuration)
    except ParameterError as error:
        args.wrong(error)
    output.text("".join(f"{each}\n" for each in shown))
    return 0
