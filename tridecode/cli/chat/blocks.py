"""Rendering of one Markdown block in a terminal."""

from rich import box
from rich.cells import cell_len
from rich.markdown import CodeBlock, Heading, HorizontalRule, ListElement, ListItem, Markdown, Paragraph, TableElement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..wrapping import ORIGINAL, PRIVATE
from .markup import PARSER

# Maximum depth of nested blocks. Deeper blocks are plain text, because no columns would be left for them.
MAX_NESTING = 15
MIN_CELL = 8  # Minimum columns of a table cell. Words are not readable in narrower cells.


class Code(CodeBlock):
    """A code block, highlighted in the terminal's own colors, without blank lines around it."""

    title = ""

    @classmethod
    def create(cls, markdown, token):
        """Return the element of a fence. The words after its language become the title."""
        code = super().create(markdown, token)
        assert isinstance(code, Code)
        # A single word after the mark is the language, not a title.
        code.title = token.info.strip() if len(token.info.split()) > 1 else ""
        return code

    def __rich_console__(self, console, options):
        if self.title:
            yield Padding(Text(self.title, style="dim"), (0, 2))
        code = str(self.text).rstrip()
        text = Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, tab_size=8).highlight(code)
        text.rstrip()
        yield Padding(text, (0, 2))


class Rows(TableElement):
    """A table that keeps the alignment of its columns and folds long words instead of cutting them.

    If the table has too many columns for the window, each cell is shown on a separate line after the name of its
    column.
    """

    def __rich_console__(self, console, options):
        assert self.header is not None and self.header.row is not None
        headings = [cell.content.copy() for cell in self.header.row.cells]
        rows = [[cell.content for cell in row.cells] for row in (self.body.rows if self.body else ())]
        if not (rows or any(headings)):
            return
        for heading in headings:
            heading.stylize("markdown.table.header")
        widths = [max(cell_len(cell.plain) for cell in column) for column in zip(headings, *rows)]
        if sum(min(width, MIN_CELL) + 2 for width in widths) > options.max_width:
            for row in rows or [[Text()] * len(headings)]:
                for heading, text in zip(headings, row):
                    yield Text.assemble(heading, ": " if heading and text else "", text)
                yield Text()
            return
        # A table that continues one above it has no names.
        table = Table(
            box=box.SIMPLE,
            show_edge=False,
            pad_edge=False,
            show_header=any(headings),
            style="markdown.table.border",
        )
        for cell, heading in zip(self.header.row.cells, headings):
            table.add_column(heading, justify=cell.justify or "default", overflow="fold")
        for row in rows:
            table.add_row(*row)
        yield table


class Title(Heading):
    """A heading aligned to the left at every level, because a centered one looks detached in a wide window."""

    LEVEL_ALIGN = {}


class Line(HorizontalRule):
    """A rule without the blank line below it."""

    def __rich_console__(self, console, options):
        yield Rule(style=console.get_style("markdown.hr", default="none"))


class Item(ListItem):
    """A list item that keeps the number that the source contains."""

    marker = ""

    @classmethod
    def create(cls, markdown, token):
        """Return the element of a list item, with its number or a bullet."""
        item = cls()
        item.marker = token.info + token.markup if token.info else "•"
        return item


class Items(ListElement):
    """A list whose existing items do not change when more items are added."""

    def __rich_console__(self, console, options):
        for item in self.items:
            assert isinstance(item, Item)
            style = "markdown.item.bullet" if item.marker == "•" else "markdown.item.number"
            marker, style = f" {item.marker} ", console.get_style(style, default="none")
            inner = options.update(width=options.max_width - len(marker))
            for i, line in enumerate(console.render_lines(item.elements, inner, style=item.style) or [[]]):
                yield Segment(" " * len(marker) if i else marker, style)
                yield from line
                yield Segment.line()


class Block(Markdown):
    """One block of Markdown."""

    elements = Markdown.elements | {
        "fence": Code,
        "code_block": Code,
        "table_open": Rows,
        "hr": Line,
        "heading_open": Title,
        "list_item_open": Item,
        "bullet_list_open": Items,
        "ordered_list_open": Items,
        "tex": Paragraph,
    }

    def __init__(self, source: str):
        # This method does not call rich's __init__, which builds a parser each time and takes a quarter of the time of
        # a frame.
        self.markup, self.parsed = source, []
        self.style, self.justify, self.code_theme, self.hyperlinks = "none", None, "ansi_dark", False
        self.inline_code_lexer, self.inline_code_theme = None, self.code_theme

    def __rich_console__(self, console, options):
        try:
            self.parsed = PARSER.parse(self.markup)
            deepest = max((token.level for token in self.parsed), default=0)
            if deepest > MAX_NESTING or 4 * deepest > options.max_width - 8:
                raise ValueError("nested too deeply")
            rendered = list(super().__rich_console__(console, options))
        except Exception:  # A parser or a renderer failed. An answer must not fail because of its formatting.
            rendered = [Text(self.markup.rstrip("\n"))]
        yield from rendered


def render_rows(console, source: str, finished: bool = True) -> list[tuple[Segment, ...]]:
    """Return the terminal rows of a block, without surrounding blank rows and trailing spaces.

    A finished block without rows, such as an empty code block, is shown as its source. The last column stays empty,
    because the cursor position after a character in the last column depends on the terminal.
    """
    if not source.strip():
        return []
    options = console.options.update(width=max(console.width - 1, 1))
    rows = [_trimmed(line) for line in console.render_lines(Block(source.translate(PRIVATE)), options, pad=False)]
    filled = [i for i, row in enumerate(rows) if row]
    if filled:
        return rows[filled[0] : filled[-1] + 1]
    return (
        [*map(_trimmed, console.render_lines(Text(source.translate(PRIVATE)), options, pad=False))] if finished else []
    )


def _trimmed(line: list[Segment]) -> tuple[Segment, ...]:
    plain = (
        Segment(segment.text.translate(ORIGINAL), segment.style or None)
        for segment in line
        if segment.text and not segment.control
    )
    row = [*Segment.simplify(plain)]
    while row and not row[-1].text.rstrip(" "):
        row.pop()
    if row:
        row[-1] = Segment(row[-1].text.rstrip(" "), row[-1].style)
    return tuple(row)
