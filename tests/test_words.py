"""Private terms of earlier versions that must not return. docs/glossary.md has the terms to use instead."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "tridecode").rglob("*.py"))
FILES = [
    *PACKAGE,
    *(path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__)),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
# Former identifiers.
IDENTIFIERS = """
    Roster FewBits MatvecShape HopperShape told_tensors held_to one_piece of_rows of_queries goes_on hand_over let_go
    kept_in put_away take_out way_out drop_unwritten tolerant_streams unechoed most_read most_queries PROMPT_MOST
    MOST_ROWS _most_splits LEAST_WEIGHTS least_pages fewest make_steps compile_ahead ends_inside some_run put_fp8
    spread_ref _vacate vacate _unsettled _settle wants_drafts WANTED_SHIFT read_of end_of list_of room_of
    capacity_words config_words graph_words kernel_words pool_words prompt_words speculation_words weight_words
    default_words high_words
""".split()
# Phrases that leave the actor out or make a person of a request, and British spelling.
PHRASES = [
    *("such as nobody", "somebody", "whoever", "whose business", "who has", "who have", "she", "him", "his"),
    *("is told", "are told", "was told", "were told", "as told", "by now", "goes on", "anew", "ought", "in vain"),
    *("at a loss", "as it were", "makes do", r"hand(s|ed)? over", r"lets? in", "the rest of them", "few bits"),
    *(
        "held to",
        r"quantis\w+",
        r"initialis\w+",
        r"behaviour\w*",
        r"colour\w*",
        r"honour\w*",
        r"neighbour\w*",
        "licences?",
    ),
    r"what is (\S+ ){1,3}of",
]
TERMS = re.compile(rf"\b({'|'.join(IDENTIFIERS + PHRASES)})\b", re.IGNORECASE)
# English words that the package must not use as names.
NAMES = """
    told asked given found fresh wanted held drawn said mine ours theirs stumble sought lack coming going guess
""".split()


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_private_terms_do_not_return():
    hits = [
        f"{place(path, number)}: {term[0]!r}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for term in TERMS.finditer(line)
    ]
    assert not hits, "use the terms of docs/glossary.md instead of:\n" + "\n".join(hits)


def test_private_names_do_not_return():
    hits = []
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                    pass
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    pass
                case _:
                    continue
            if name.strip("_") in NAMES:
                hits.append(f"{place(path, node.lineno)}: {name}")
    assert not hits, "rename these after what the value is:\n" + "\n".join(hits)
