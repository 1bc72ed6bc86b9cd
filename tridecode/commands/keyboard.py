"""The line editor of the chat: history, several lines, bracketed paste, completion of commands."""

import os
import signal
import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

from .lines import unfinished
from .session import SessionError, state_dir


class History(FileHistory):
    """What was typed in earlier chats, for its owner only. A disk that fails costs the history, not the chat."""

    def load_history_strings(self):
        try:
            return list(super().load_history_strings())
        except (OSError, ValueError):
            return []

    def store_string(self, string: str) -> None:
        try:
            os.close(os.open(self.filename, os.O_WRONLY | os.O_CREAT, 0o600))
            super().store_string(string.encode("utf-8", "replace").decode())
        except (OSError, ValueError):
            pass


class Commands(Completer):
    def __init__(self, names):
        self.names = tuple(names)

    def get_completions(self, document, complete_event):
        typed = document.text_before_cursor
        if typed.startswith("/") and typed == document.text:
            yield from (Completion(name, -len(typed)) for name in self.names if name.startswith(typed))


class Keyboard:
    """read() returns one message; raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D, as input() does."""

    def __init__(self, commands, output):
        history = None
        try:
            history = History(str(state_dir() / "history"))
        except SessionError as error:
            output.note(f"what you type is not remembered: {error}")
        screen = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        # Nobody reads the terminal's answer about the cursor while a model talks; it would be taken for typing.
        screen.enable_cpr = False
        self.session = PromptSession(
            history=history,
            multiline=True,
            key_bindings=_bindings(),
            completer=Commands(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            prompt_continuation=lambda width, line, wrapped: " " * width if wrapped else "… ".rjust(width),
            output=screen,
        )

    def read(self, draft: str = "") -> str:
        # An exception in the middle of making or closing the event loop would leave it half made: until the prompt is
        # there, and once it has gone, a Ctrl-C is only noted.
        interrupts = []

        def interrupt_if_noted():
            if interrupts:
                interrupts.clear()
                get_app().key_processor.send_sigint()

        before = signal.signal(signal.SIGINT, lambda signum, frame: interrupts.append(signum))
        try:
            text = self.session.prompt("> ", default=draft, pre_run=interrupt_if_noted)
        finally:
            signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt
        return text


def _bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event):
        buffer = event.current_buffer
        if unfinished(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event):
        event.current_buffer.insert_text("\n")

    return keys
