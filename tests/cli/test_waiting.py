"""The progress line of a prompt."""

import io
import time

import pytest
from rich.console import Console

from tridecode.cli.terminal import Output
from tridecode.cli.waiting import DELAY, LINE_START, PAUSE, Waiting


@pytest.fixture
def output(state):
    """An Output whose stderr is a terminal of 80 columns; .written() returns its text."""
    output, stream = Output(), io.StringIO()
    output.errors = Console(file=stream, force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"})
    output.wraps, output.written = True, stream.getvalue
    return output


def show_for(waiting: Waiting, seconds: float) -> None:
    with waiting:
        time.sleep(seconds)


def test_short_prompt_shows_no_line(output):
    waiting = Waiting(output, lambda: (0, 10, 20))
    show_for(waiting, 0)
    time.sleep(DELAY + PAUSE)
    assert output.written() == ""


def test_line_is_updated_and_erased(output):
    progress = iter([(100, 100, 4100), (100, 2148, 4100), None, None])
    show_for(Waiting(output, lambda: next(progress, None)), DELAY + 3.5 * PAUSE)
    first, second, third, *_, last = output.written().split(LINE_START)[1:]
    assert first == "reading the prompt: 100 of 4,100 tokens, 0 s\x1b[K"
    assert second.startswith("reading the prompt: 2,148 of 4,100 tokens, ") and second.endswith(" tok/s\x1b[K")
    assert third.startswith("reading the prompt: 4,100 of 4,100 tokens, "), "the last pass is running"
    assert last == "\x1b[K"


def test_narrow_window_shows_numbers(output):
    output.errors.width = 40
    show_for(Waiting(output, lambda: (0, 28_000, 30_000)), DELAY + PAUSE)
    line = output.written().split(LINE_START)[1].removesuffix("\x1b[K")
    assert line.startswith("28,000 of 30,000 tokens, ") and len(line) < 40


def test_without_redraws_line_is_printed_once(output):
    show_for(Waiting(output, lambda: (0, 10, 4100), redraws=False), DELAY + 3 * PAUSE)
    assert output.written() == "reading a prompt of 4,100 tokens\n"


def test_unknown_progress(output):
    show_for(Waiting(output, lambda: None), DELAY + PAUSE)
    assert output.written().startswith("\x1b[Gwaiting for the first token, 0 s")


@pytest.mark.parametrize("why", ["quiet", "no terminal", "a pipe for input"])
def test_hidden_line(output, why):
    output.quiet = why == "quiet"
    if why == "no terminal":
        output.errors = Console(file=(stream := io.StringIO()), width=80)
        output.written = stream.getvalue
    show_for(Waiting(output, lambda: (0, 10, 4100), shows=why != "a pipe for input"), DELAY + PAUSE)
    assert output.written() == ""


def test_paused_line_is_not_drawn(output):
    with Waiting(output, lambda: (0, 10, 4100)) as waiting:
        time.sleep(DELAY + PAUSE)
        waiting.pause()
        before = output.written()
        assert before.endswith("\x1b[G\x1b[K")
        time.sleep(2 * PAUSE)
        assert output.written() == before
        waiting.resume()
        time.sleep(2 * PAUSE)
        assert "4,100" in output.written().removeprefix(before)
