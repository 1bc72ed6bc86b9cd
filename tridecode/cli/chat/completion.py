"""What Tab completes: commands, and what may stand after them."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...checkpoint.hub import BUNDLED, cached_models
from . import sessions, slash
from .settings import CHOICES, NAMES

MOST = 200  # files of a directory that are offered


@dataclass(frozen=True)
class Offer:
    """What a chat takes. options: the sampling options that can be set; choices: the values of its other settings;
    models: the names of those that it can go on with, None for what is on this machine."""

    options: Iterable[str] = NAMES
    choices: Mapping[str, Sequence[str]] = field(default_factory=lambda: CHOICES)
    models: Iterable[str] | None = None


def completed(typed: str, offer: Offer = Offer()) -> tuple[int, list[str]]:
    """What `typed`, the text before the cursor, may go on as: how many characters of it are replaced, and by what."""
    if not typed.startswith("/") or typed.startswith("//") or "\n" in typed:
        return 0, []
    command, space, rest = typed.partition(" ")
    if not space:
        return len(typed), [name for name in slash.COMMANDS if name.startswith(typed.lower())]
    rest = rest.lstrip()
    name = slash.ALIASES.get(command.lower(), command.lower())
    found: Iterable[str] = slash.COMMANDS[name].words if name in slash.COMMANDS else ()
    if name in AFTER:
        found = AFTER[name](rest, offer)
    word = rest if command in WHOLE else rest.rpartition(" ")[2]
    return len(word), list(dict.fromkeys(text for text in found if text.startswith(word) and text != word))


def paths(typed: str) -> Iterator[str]:
    """Files and directories that begin so; hidden ones only where a dot was typed."""
    where, begun = os.path.split(typed)
    try:
        with os.scandir(os.path.expanduser(where) or ".") as entries:
            begin = [entry for entry in entries if entry.name.startswith(begun)]
            found = sorted((entry.name, entry.is_dir()) for entry in begin if begun or entry.name[0] != ".")
    except (OSError, ValueError):
        return
    for name, directory in found[:MOST]:
        yield typed[: len(typed) - len(begun)] + name + "/" * directory


def of_files(typed: str, offer: Offer) -> Iterator[str]:
    return paths(typed)


def loadable(typed: str, offer: Offer) -> Iterator[str]:
    yield from sessions.names()
    yield from paths(typed)


def of_model(typed: str, offer: Offer) -> Iterator[str]:
    if offer.models is not None:
        yield from offer.models
        return
    yield BUNDLED.name
    yield from cached_models()
    yield from (path for path in paths(typed) if path.endswith("/"))


def of_sessions(typed: str, offer: Offer) -> Iterable[str]:
    return sessions.names() if " " in typed else ("rename ", "delete ")


def of_set(typed: str, offer: Offer) -> Iterable[str]:
    name, space, _ = typed.partition(" ")
    if not space:
        return (f"{option} " for option in (*offer.options, *offer.choices))
    return (*offer.choices.get(name, ("on", "off") if name == "ignore_eos" else ()), "default")


# Command -> what may stand after it, from what does so far.
AFTER: dict[str, Callable[[str, Offer], Iterable[str]]] = {
    "/load": loadable,
    "/save": of_files,
    "/export": of_files,
    "/sessions": of_sessions,
    "/set": of_set,
    "/model": of_model,
}
WHOLE = ("/load", "/save", "/export", "/model")  # what follows is one word, spaces and all
