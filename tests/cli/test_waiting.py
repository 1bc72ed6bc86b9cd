"""The progress line that is shown while the model reads a prompt."""

import io
import re
import time

import pytest
from rich.console import Console
from servers import until

from tridecode.cli.terminal import Output
from tridecode.cli.waiting import DELAY, LINE_START, PAUSE, Waiting


@pytest.fixture
def output(state):
    """An Output whose stderr is a terminal of 80 columns; .written() returns its text."""
    output, stream = Output(), io.StringIO()
    output.errors = Console(file=stream, force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"})
    output.wraps, output.written = True, stream.getvalue
    return output


def test_line_is_updated_and_erased(output):
    progress = iter([(100, 100, 4100), (100, 2148, 4100), None, None])
    with Waiting(output, lambda: next(progress, None)):
        until(lambda: output.written().count(LINE_START) >= 3)
    first, second, third, *_, last = output.written().split(LINE_START)[1:]
    assert re.fullmatch(r"reading the prompt: 100 of 4,100 tokens, \d+ s\x1b\[K", first)
    assert second.startswith("reading the prompt: 2,148 of 4,100 tokens, ") and second.endswith(" tok/s\x1b[K")
    assert third.startswith("reading the prompt: 4,100 of 4,100 tokens, "), "the line does not show the last pass"
    assert last == "\x1b[K"


SHOWN = {  # name: (progress, options of the line, width of the window, a regular expression for the line)
    "narrow": ((0, 28_000, 30_000), {}, 40, r"\x1b\[G28,000 of 30,000 tokens, [^\x1b]{,13}\x1b\[K.*"),
    "no redraws": ((0, 10, 4100), {"redraws": False}, 80, "reading a prompt of 4,100 tokens\n"),
    "unknown": (None, {}, 80, r"\x1b\[Gwaiting for the first token, 0 s.*"),
    "a pipe for input": ((0, 10, 4100), {"shows": False}, 80, ""),
    "quiet": ((0, 10, 4100), {}, 80, ""),
    "no terminal": ((0, 10, 4100), {}, 80, ""),
    "short": ((0, 10, 4100), {}, 80, ""),
}


@pytest.mark.parametrize("case", SHOWN)
def test_line_depends_on_output_and_progress(output, case):
    progress, options, output.errors.width, shown = SHOWN[case]
    output.quiet = case == "quiet"
    if case == "no terminal":
        output.errors = Console(file=(stream := io.StringIO()), width=80)
        output.written = stream.getvalue
    with Waiting(output, lambda: progress, **options):
        if shown:
            until(output.written)
        time.sleep(0 if case == "short" else DELAY + 2 * PAUSE)
    time.sleep(DELAY + PAUSE if case == "short" else 0)
    assert re.fullmatch(shown, output.written(), re.DOTALL)


def test_paused_line_is_not_drawn(output):
    with Waiting(output, lambda: (0, 10, 4100)) as waiting:
        until(output.written)
        waiting.pause()
        before = output.written()
        assert before.endswith("\x1b[G\x1b[K")
        time.sleep(2 * PAUSE)
        assert output.written() == before
        waiting.resume()
        until(lambda: "4,100" in output.written().removeprefix(before))
