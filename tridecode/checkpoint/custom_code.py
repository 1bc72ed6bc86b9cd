"""A checkpoint's own Python, which transformers runs where it is allowed to. Here it is read as text, never run."""

import re
from pathlib import Path

KEY = "auto_map"  # of config.json and tokenizer_config.json; in it "module.Class" or "owner/name--module.Class"
_BESIDE = re.compile(r"(?m)^\s*(?:from\s+\.(\w+)\s+import\b|import\s+\.(\w+)\s*$)")


def code_files(source: Path, values: dict) -> list[Path]:
    """Of `source`, the files that its configuration `values` names, and those that these import from beside them."""
    wanted = [name.partition(".")[0] for name in _names(values.get(KEY))]
    found: dict[str, Path] = {}
    while wanted:
        name = wanted.pop()
        file = source / f"{name}.py"
        if name.isidentifier() and name not in found and file.is_file():
            found[name] = file
            text = file.read_text(encoding="utf-8", errors="replace")
            wanted += [one or other for one, other in _BESIDE.findall(text)]
    return list(found.values())


def _names(named) -> list[str]:
    if isinstance(named, str):
        return [] if "--" in named else [named]  # of another repository
    parts = named.values() if isinstance(named, dict) else named if isinstance(named, list) else ()
    return [name for each in parts for name in _names(each)]


def of_repository(values: dict, repo: str) -> dict:
    """The same configuration elsewhere: its Python is still that of the repository."""

    def moved(named):
        if isinstance(named, str):
            return named if "--" in named else f"{repo}--{named}"
        if isinstance(named, dict):
            return {key: moved(each) for key, each in named.items()}
        return [moved(each) for each in named] if isinstance(named, list) else named

    return values | {KEY: moved(values[KEY])} if KEY in values else values
