"""Tab completion of commands and their arguments."""

import os
from collections.abc import Callable, Iterable, Iterator

from ...checkpoint.hub import BUNDLED, cached_models
from . import sessions, settings, slash

MAX_PATHS = 200  # Maximum number of paths that completion lists for a directory.


def completed(typed: str, chat) -> tuple[int, list[str]]:
    """Return the completions of `typed`, the text before the cursor, as (number of replaced characters, words)."""
    if not typed.startswith("/") or typed.startswith("//") or "\n" in typed:
        return 0, []
    command, space, rest = typed.partition(" ")
    if not space:
        commands = (command for name, command in slash.COMMANDS.items() if name.startswith(typed.lower()))
        return len(typed), [f"{each.name} " if each.arguments else each.name for each in commands]
    rest = rest.lstrip()
    name = slash.ALIASES.get(command.lower(), command.lower())
    candidates: Iterable[str] = slash.COMMANDS[name].words if name in slash.COMMANDS else ()
    if name in ARGUMENTS:
        candidates = ARGUMENTS[name](rest, chat)
    word = rest if name in SINGLE_ARGUMENT else rest.rpartition(" ")[2]
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


def models(typed: str, chat) -> Iterator[str]:
    """Yield models: those of the server, or the bundled one, cached ones, GGUF files and directories."""
    if chat.model.models is not None:
        yield from chat.model.models
        return
    yield BUNDLED.name
    yield from cached_models()
    yield from (path for path in paths(typed) if path.endswith(("/", ".gguf")))


def adapters(typed: str, chat) -> Iterable[str]:
    """Return the adapters, and "-" for none."""
    return (*chat.model.adapters, "-")


def setting_words(typed: str, chat) -> Iterable[str]:
    """Return settings, or after a setting its values."""
    name, space, _ = typed.partition(" ")
    choices = settings.choices(chat)
    if not space:
        return (f"{setting} " for setting in (*settings.names(chat), *choices))
    return (*choices.get(name, ("on", "off") if name == "ignore_eos" else ()), "default")


# Command -> function of (typed argument, chat) that returns candidates for its argument.
ARGUMENTS: dict[str, Callable[[str, object], Iterable[str]]] = {
    "/load": lambda typed, chat: [*sessions.names(), *paths(typed)],
    "/file": lambda typed, chat: paths(typed),
    "/save": lambda typed, chat: paths(typed),
    "/export": lambda typed, chat: paths(typed),
    "/sessions": lambda typed, chat: sessions.names() if " " in typed else ("rename ", "delete "),
    "/set": setting_words,
    "/model": models,
    "/adapter": adapters,
}
# Commands whose only argument is the rest of the line, with its spaces.
SINGLE_ARGUMENT = ("/file", "/load", "/save", "/export", "/model")
