"""Parser for the Markdown of answers: CommonMark with tables, ~~ and TeX, parsed by markdown-it.

Differences from CommonMark: `_` never marks emphasis, so that `__init__.py` stays as written. Line ends are kept. HTML,
images and autolinks are shown as text. The address of a link follows its text. Link references are not supported,
because a later definition would change text that is already on the screen.
"""

import re
from bisect import bisect_right
from collections.abc import Callable

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_block.table import escapedSplit, getLine, table
from markdown_it.rules_core import StateCore
from markdown_it.rules_inline import StateInline, emphasis
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_block
from mdit_py_plugins.dollarmath.index import math_block_dollar, math_inline_dollar
from mdit_py_plugins.texmath.index import RuleDictType, make_block_func, make_inline_func

from ..terminal import visible

ENDS = {"$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}  # Opening delimiter of TeX -> closing delimiter.
TEX = re.compile(r"^[ \t>*+\d.)-]*(?:(\$\$|\\\[)|\\begin\{([^{}\n]*)\})", re.MULTILINE)  # A line that begins TeX.
BlockRule = Callable[[StateBlock, int, int, bool], bool]


def asterisks(state: StateInline, silent: bool) -> bool:
    """Parse emphasis, but not with underscores."""
    return state.src[state.pos] != "_" and emphasis.tokenize(state, silent)


def tex_block(rule: BlockRule) -> BlockRule:
    """Return a plugin's rule for TeX blocks, changed to refuse blank lines and to interrupt paragraphs."""

    def block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
        line, tokens = state.line, len(state.tokens)
        matched = rule(state, start, end, False) and not any(map(state.isEmpty, range(start, state.line)))
        if matched and not silent:
            token = state.tokens[-1]
            token.type, token.map, token.markup = "tex", [start, state.line], ""
            token.content = state.getLines(start, state.line, state.sCount[start], False).rstrip("\n")
        else:
            state.line = line
            del state.tokens[tokens:]
        return matched

    return block


def whole_table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Parse a table. Cells beyond those of the heading are kept in the last column."""
    first = len(state.tokens)
    if not table(state, start, end, silent):
        return False
    columns, line = sum(token.type == "th_open" for token in state.tokens[first:]), start
    for i, token in enumerate(state.tokens[first:], first):
        if token.type == "tr_open" and token.map:
            line = token.map[0]
        elif token.type == "tr_close":
            cells = escapedSplit(getLine(state, line).strip())
            cells = cells[cells[0] == "" : len(cells) - (cells[-1] == "" and len(cells) > 1)]
            if len(cells) > columns:
                state.tokens[i - 2].content = " | ".join(map(str.strip, cells[columns - 1 :]))
    return True


def as_text(state: StateCore) -> None:
    """Replace TeX by its source, line ends by hard breaks, and control characters from entities by visible symbols."""
    for token in (child for parent in state.tokens for child in parent.children or ()):
        if token.type.startswith("math_inline"):
            token.type, token.content = "text", token.markup + token.content + ENDS[token.markup]
        elif token.type == "text":
            token.content = visible(token.content)
        elif token.type == "softbreak":
            token.type = "hardbreak"


def make_parser() -> MarkdownIt:
    """Return a parser with the rules that the module describes."""
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 100}).enable(["table", "strikethrough"])
    parser.disable(["reference", "autolink", "image"])
    parser.core.ruler.push("as_text", as_text)
    inline, block = parser.inline.ruler, parser.block.ruler
    inline.at("emphasis", asterisks)
    inline.before("escape", "dollars", math_inline_dollar(allow_space=False, allow_digits=False, allow_double=True))
    for mark in ("\\(", "\\["):
        inline.before("escape", mark, make_inline_func(bracketed(mark)))
    rules = {
        "dollars": math_block_dollar(allow_labels=False),
        "brackets": make_block_func(bracketed("\\[", r"[ \t]*$")),  # texmath's own rule removes the text after the end.
        "environment": amsmath_block,
    }
    block.at("table", whole_table, {"alt": ["paragraph", "reference"]})
    for name, rule in rules.items():
        block.before("fence", name, tex_block(rule), {"alt": ["paragraph", "blockquote", "list"]})
    return parser


def bracketed(mark: str, after: str = "") -> RuleDictType:
    """Return texmath's rule for TeX from `mark` to its end."""
    pattern = re.compile(f"{re.escape(mark)}(.+?){re.escape(ENDS[mark])}{after}", re.DOTALL | re.MULTILINE)
    return {"name": "math_inline", "rex": pattern, "tmpl": "", "tag": mark}


PARSER = make_parser()


def unnamed_table_head(source: str) -> str:
    """Return a table head with empty names and as many columns as the table `source`, or "" if it is not a table."""
    lines = source.lstrip("\n").split("\n")
    tokens = PARSER.parse("\n".join(lines[:2])) if len(lines) > 2 else []
    columns = sum(token.type == "th_open" for token in tokens)
    return f"|{' |' * columns}\n{lines[1]}\n" if columns else ""


def code_blocks(text: str) -> list[str]:
    """Return the contents of all fenced code blocks, nested ones included, without the final newline."""
    return [token.content.removesuffix("\n") for token in PARSER.parse(text) if token.type == "fence"]


def split(text: str, final: bool = False) -> tuple[list[str], str, bool]:
    """Return the finished blocks of `text`, the unfinished rest, and whether the rest is inside a code fence.

    The line after a block decides whether the block is finished. While that line is incomplete, the text is parsed with
    "x" in its place, to find the blocks that a line of text would continue. A line that does not start with a letter
    may still become a list marker or indented code. These continue other blocks too.
    """
    if not text.strip():
        return [], "" if final else text, False
    whole, newline, tail = text.rpartition("\n")
    whole += newline
    indent = tail[: len(tail) - len(tail.lstrip())] if decided(tail) else ""
    probe = text if final else f"{whole}{indent}x"
    tokens: list[Token] = []
    PARSER.block.parse(probe, PARSER, {}, tokens)
    tops = [token for token in tokens if token.level == 0 and token.nesting >= 0]
    lines = text.split("\n")
    starts = [token.map[0] for token in tops if token.map]
    starts[0] = 0
    if final:
        finished = len(starts)
    else:
        finished = len(starts) - 1
        if starts[-1] == len(lines) - 1 and not decided(tail) and finished and _may_continue(tops[-2].type, lines[-2]):
            finished -= 1
        finished = min(finished, bisect_right(starts, _settled(lines, tops)) - 1)
    starts.append(len(lines))
    blocks = [_trimmed(lines[start:end]) for start, end in zip(starts[:finished], starts[1:])]
    rest = "\n".join(lines[starts[finished] :])
    return blocks, rest, finished < len(tops) and tops[finished].type == "fence"


def decided(line: str) -> bool:
    """Return whether an incomplete line can only begin a paragraph."""
    return line.lstrip()[:1].isalpha()


def _trimmed(lines: list[str]) -> str:
    """Join the lines without leading and trailing blank ones."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""


def _may_continue(kind: str, last_line: str) -> bool:
    """Return whether a line other than "x" could continue a block of this kind."""
    if kind == "blockquote_open":
        return bool(last_line.strip())
    if kind == "heading_open":
        return "|" in last_line  # The line is the head of a table if a delimiter row follows.
    return kind in ("bullet_list_open", "ordered_list_open", "code_block")


def _settled(lines: list[str], tops: list[Token]) -> int:
    """Return the number of lines before TeX that is not closed yet, because the blocks around it depend on its end."""
    first = next((i + 1 for i in range(len(lines) - 2, -1, -1) if not lines[i].strip()), 0)
    text = "\n".join(lines[first:])
    for opening in TEX.finditer(text):
        line = first + text.count("\n", 0, opening.end())
        code = any(token.type == "fence" and token.map and token.map[0] < line < token.map[1] for token in tops)
        end = ENDS[opening[1]] if opening[1] else f"\\end{{{opening[2]}}}"
        if not code and not re.search(rf"{re.escape(end)}[ \t]*\n", text[opening.end() :]):
            return line
    return len(lines)
