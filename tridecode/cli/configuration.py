"""What options are where the command line does not say: TRIDECODE_* of the environment, then the user's file.

One mechanism for all: a key is the name of an option, and its value is read as the option's would be.
"""

import argparse
import json
import math
import os
import tomllib
from argparse import Action, ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import platformdirs

from ..errors import ParameterError, TridecodeError, as_json
from .inputs import read_bytes
from .terminal import did_you_mean

PREFIX = "TRIDECODE_"
OTHERS = ("TRIDECODE_API_KEY",)  # variables that are no option
LARGEST = 1_000_000  # bytes of the file
TABLES = ("chat", "generate", "serve")  # whose keys are for that command only
# What belongs to one call, and not into a file.
ONCE = {
    "help", "verbose", "graph_stats", "raw", "system", "resume", "session", "prompt", "prompt_ids", "messages", "jsonl",
    "unordered", "allow_special", "n", "output", "json", "logprobs", "no_reuse_prefix",
}  # fmt: skip
ONCE_OF = {"generate": {"max_queue"}}
WORDS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
EXPECTED = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Setting:
    """A value, and where it comes from: a variable's name, the file's, or "" for the option's own default."""

    value: object
    origin: str = ""


def config_path() -> Path:
    return Path(platformdirs.user_config_dir("tridecode", appauthor=False)) / "config.toml"


class Configuration:
    """The keys of several commands, and what file and environment say of them. Nothing is read before it is asked for;
    what is wrong then is a ParameterError, whichever command's key it is."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self._environment = environment
        self.keys: dict[str, dict[str, Action]] = {}  # of each command
        self.path = config_path()

    def add(self, command: str, parser: ArgumentParser) -> None:
        """Make what `parser` knows keys of `command`."""
        once = ONCE | ONCE_OF.get(command, set())
        self.keys[command] = found = {}
        for action in parser._actions:
            if action.option_strings and action.dest not in once:
                found.setdefault(action.dest, action)

    def settings(self, command: str) -> dict[str, Setting]:
        """Those of a command that file or environment give. Raises ParameterError."""
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
        known = self.actions(None)
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
                    self._check(inner, self.actions(key), f"in [{key}] ")
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

    def actions(self, table: str | None) -> dict[str, Action]:
        """The keys of a table, or of all commands."""
        if table:
            return self.keys[table]
        return {name: action for keys in reversed(self.keys.values()) for name, action in keys.items()}

    def _check(self, key: str, known, where: str) -> None:
        if key.replace("-", "_") not in known:
            fix = did_you_mean(key, known) or "tridecode config lists them"
            raise ParameterError(f"{self.path}: {where}there is no key {key}; {fix}")

    def entry(self, table: str | None, name: str, content: dict) -> Setting | None:
        """What the file says of a key, in a table or above all tables."""
        values = content.get(table, {}) if table else content
        keys = [key for key in dict.fromkeys((name, name.replace("_", "-"))) if key in values]
        if len(keys) > 1:
            raise ParameterError(f"{self.path}: {keys[0]} and {keys[1]} are one setting; leave one of them out")
        for key in keys:
            action = self.actions(table)[name.replace("-", "_")]
            return Setting(converted(action, values[key], f"{self.path}: {key}"), self.path.name)
        return None

    def variable(self, name: str) -> Setting | None:
        variable = PREFIX + name.upper()
        text = self._environment.get(variable, "")
        return Setting(converted(self.actions(None)[name], text, variable), variable) if text.strip() else None


def converted(action: Action, value, where: str):
    """A value as the option has it. Raises ParameterError, which begins with `where`."""
    if action.nargs == 0:
        value = WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise ParameterError(f"{where}: expected true or false, got {as_json(value)}")
        return value
    if isinstance(action, argparse._AppendAction):
        if isinstance(value, dict) and action.dest == "logit_bias":
            value = [f"{key}={bias}" for key, bias in value.items()]
        return [one(action, each, where) for each in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and not any(isinstance(each, (list, dict)) for each in value):
        value = ",".join(map(str, value))
    return one(action, value, where)


def one(action: Action, value, where: str):
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        shown = as_json(value) if isinstance(value, (bool, list, dict)) else str(value)
        raise ParameterError(f"{where}: expected a text or a number, got {shown}")
    if action.type is None and not isinstance(value, str):
        raise ParameterError(f"{where}: expected a text, got {as_json(value)}")
    try:
        value = action.type(str(value)) if action.type else value
    except argparse.ArgumentTypeError as error:
        raise ParameterError(f"{where}: {error}") from None
    except ValueError:
        raise ParameterError(f"{where}: expected {EXPECTED[action.type]}, got {as_json(value)}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{where}: expected a finite number, got {value}")
    if action.choices and value not in action.choices:
        near = did_you_mean(value, action.choices)
        got = f"{as_json(value)}; {near}" if near else as_json(value)
        raise ParameterError(f"{where}: expected one of {', '.join(action.choices)}, got {got}")
    return value


def toml(value) -> str:
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):  # of logit_bias
            return "{" + ", ".join(f"{key} = {bias}" for key, bias in value) + "}"
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, tuple):  # of speculate_ngram
        value = ":".join(map(str, value))
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # which TOML takes escaped only


def lines(configuration: Configuration) -> list[str]:
    """All keys as a file of settings: those that are set with where they come from, the others as comments with their
    defaults. Raises ParameterError."""
    content, every = configuration.content, configuration.actions(None)
    general = {**configuration.keys["chat"], **configuration.keys["generate"]}
    shown = [f"# {configuration.path}{'' if configuration.path.exists() else ', which is not there yet'}"]
    group = None
    for name, action in general.items():
        if group != (group := action.container.title):
            shown += ["", f"# {group}"]
        shown.append(line(name, configuration.variable(name) or configuration.entry(None, name, content), action))
    for table in TABLES:
        own = [name for name in configuration.keys[table] if name not in general]
        named = [key.replace("-", "_") for key in content.get(table, {})]
        shown += ["", f"[{table}]"] if own or named else []
        for name in dict.fromkeys([*own, *named]):
            variable = configuration.variable(name)
            setting = configuration.entry(table, name, content) or configuration.entry(None, name, content)
            shown.append(line(name, variable or setting, every[name]))
    return shown


def line(name: str, setting: Setting | None, action: Action) -> str:
    if setting:
        return f"{f'{name} = {toml(setting.value)}':<40}  # {setting.origin}"
    return f"# {name} = {'' if action.default is None else toml(action.default)}".rstrip()


def show(args, output) -> int:
    """`tridecode config`. args.wrong ends as in the other commands."""
    try:
        shown = lines(args.configuration)
    except ParameterError as error:
        args.wrong(error)
    output.text("".join(f"{each}\n" for each in shown))
    return 0
