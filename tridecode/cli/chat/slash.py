"""The slash commands of the chat, and their parser."""

import re
from collections.abc import Callable
from typing import NamedTuple

from ...errors import TridecodeError, brief
from ..terminal import counted, did_you_mean, speed_line
from . import files, saving, settings
from .clipboard import copy
from .conversation import Conversation
from .markup import code_blocks

# Messages that are meant as commands. Only those that leave are run; for others the chat asks.
COMMAND_WORDS = {"help": "/help", "exit": "/exit", "quit": "/exit"}
# Names that other chat programs use for commands.
ALIASES = {
    "/quit": "/exit", "/bye": "/exit", "/new": "/clear", "/?": "/help", "/h": "/help", "/q": "/exit",
    "/reset": "/clear", "/regen": "/retry", "/regenerate": "/retry", "/read": "/file",
}  # fmt: skip
# Commands of other chat programs, and hints to the commands of this one.
FOREIGN = {
    "/show": "/stats shows the model and its speed, /set shows the settings, /system the system turn",
    "/list": "/sessions lists the conversations, tridecode models the models; /model switches to one",
}
KEYS = {
    "Ctrl-C": "stops an answer or clears the prompt; twice: leaves",
    "Ctrl-D": "leaves",
    "Shift-Enter": "or Alt-Enter, Ctrl-J: begins a new line",
    '"""': "begins and ends a message of several lines",
    "Tab": "completes commands and their arguments",
    "Ctrl-X Ctrl-E": "opens the message in $EDITOR",
    "Up, Down": "show earlier messages, also of earlier chats",
    "//": "begins a message that starts with a single /",
    "Space": "a line that starts with a space is never a command",
}


class Command(NamedTuple):
    """A chat command. `action` returns False to end the chat."""

    name: str
    arguments: str
    help: str
    action: Callable

    @property
    def words(self) -> list[str]:
        """The words that the command accepts; empty if it accepts any text."""
        words = self.arguments.strip("[]").split("|")
        return words if words[1:] and words[0].islower() else []


def run(chat, word: str, rest: str) -> bool:
    """Run a command. Return False to end the chat.

    Args:
        chat: A talk.Chat.
        word: The command with its slash.
        rest: Its argument.

    Raises:
        TridecodeError: There is no such command, or it cannot have this argument.
    """
    command = COMMANDS.get(ALIASES.get(word.lower(), word.lower()))
    if command is None:
        if not chat.interactive:  # In a pipe, the line may have been a message, which now has no answer.
            chat.exit_code = 1
        near = FOREIGN.get(word.lower()) or did_you_mean(word, COMMANDS)
        fix = f"{near}{';' if word.lower() in FOREIGN else ''} /help lists them, // begins a message with a /"
        raise TridecodeError(f"there is no command {word[:80]}; {fix.lstrip()}")
    if command.arguments.startswith("FILE") and not rest:
        raise TridecodeError(f"{word} needs {command.arguments}")
    if command.words and rest and rest not in command.words:
        words = f"{', '.join(command.words[:-1])} or {command.words[-1]}"
        raise TridecodeError(f"{word} takes {words}, not {quoted(rest)}")
    if not command.arguments and rest:
        raise TridecodeError(f"{word} accepts no argument; put a space before the / to send the line as a message")
    return command.action(chat, rest) is not False


def command_hint(message: str) -> str:
    """Return a question if the message is a word that was probably meant as a command, otherwise ""."""
    command = COMMAND_WORDS.get(message.rstrip().lower())
    return f"did you mean {command}? Put a space before the word to send it as a message" if command else ""


def literal(message: str) -> str:
    """Return the input that sends `message` unchanged.

    A leading space keeps it from being read as a command or a block.
    """
    return f" {message}" if message.startswith(("/", '"""')) or command_hint(message) else message


