"""Show the rows of a JSON file that a bench wrote, or their differences from another file.

python -m benchmarks.report benchmarks/h200.json --format md
python -m benchmarks.report rows.json --compare benchmarks/h200.json
"""

import sys

from benchmarks.rows import options, read_rows, run


def main(argv: list[str] | None = None) -> int:
    parser = options("report", __doc__)
    parser.add_argument("file", metavar="FILE", help="a JSON list of rows")
    args = parser.parse_args(argv)
    return run(args, lambda output: read_rows(args.file))


if __name__ == "__main__":
    sys.exit(main())
