"""Reads the text tables and question banks in `content/` that the chat generator draws from."""

import re
from pathlib import Path

CONTENT = Path(__file__).parent / "content"


def _lines(name: str) -> list[str]:
    lines = (CONTENT / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("# ")]


def split(line: str) -> list[str]:
    """Choices `one | another`."""
    return line.split(" | ")


def bank(name: str) -> list[tuple[list[str], list[str]]]:
    """Entries `question | question => answer ## answer`."""
    entries = []
    for line in _lines(name):
        questions, answers = line.split(" => ")
        entries.append((split(questions), answers.split(" ## ")))
    return entries


def follow_ups(name: str) -> list[tuple[str, list[str], list[str]]]:
    """Entries `pattern => answer | answer => reply ## reply`."""
    entries = (line.split(" => ") for line in _lines(name))
    return [(pattern, split(answers), replies.split(" ## ")) for pattern, answers, replies in entries]


def dialogues(name: str) -> list[list[list[str]]]:
    """Entries `user | user => reply ## reply => user => reply`, as alternating lists of choices."""
    return [[re.split(r" \| | ## ", part) for part in line.split(" => ")] for line in _lines(name)]


def sections(name: str) -> dict[str, list[str]]:
    """Lines under each `[section]` heading."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in _lines(name):
        if re.fullmatch(r"\[[a-z_' ]+\]", line):
            current = found.setdefault(line[1:-1], [])
        else:
            current.append(line)
    return found


def mapping(lines: list[str]) -> dict[str, str]:
    """Lines `key = value`."""
    return dict(line.split(" = ", 1) for line in lines)


def items(lines: list[str], separator: str = ", ") -> list[str]:
    """Separated values, over any number of lines."""
    return [item.strip() for line in lines for item in line.split(separator) if item.strip()]


def plots(name: str) -> list[tuple[str, str, list[str]]]:
    """Story plots as (topic kind, plot name, lines)."""
    found: list[tuple[str, str, list[str]]] = []
    for line in _lines(name):
        heading = re.fullmatch(r"\[(hero|item|place|tiny)(?:: ([a-z ]+))?\]", line)
        if heading:
            found.append((heading[1], heading[2] or "tiny", []))
        else:
            found[-1][2].append(line)
    return found
