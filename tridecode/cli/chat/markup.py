"""Which characters of an answer are Markdown: CommonMark by markdown-it, but only where nothing else can be meant.

Whatever is not surely markup is text and stays as written: every backslash and bracket (TeX, Windows paths, links with
their addresses), underscores (names), HTML, entities, line ends, and asterisks of products, powers and file patterns.
"""

import re
from collections.abc import Iterator
from functools import partial

from markdown_it import MarkdownIt
from markdown_it.parser_inline import ParserInline
from markdown_it.rules_block import blockquote, fence, heading, hr, table
from markdown_it.rules_inline import StateInline, link
from markdown_it.rules_inline.state_inline import Scanned
from markdown_it.token import Token

UNSPACED = "\u0e00"  # from here on scripts write words without spaces between them, and punctuation is typographic
# What may stand outside of an opening and of a closing mark, beside white space, and what may not stand inside.
BEFORE, AFTER = frozenset("([{\"':;,|*~"), frozenset(")]}\"':;,|*~.!?-")
NOT_FIRST, NOT_LAST = frozenset("/\\,;:!?)]}=|^>"), frozenset("/\\([{=|^<")
TEX_INLINE = re.compile(r"\$\$.+?\$\$|(?<![\w$])\$(?![\s$])(?:\\.|[^$\\\n])*(?<!\s)\$(?![\w$])", re.DOTALL)
TEX_ENDS = {"\\(": "\\)", "\\[": "\\]"}
TEX_BLOCK = re.compile(r"\\\[|\$\$|\\begin\{([^{}\n]*)\}")
TABLE_RULE = re.compile(r"[-:|\s]*\|[-:|\s]*")
QUOTE = re.compile(r">(?:[ \t].*|$)")
TILDES = re.compile(r"~{3,}[ \t]*[\w+#.-]*[ \t]*")


class State(StateInline):
    """Where marks of emphasis may begin and end, and where in the source each of the delimiters stands."""

    def __init__(self, *args):
        super().__init__(*args)
        self.places = []

    def scanDelims(self, start: int, canSplitWord: bool) -> Scanned:
        marker, end = self.src[start], start
        while end < self.posMax and self.src[end] == marker:
            end += 1
        count = end - start
        step = 2 if marker == "~" else 1
        self.places += range(start + count % step, end, step) if count >= step else ()
        if marker == "_":
            return Scanned(False, False, count)
        before, after = self.src[start - 1 : start] or " ", self.src[end : end + 1] or " "
        outside = "/" if count >= 2 and marker == "*" else ""  # **yes**/**no**, but not the pattern a/*b*/c
        opens = not (after.isspace() or after in NOT_FIRST or (after == "." and count == 1))
        opens &= before.isspace() or before in BEFORE or before in outside or before >= UNSPACED
        if not after.isalnum() and after < UNSPACED:  # '*' and "*.py": marks that are spoken of
            opens &= before.isspace() or before in "([{*~" or before >= UNSPACED
        closes = not (before.isspace() or before in NOT_LAST)
        closes &= (
            after.isspace() or after in AFTER or after in outside or after >= UNSPACED
            or (count == 2 and before.isalpha() and after.isalpha())
        )  # fmt: skip
        return Scanned(opens, closes, count)


class Inline(ParserInline):
    def parse(self, src, md, env, tokens):
        state = State(src, md, env, tokens)
        self.tokenize(state)
        for rule in self.ruler2.getRules(""):
            rule(state)
        return state.tokens


def doubtful_pairs(state: StateInline) -> None:
    """Part the pairs of marks around what may be arithmetic: *3*, x *y* z, **k, 2**n."""
    assert isinstance(state, State)
    delimiters = state.delimiters
    for i, (delimiter, place) in enumerate(zip(delimiters, state.places, strict=True)):
        if delimiter.end < 0:
            continue
        end = state.places[delimiter.end]
        inside = state.src[place + 1 : end].strip("*~")
        double = state.src[place] == "~" or any(
            0 <= j < len(delimiters)
            and abs(state.places[j] - place) == 1
            and delimiters[j].end >= 0
            and abs(state.places[delimiters[j].end] - end) == 1
            for j in (i - 1, i + 1)
        )
        sure = re.search(r"\w|[^\x00-\x7f]" if double else r"[^\W\d_]{2}|[^\x00-\x7f]", inside)
        after = state.src[end:].lstrip(state.src[end])[:1]
        if not sure or (after.isalpha() and after < UNSPACED and not inside.isalpha()):  # **R**ead is, **a, b**c is not
            delimiter.end = -1


