"""Readers of the text tables and question banks in `content/`, from which the chat generator samples."""

import re
from pathlib import Path

CONTENT = Path(__file__).parent / "content"


def _lines(name: str) -> list[str]:
    """Return the lines of a file without blank lines and comments."""
    lines = (CONTENT / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("# ")]


def split(line: str) -> list[str]:
    """Return the choices of a line `one | another`."""
    return line.split(" | ")


def bank(name: str) -> list[tuple[list[str], list[str]]]:
    """Return (questions, answers) for each line `question | question => answer ## answer`."""
    entries = []
    for line in _lines(name):
        questions, answers = line.split(" => ")
        entries.append((split(questions), answers.split(" ## ")))
    return entries


def follow_ups(name: str) -> list[tuple[str, list[str], list[str]]]:
    """Return (pattern, answers, replies) for each line `pattern => answer | answer => reply ## reply`."""
    entries = (line.split(" => ") for line in _lines(name))
    return [(pattern, split(answers), replies.split(" ## ")) for pattern, answers, replies in entries]


def dialogues(name: str) -> list[list[list[str]]]:
    """Return alternating lists of choices for each line `user | user => reply ## reply => user => reply`."""
    return [[re.split(r" \| | ## ", part) for part in line.split(" => ")] for line in _lines(name)]


def sections(name: str) -> dict[str, list[str]]:
    """Return the lines under each `[section]` heading."""
    lines_of: dict[str, list[str]] = {}
    current: list[str] = []
    for line in _lines(name):
        if re.fullmatch(r"\[[a-z_' ]+\]", line):
            current = lines_of.setdefault(line[1:-1], [])
        else:
            current.append(line)
    return lines_of


def mapping(lines: list[str]) -> dict[str, str]:
    """Return a dict of lines `key = value`."""
    return dict(line.split(" = ", 1) for line in lines)


def items(lines: list[str], separator: str = ", ") -> list[str]:
    """Return the separated values of all lines."""
    return [item.strip() for line in lines for item in line.split(separator) if item.strip()]


def plots(name: str) -> list[tuple[str, str, list[str]]]:
    """Return story plots as (topic kind, plot name, lines)."""
    all_plots: list[tuple[str, str, list[str]]] = []
    for line in _lines(name):
        heading = re.fullmatch(r"\[(hero|item|place|tiny)(?:: ([a-z ]+))?\]", line)
        if heading:
            all_plots.append((heading[1], heading[2] or "tiny", []))
        else:
            all_plots[-1][2].append(line)
    return all_plots