def _help(chat, rest) -> None:
    for title, group in GROUPS.items():
        chat.output.print_line(title, "bold")
        for command in group:
            hidden = {"/think": not chat.thinking.possible, "/adapter": not chat.model.adapters}
            if not hidden.get(command.name):
                chat.output.entry(f"{command.name} {command.arguments}", command.help)
    chat.output.print_line("Keys", "bold")
    for key, what in KEYS.items():
        chat.output.entry(key, what)


def _clear(chat, rest) -> None:
    kept = chat.begin(Conversation(chat.conversation.raw, chat.conversation.system))
    system = "" if chat.conversation.system is None else "the system turn, "
    chat.output.note(f"a new conversation begins; {system}the model and the settings stay")
    saving.note_previous(chat, kept)


def _system(chat, rest) -> None:
    if chat.conversation.raw:
        raise TridecodeError("with --raw there is no system turn")
    if not rest:
        system = chat.conversation.system
        chat.output.note("there is no system turn" if system is None else f"system: {system}")
    else:
        chat.change_conversation(system=None if rest == "-" else rest)
        chat.output.note("the system turn is " + ("removed" if rest == "-" else "set"))


def _last(chat) -> tuple[str, str]:
    """Return the last turn. Raises TridecodeError if there is none."""
    if not chat.conversation.turns:
        raise TridecodeError("the conversation has no turns yet")
    return chat.conversation.turns[-1]


def _retry(chat, rest) -> bool:
    return chat.ask(*(chat.unanswered or (_last(chat)[0], True, chat.tries + 1)))


def _edit(chat, rest) -> bool:
    message, replaces, _ = chat.unanswered or (_last(chat)[0], True, 0)
    if rest:
        return chat.ask(rest, replaces)
    if not chat.interactive:
        raise TridecodeError("/edit needs TEXT if there is no terminal")
    chat.draft = literal(message), replaces
    return True


def _continue(chat, rest) -> bool:
    message, answer = _last(chat)
    if not chat.model.continues:
        raise TridecodeError('a server cannot continue an answer; send a message such as "continue"')
    return chat.ask(message, replaces=True, prefix=answer)


def _undo(chat, rest) -> None:
    message, _ = _last(chat)
    chat.conversation, chat.tries, chat.unanswered = chat.conversation.without_last(), 0, None
    chat.save()
    left = len(chat.conversation.turns)
    chat.output.note(f"removed {quoted(message)}; {counted(left, 'turn')} left")


def _set(chat, rest) -> None:
    words = re.fullmatch(r"(?:parameter\s+)?([^\s=]*)\s*=?\s*(.*)", rest, re.DOTALL)  # ollama's form has one word more.
    assert words is not None
    name, value = words.groups()
    if name:
        name = settings.change(chat, name, value.strip())
        chat.change_conversation(settings=settings.changed(chat))
        chat.output.note(f"{name} is {settings.shown(chat, name)}")
        return
    for name in (*settings.names(chat), *settings.CHOICES):
        chat.output.print_line(f"{name:<20} {settings.shown(chat, name)}")


def _copy(chat, rest) -> None:
    what, text = "the last answer", chat.answer_only(_last(chat)[1])
    if rest:
        blocks = code_blocks(text)
        if not (rest.isdecimal() and len(rest) < 10 and 0 < int(rest) <= len(blocks)):
            there = f"has {counted(len(blocks), 'block')} of code" if blocks else "has no block of code"
            raise TridecodeError(f"/copy takes the number of a block, not {quoted(rest)}: the last answer {there}")
        what, text = f"block {rest} of {len(blocks)}", blocks[int(rest) - 1]
    copy(text, chat.output)
    chat.output.note(f"asked the terminal to copy {what}, {counted(len(text), 'character')}")


def _model(chat, rest) -> None:
    if rest:
        chat.switch(saving.unquote(rest))
    chat.output.note(f"{chat.model.name} on {chat.model.device}: {chat.describe_capacity()}")