def raw_text(state: StateInline, silent: bool, end: int) -> bool:
    """Take everything up to `end` as written."""
    if not silent:
        state.append_pending(state.src[state.pos : end])
    state.pos = end
    return True


def tex_or_escape(state: StateInline, silent: bool) -> bool:
    """TeX between its marks, and a backslash with the character whose meaning it takes, both as written."""
    source, start = state.src, state.pos
    if source[start] == "$":
        found = TEX_INLINE.match(source, start, state.posMax)
        return found is not None and raw_text(state, silent, found.end())
    if source[start] != "\\":
        return False
    if closing := TEX_ENDS.get(source[start : start + 2]):
        end = source.find(closing, start + 2, state.posMax)
        if end >= 0:
            return raw_text(state, silent, end + 2)
    escaped = source[start + 1 : start + 2]
    return raw_text(state, silent, start + (2 if escaped.strip() and start + 1 < state.posMax else 1))


def line_end(state: StateInline, silent: bool) -> bool:
    """A line ends where the model ended it; what the next one is indented by stays too."""
    if state.src[state.pos] != "\n":
        return False
    if not silent:
        state.pending = state.pending.rstrip(" ")
        state.push("hardbreak", "br", 0)
    state.pos += 1
    return True


def link_as_written(state: StateInline, silent: bool) -> bool:
    """A link in full, its address in the style of one and without markup: it must not hide where it leads."""
    start, maximum = state.pos, state.posMax
    if not link(state, True):
        return False
    if silent:
        return True
    end = state.pos
    label = state.md.helpers.parseLinkLabel(state, start, True)
    state.append_pending("[")
    state.pos, state.posMax = start + 1, label
    state.md.inline.tokenize(state)
    state.posMax = maximum
    state.append_pending("](")
    state.push("link_url", "link_url", 0).content = state.src[label + 2 : end - 1].replace("\n", " ")
    state.append_pending(")")
    state.pos = end
    return True


