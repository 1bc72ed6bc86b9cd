"""Tab completion of commands and their arguments."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...checkpoint.hub import BUNDLED, cached_models
from . import sessions, slash
from .settings import CHOICES, NAMES

MAX_PATHS = 200  # Maximum number of paths that completion lists for a directory.


@dataclass(frozen=True)
class Offer:
    """The arguments that commands of a chat accept.

    Attributes:
        options: Names of the sampling options that can be set.
        choices: Values of each other setting.
        models: Names of the models that /model accepts. None means the models of this machine.
    """

    options: Iterable[str] = NAMES
    choices: Mapping[str, Sequence[str]] = field(default_factory=lambda: CHOICES)
    models: Iterable[str] | None = None


def completed(typed: str, offer: Offer = Offer()) -> tuple[int, list[str]]:
    """Return the completions of `typed`, the text before the cursor, as (number of replaced characters, words)."""
    if not typed.startswith("/") or typed.startswith("//") or "\n" in typed:
        return 0, []
    command, space, rest = typed.partition(" ")
    if not space:
        return len(typed), [name for name in slash.COMMANDS if name.startswith(typed.lower())]
    rest = rest.lstrip()
    name = slash.ALIASES.get(command.lower(), command.lower())
    candidates: Iterable[str] = slash.COMMANDS[name].words if name in slash.COMMANDS else ()
    if name in ARGUMENTS:
        candidates = ARGUMENTS[name](rest, offer)
    word = rest if command in SINGLE_ARGUMENT else rest.rpartition(" ")[2]
    return len(word), list(dict.fromkeys(text for text in candidates if text.startswith(word) and text != word))


def paths(typed: str) -> Iterator[str]:
    """Yield the files and directories that start with `typed`; hidden ones only if a dot was typed."""
    directory_path, prefix = os.path.split(typed)
    try:
        with os.scandir(os.path.expanduser(directory_path) or ".") as entries:
            matching = [entry for entry in entries if entry.name.startswith(prefix)]
            listing = sorted((entry.name, entry.is_dir()) for entry in matching if prefix or entry.name[0] != ".")
    except (OSError, ValueError):
        return
    for name, directory in listing[:MAX_PATHS]:
        yield typed[: len(typed) - len(prefix)] + name + "/" * directory


def complete_files(typed: str, offer: Offer) -> Iterator[str]:
    """Yield paths that begin with the typed text."""
    return paths(typed)


def complete_load(typed: str, offer: Offer) -> Iterator[str]:
    """Yield names of sessions, then paths."""
    yield from sessions.names()
    yield from paths(typed)


def complete_model(typed: str, offer: Offer) -> Iterator[str]:
    """Yield models: those of the server, or the bundled one, cached ones and directories."""
    if offer.models is not None:
        yield from offer.models
        return
    yield BUNDLED.name
    yield from cached_models()
    yield from (path for path in paths(typed) if path.endswith("/"))


def complete_sessions(typed: str, offer: Offer) -> Iterable[str]:
    """Return the actions of /sessions, or after an action the names of sessions."""
    return sessions.names() if " " in typed else ("rename ", "delete ")


def complete_set(typed: str, offer: Offer) -> Iterable[str]:
    """Return options that can be set, or after an option its values."""
    name, space, _ = typed.partition(" ")
    if not space:
        return (f"{option} " for option in (*offer.options, *offer.choices))
    return (*offer.choices.get(name, ("on", "off") if name == "ignore_eos" else ()), "default")


# Command -> function that completes its argument.
ARGUMENTS: dict[str, Callable[[str, Offer], Iterable[str]]] = {
    "/load": complete_load,
    "/save": complete_files,
    "/export": complete_files,
    "/sessions": complete_sessions,
    "/set": complete_set,
    "/model": complete_model,
}
# Commands whose only argument is the rest of the line, with its spaces.
SINGLE_ARGUMENT = ("/load", "/save", "/export", "/model")