def _adapter(chat, rest) -> None:
    names = chat.model.adapters
    if not names:
        raise TridecodeError(chat.model.no_adapters)
    if rest:
        if rest not in (*names, "-"):
            raise TridecodeError(f"there is no adapter {quoted(rest)}; the loaded ones are {', '.join(names)}")
        chat.model.adapter = None if rest == "-" else rest
    others = ", ".join(name for name in names if name != chat.model.adapter)
    chat.output.note(f"adapter {chat.model.adapter or 'none'}" + (f"; also loaded: {others}" if others else ""))


def _think(chat, rest) -> None:
    if rest:
        chat.set_think(rest)
    unsupported = "the chat template of this model does not support thinking"
    chat.output.note(f"thinking is {chat.think}" if chat.thinking.possible else unsupported)


def _plain(chat, rest) -> None:
    if chat.conversation.raw and rest == "off":
        raise TridecodeError("with --raw answers are always plain text")
    chat.plain = rest == "on" if rest else chat.plain
    chat.output.note("answers are " + ("plain text" if chat.plain else "shown as Markdown in a terminal"))


def _stats(chat, rest) -> None:
    rows, turns, dropped = chat.model.facts(chat.last), len(chat.conversation.turns), chat.conversation.dropped
    rows.append(counted(turns, "turn") + (f", {turns - dropped:,} of them sent to the model" if dropped else ""))
    if chat.last is None:
        rows.append(f"{chat.describe_capacity()}, no complete answer yet")
    else:
        rows.append(f"last answer: {speed_line(chat.last.usage, chat.last.timings, chat.model.capacity, chat.seed)}")
    if chat.store:
        rows.append(f"session {chat.store.name} in {chat.store.path.parent}")
    for row in rows:
        chat.output.print_line(row)


def quoted(text: str) -> str:
    """Return the beginning of a message in quotation marks."""
    return f"'{brief(text, 50)}'"


def _exit(chat, rest) -> bool:
    return False


# The order in which /help lists the commands.
GROUPS = {
    "Conversation": [
        Command("/retry", "", "answer the last message again", _retry),
        Command("/continue", "", "continue the last answer where it ended", _continue),
        Command("/edit", "[TEXT]", "change the last message and send it again", _edit),
        Command("/undo", "", "remove the last message and its answer", _undo),
        Command("/clear", "", "begin a new conversation", _clear),
        Command("/system", "[TEXT]", "set the system turn; - removes it; no TEXT: show it", _system),
        Command("/history", "[N]", "show the conversation, or its last N turns", saving.history),
    ],
    "Saved conversations": [
        Command("/sessions", "[ACTION]", "list them; rename [OLD] NEW, or delete NAME ...", saving.list_sessions),
        Command("/title", "[TEXT]", "set its title in the list; - for its first words", saving.title),
    ],
    "Files and clipboard": [
        Command("/file", "FILE [MESSAGE]", "add a text file to MESSAGE, or to the next message", files.attach),
        Command("/save", "FILE", "save the conversation as JSON, to FILE.md as Markdown", saving.save),
        Command("/load", "FILE|SESSION", "continue a conversation that was saved", saving.load),
        Command("/export", "FILE.md", "write the conversation as Markdown", saving.export),
        Command("/copy", "[N]", "copy the last answer, or its Nth block of code", _copy),
    ],
    "Model": [
        Command("/model", "[PATH_OR_ID]", "switch the model (bundled is built in), or show it", _model),
        Command("/adapter", "[NAME]", "answer with a LoRA adapter; - for none; no NAME: show it", _adapter),
        Command("/think", "[on|off|hide]", "switch thinking on or off, hide it, or show the mode", _think),
        Command("/set", "[NAME VALUE]", "set sampling, stats, ...; VALUE may be default", _set),
        Command("/stats", "", "show the model, its speed, memory and context", _stats),
    ],
    "Chat": [
        Command("/plain", "[on|off]", "show answers as plain text, or as Markdown", _plain),
        Command("/help", "", "show this", _help),
        Command("/exit", "", "leave", _exit),
    ],
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
