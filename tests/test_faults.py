"""The table of faults in docs/faults.md names only tests and exit codes that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tridecode.cli.chat.command import DEVICE_LOST
from tridecode.cli.main import BROKEN_PIPE, INTERRUPTED

TESTS = Path(__file__).parent
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in (TESTS.parent / "docs" / "faults.md").read_text("utf-8").splitlines()
    if line.startswith("|")
]
CODES = {int(row[0]): row[1] for row in ROWS if len(row) == 2 and row[0].isdigit()}
FAULTS = [row for row in ROWS if len(row) == 4 and row[0] not in ("Input", "---")]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse(next(TESTS.rglob(file)).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda row: row[0])
def test_each_row_names_tests_that_exist(fault):
    _, what, code, tests = fault
    assert what and (code in ("continues", "by signal") or {int(part) for part in code.split(" or ")} <= CODES.keys())
    names = re.findall(r"`([^`]+)`", tests)
    assert names and tests == ", ".join(f"`{name}`" for name in names)
    for name in names:
        file, _, function = name.partition("::")
        assert function.startswith("test_") and function in functions_of(file), name


def test_exit_codes_match_the_program():
    assert {0, 1, 2, DEVICE_LOST, INTERRUPTED, BROKEN_PIPE} == CODES.keys()
    assert len(FAULTS) > 50