def line_of(state, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def worded(text: str) -> bool:
    """Whether there are letters, without which a mark may be one of arithmetic."""
    return any(map(str.isalpha, text))


def full_table(state, start: int, end: int, silent: bool) -> bool:
    """A table with its escapes as written; cells beyond those of the heading stay in the last column."""
    first = len(state.tokens)
    if start + 2 > end or not TABLE_RULE.fullmatch(line_of(state, start + 1)) or not table(state, start, end, silent):
        return False
    columns = 0
    cells: Iterator[str] = iter(())
    for token in state.tokens[first:]:
        if token.type == "tr_open":
            row = re.split(r"(?<!\\)\|", line_of(state, token.map[0]).strip())
            row = row[row[0] == "" : len(row) - (row[-1] == "" and len(row) > 1)]
            columns = columns or len(row)
            row[columns - 1 :] = ["|".join(row[columns - 1 :])]
            cells = iter(row)
        elif token.type == "inline":
            token.content = next(cells, "").strip()
    return True


def nameless_head(source: str) -> str:
    """The first two lines of a table that goes on with the columns of `source`; "" if that is no table."""
    lines = source.lstrip("\n").split("\n")
    tokens = PARSER.parse("\n".join(lines[:2])) if len(lines) > 2 else []
    columns = sum(token.type == "th_open" for token in tokens)
    return f"|{' |' * columns}\n{lines[1]}\n" if columns else ""


def sure(rule, certain, state, start: int, end: int, silent: bool) -> bool:
    """The rule, but only where the line is `certain` to be meant so."""
    return not state.is_code_block(start) and certain(state, start, silent) and rule(state, start, end, silent)


def sure_fence(state, start, silent) -> bool:
    line = line_of(state, start)
    return line.startswith("`") or bool(TILDES.fullmatch(line))


def sure_quote(state, start, silent) -> bool:  # not >>> of Python, not > 5
    line = line_of(state, start)
    return bool(QUOTE.fullmatch(line)) and worded(line)


def sure_rule(state, start, silent) -> bool:  # not the line below a sum
    return not line_of(state, start).startswith("_") and (not silent or start == 0 or worded(line_of(state, start - 1)))


def sure_heading(state, start, silent) -> bool:
    return bool(line_of(state, start).strip("# \t"))


def tex_block(state, start: int, end: int, silent: bool) -> bool:
    """Lines of TeX, which begin one, as written: until it ends or a line is empty."""
    line = line_of(state, start)
    begun = TEX_BLOCK.match(line)
    if state.is_code_block(start) or not begun:
        return False
    mark = begun[0]
    closing = {"\\[": "\\]", "$$": "$$"}.get(mark, f"\\end{{{begun[1]}}}")
    _, found, rest = line[begun.end() :].partition(closing)
    closed = bool(found)
    if closed and worded(rest):  # a sentence that begins with TeX
        return False
    if silent:
        return True
    after = start + 1
    while not closed and after < state.lineMax and not state.isEmpty(after) and state.sCount[after] >= state.blkIndent:
        closed = closing in line_of(state, after)
        after += 1
    state.line = after
    state.push("paragraph_open", "p", 1).map = [start, after]
    text = state.getLines(start, after, state.blkIndent + state.tShift[start], False)
    state.push("text", "", 0).content = text.rstrip("\n")
    state.push("paragraph_close", "p", -1)
    return True


def make_parser() -> MarkdownIt:
    """CommonMark with tables and ~~, less what is not surely markup."""
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 100})
    parser.inline = Inline()
    parser.inline.ruler.at("newline", line_end)
    parser.inline.ruler.at("escape", tex_or_escape)
    parser.inline.ruler.at("link", link_as_written)
    parser.inline.ruler2.after("balance_pairs", "doubtful_pairs", doubtful_pairs)
    parser.inline.ruler.disable(["linkify", "image", "autolink", "html_inline", "entity"])
    blocks = parser.block.ruler
    for name, rule, certain, alternatives in (
        ("fence", fence, sure_fence, ["paragraph", "blockquote", "list"]),
        ("blockquote", blockquote, sure_quote, ["paragraph", "blockquote", "list"]),
        ("hr", hr, sure_rule, ["paragraph", "blockquote", "list"]),
        ("heading", heading, sure_heading, ["paragraph", "blockquote"]),
    ):
        blocks.at(name, partial(sure, rule, certain), {"alt": alternatives})
    blocks.at("table", full_table, {"alt": ["paragraph"]})
    blocks.after("code", "tex", tex_block, {"alt": ["paragraph", "blockquote", "list"]})
    parser.enable("table")
    return parser.disable(["html_block", "reference", "lheading"])


PARSER = make_parser()


def code_blocks(text: str) -> list[str]:
    """The code between fences, also such as stands in a list, without the newline at its end."""
    return [token.content.removesuffix("\n") for token in PARSER.parse(text) if token.type == "fence"]


def split(text: str, final: bool = False) -> tuple[list[str], str, bool]:
    """The finished blocks of `text`, its unfinished rest, and whether that is inside a code fence.

    Whether a block is finished depends on the line after it. While that line is only begun, it is taken for what it
    is when it starts with a letter, as no list marker does; otherwise an "x" in its place asks which blocks would go
    on. Lists and indented code can go on after such a line too.
    """
    if not text.strip():
        return [], "" if final else text, False
    whole, newline, begun = text.rpartition("\n")
    whole += newline
    probe = text if final else whole + (begun if decided(begun) else "x")
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
        if starts[-1] == len(lines) - 1 and not decided(begun) and finished and _goes_on(tops[-2].type, lines[-2]):
            finished -= 1
    starts.append(len(lines))
    blocks = [_trimmed(lines[start:end]) for start, end in zip(starts[:finished], starts[1:])]
    rest = "\n".join(lines[starts[finished] :])
    return blocks, rest, finished < len(tops) and tops[finished].type == "fence"


def decided(line: str) -> bool:
    """Whether a line that is only begun is known not to begin a block of another kind than a paragraph."""
    return line.lstrip()[:1].isalpha()


def _trimmed(lines: list[str]) -> str:
    """The lines as one text, without blank ones before and after."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""


def _goes_on(kind: str, last_line: str) -> bool:
    """Whether another line than an "x" could still belong to a block of this kind."""
    if kind == "blockquote_open":
        return bool(last_line.strip())
    if kind == "heading_open":
        return "|" in last_line  # the head of a table, if its rule comes next
    return kind in ("bullet_list_open", "ordered_list_open", "code_block")
