"""Python files of a checkpoint, which transformers can run. This package copies them and never runs them."""

import re
from pathlib import Path

# A key in config.json and tokenizer_config.json. Its values are "module.Class" or "owner/name--module.Class".
KEY = "auto_map"
_RELATIVE_IMPORT = re.compile(r"(?m)^\s*(?:from\s+\.(\w+)\s+import\b|import\s+\.(\w+)\s*$)")


def code_files(source: Path, values: dict) -> list[Path]:
    """Return the Python files in `source` that the configuration `values` names, and those that they import from it."""
    modules = [name.partition(".")[0] for name in _names(values.get(KEY))]
    files: dict[str, Path] = {}
    while modules:
        name = modules.pop()
        file = source / f"{name}.py"
        if name.isidentifier() and name not in files and file.is_file():
            files[name] = file
            text = file.read_text(encoding="utf-8", errors="replace")
            modules += [one or other for one, other in _RELATIVE_IMPORT.findall(text)]
    return list(files.values())


def _names(named) -> list[str]:
    """Return the class names in a value of KEY that do not belong to another repository."""
    if isinstance(named, str):
        return [] if "--" in named else [named]  # The class is in another repository.
    parts = named.values() if isinstance(named, dict) else named if isinstance(named, list) else ()
    return [name for each in parts for name in _names(each)]


def refer_to_repository(values: dict, repo: str) -> dict:
    """Return the configuration for a copy elsewhere, in which the Python classes refer to the repository."""

    def moved(named):
        if isinstance(named, str):
            return named if "--" in named else f"{repo}--{named}"
        if isinstance(named, dict):
            return {key: moved(each) for key, each in named.items()}
        return [moved(each) for each in named] if isinstance(named, list) else named

    return values | {KEY: moved(values[KEY])} if KEY in values else values
