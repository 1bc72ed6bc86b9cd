"""The line editor of the chat, with history, multi-line messages, bracketed paste and completion of commands."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.input.vt100 import Vt100Input
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.lexers import SimpleLexer
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from rich.cells import cell_len

from ..terminal import USER
from .key_sequences import KeyParser
from .lines import CONTINUED, PROMPT, Interrupted, PlainReader, as_typed, unfinished
from .session import SessionError, failing, state_dir

# Errors that can occur when the program reads the file of $EDITOR.
EDITOR_ERRORS = (UnicodeDecodeError, FileNotFoundError)
TYPED = f"ansi{USER}"  # The name that prompt_toolkit uses for the color.


class History(FileHistory):
    """The messages typed in earlier chats, in a file. A message that cannot be written stays in memory."""

    writes = True  # False while an unsent draft is added, which stays in memory.

    def store_string(self, string: str) -> None:
        """Append a message to the file."""
        if self.writes:
            with suppress(OSError):  # For example, the disk is full.
                super().store_string(string)


class FunctionCompleter(Completer):
    """A completer that calls `complete`, a function like completion.completed."""

    def __init__(self, complete):
        self.complete = complete

    def get_completions(self, document, complete_event):
        """Yield the completions of the text before the cursor, if the cursor is at its end."""
        typed = document.text_before_cursor
        if typed == document.text:
            replaced, words = self.complete(typed)
            yield from (Completion(word, -replaced, display=word.rstrip("/").split("/")[-1]) for word in words)


class Screen(Vt100_Output):
    """A terminal that reports keys with modifiers, and is erased without copies of its text in the history of tmux."""

    # The terminal is in both modes while the prompt reads keys. Other terminals than kitty know its protocol too, and
    # the others ignore its sequences.
    def enable_bracketed_paste(self) -> None:
        """Request marks around pastes, and kitty's sequences for keys that are ambiguous otherwise."""
        self.write_raw("\x1b[>1u")
        super().enable_bracketed_paste()

    def disable_bracketed_paste(self) -> None:
        """Restore the modes of the terminal."""
        super().disable_bracketed_paste()
        self.write_raw("\x1b[<u")

    def erase_down(self) -> None:
        """Erase the screen from the row of the cursor down."""
        # Erase the first line separately. If tmux erases the screen from the top corner, it saves the screen to its
        # history, and would then show the text twice. The carriage return matters only if the terminal and this
        # program disagree on the columns of a character, as many do for joined emoji.
        self.write_raw("\r\x1b7\x1b[K\x1b[B\x1b[J\x1b8")


class Keyboard:
    """A reader of messages. If the line editor fails, that read and all later ones use plain line input."""

    def __init__(self, complete, output, keys=None, screen=None):
        """Create the editor.

        Args:
        complete: A function like completion.completed, without the chat.
        keys: prompt_toolkit's input, by default the terminal.
        screen: prompt_toolkit's output, by default the terminal.
        """
        self.output, self._touched = output, False
        self._plain: PlainReader | None = None
        try:
            file = state_dir() / "history"
            with failing(file):
                file.touch(mode=0o600)  # Only its owner can read it.
        except SessionError as error:
            file = Path(os.devnull)
            output.note(f"the history of your messages is not saved: {error}")
        self.history = History(file)
        if screen is None:
            screen = Screen.from_pty(sys.stdout, term=os.environ.get("TERM"))
            # While a model answers, no code reads the terminal's cursor position report. It would appear as input.
            screen.enable_cpr = False
        keys = keys or create_input()
        if isinstance(keys, Vt100Input):  # Otherwise stdin is not a file, and there are no sequences.
            keys.vt100_parser = KeyParser(keys.vt100_parser.feed_key_callback)
        self.session: PromptSession[str] = PromptSession(
            history=self.history,
            multiline=True,
            key_bindings=_bindings(self),
            lexer=SimpleLexer(TYPED),
            color_depth=ColorDepth.from_env(),  # The function reads NO_COLOR.
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            completer=FunctionCompleter(complete),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            prompt_continuation=lambda width, line, wrapped: [(TYPED, " " * width if wrapped else CONTINUED)],
            enable_suspend=True,
            # The editor shows at most one window of text, so the program prints the whole message after it is sent.
            erase_when_done=True,
            interrupt_exception=self._interrupted,  # type: ignore[arg-type]  # the session calls it
            input=keys,
            output=screen,
        )
        self.session.default_buffer.on_text_changed += self._touch

    def read(self, draft: str = "") -> str:
        """Return one message. Raises Interrupted for Ctrl-C and EOFError for Ctrl-D."""
        if self._plain is None:
            try:
                return self._edit(draft)
            except EOFError:
                raise
            except Exception as error:
                self.output.error(f"the line editor failed ({type(error).__name__}: {error}); using plain line input")
                self._plain, draft = PlainReader(self.output.keys), self.session.default_buffer.text or draft
        return self._plain.read(draft)

    def fits(self, text: str) -> bool:
        """Return whether the whole message fits in the window."""
        size = self.session.output.get_size()
        rows = sum(1 + (len(CONTINUED) + cell_len(line.expandtabs())) // size.columns for line in text.split("\n"))
        return rows < size.rows

    def _edit(self, draft: str) -> str:
        """Return one message from the line editor."""
        self.session.app.erase_when_done = True
        # An exception while the event loop is created or closed would leave it in an undefined state. Therefore a
        # Ctrl-C before the prompt appears, or after it disappears, is only recorded.
        interrupts: list[int] = []

        def begin():
            self._touched = False
            asyncio.get_running_loop().set_exception_handler(self._report)
            if interrupts:
                interrupts.clear()
                get_app().key_processor.send_sigint()

        before = signal.signal(signal.SIGINT, lambda signum, frame: interrupts.append(signum))
        try:
            text = self.session.prompt([(TYPED, PROMPT)], default=draft, pre_run=begin, set_exception_handler=False)
        finally:
            signal.signal(signal.SIGINT, before)
            self.output.keys.disable_echo()
        if interrupts:
            raise Interrupted(text)
        if self.session.app.erase_when_done:
            self.output.user(as_typed(text))
        return text

    def _report(self, loop, context) -> None:
        """Print an error of $EDITOR, after which the prompt stays. Any other error ends the editor."""
        error, future = context.get("exception"), self.session.app.future
        if isinstance(error, EDITOR_ERRORS):
            run_in_terminal(lambda: self.output.error(f"the editor failed ({error}); the message is unchanged"))
        elif future and not future.done():
            future.set_exception(error or RuntimeError(context["message"]))

    def _touch(self, buffer) -> None:
        self._touched = True

    def _interrupted(self) -> Interrupted:
        buffer = self.session.default_buffer
        self.history.writes = False
        buffer.append_to_history()
        self.history.writes = True
        return Interrupted(buffer.text, self._touched)


def _bindings(keyboard: Keyboard) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))  # The binding does not apply in the search field.
    def _(event):
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            # With --plain, a message that fits in the window stays as the user typed it.
            event.app.erase_when_done = keyboard.output.redraws or not keyboard.fits(buffer.text)
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j", filter=has_focus(DEFAULT_BUFFER))
    def _(event):
        event.current_buffer.insert_text("\n")

    return keys
