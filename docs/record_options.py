"""Write the tables of options in docs/*.md, between their marks: python docs/record_options.py.

A table is between the marks `<!-- options: NAMES -->` and `<!-- options end -->`. NAMES are names of options, or
group=NAME for all options of a group.
"""

import re
from pathlib import Path

from tridecode.arguments import Choice, Option
from tridecode.cli.options import OTHERS, SAMPLING
from tridecode.options import OPTIONS

DOCS = Path(__file__).parent
MARKS = re.compile(r"(<!-- options: ([^>]*?) -->\n).*?(<!-- options end -->)", re.DOTALL)
EVERY = (*OTHERS, *OPTIONS.values(), *SAMPLING.values())


def chosen(names: str) -> list[Option]:
    """The options that a mark names, in its order."""
    found = []
    for word in names.split():
        kind, _, group = word.partition("=")
        found += [each for each in EVERY if (each.group.replace(" ", "-") == group if group else each.name == kind)]
    return found


def row(option: Option) -> str:
    value = f" {option.metavar}" if option.metavar else ""
    if isinstance(option.constraint, Choice):
        value = " " + "\\|".join(option.constraint.choices)
    flags = [f"`{option.flag}{value}`", *(f"`{flag}`" for flag in option.aliases)]
    help = option.flag_help + "".join(f"; `{flag}`: {words}" for flag, (_, words) in option.aliases.items())
    return f"| {', '.join(flags)} | {help} | {option.described_default} |\n"


def table(options: list[Option]) -> str:
    return "| option | | default |\n| --- | --- | --- |\n" + "".join(map(row, options))


def recorded(page: str) -> str:
    """Return the text of a page with its tables generated from the declared options."""
    return MARKS.sub(lambda match: match[1] + table(chosen(match[2])) + match[3], page)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := recorded(page)) != page:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
