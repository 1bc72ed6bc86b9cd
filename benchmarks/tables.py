"""Write the tables of README.md and docs/ from the JSON files in benchmarks/.

A table is between <!-- table: benchmarks/FILE.json --> and <!-- end of table -->. With --check the script writes
nothing, and the exit code is 1 if a table differs from its file.
"""

import re
import sys
from pathlib import Path

from benchmarks.rows import read_rows
from tridecode.cli.bench.rows import caption, render

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "docs/adapters.md",
    "docs/benchmarks.md",
    "docs/experts.md",
    "docs/gguf.md",
    "docs/hybrid.md",
    "docs/offload.md",
    "docs/prompts.md",
    "docs/quantization.md",
    "docs/speculation.md",
)
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->\n)", re.DOTALL)


def filled(document: str) -> str:
    """Return the document with all tables rendered again. A table without a JSON file becomes empty."""

    def table(block: re.Match) -> str:
        path = ROOT / block[2]
        if not path.is_file():
            return block[1] + block[4]
        rows = read_rows(str(path))
        return f"{block[1]}{render(rows, 'md')}\n{caption(rows)}.\n{block[4]}"

    return BLOCK.sub(table, document)


def main(check: bool) -> int:
    old = [name for name in DOCUMENTS if filled(text := (ROOT / name).read_text(encoding="utf-8")) != text]
    for name in old:
        if check:
            print(f"{name}: a table differs from its file; run python -m benchmarks.tables", file=sys.stderr)
        else:
            (ROOT / name).write_text(filled((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
