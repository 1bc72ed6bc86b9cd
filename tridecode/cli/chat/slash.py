"""The slash commands of the chat, and their parser."""

from collections.abc import Callable
from typing import NamedTuple

from ...errors import ParameterError, brief
from ..terminal import counted, did_you_mean
from . import saving, stats
from .clipboard import copy
from .markup import code_blocks
from .settings import CHOICES, full_name

COMMAND_WORDS = {"help": "/help", "exit": "/exit", "quit": "/exit"}  # Messages that are probably meant as commands.
# Names that other chat programs use for commands.
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/new": "/clear", "/?": "/help", "/h": "/help"}
KEYS = {
    "Ctrl-C": "stops an answer or clears the prompt; twice: leaves",
    "Ctrl-D": "leaves",
    "Alt-Enter": "begins a new line; pasted text stays one message",
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
    """
    command = COMMANDS.get(ALIASES.get(word.lower(), word.lower()))
    if command is None:
        fix = f"{did_you_mean(word, COMMANDS)} /help lists them, // begins a message with a /"
        chat.output.error(f"there is no command {word[:80]}; {fix.lstrip()}")
        if not chat.interactive:  # In a pipe, the line may have been a message, which now has no answer.
            chat.exit_code = 1
        return True
    if command.arguments.startswith("FILE") and not rest:
        chat.output.note(f"{command.name} needs {command.arguments}")
    elif command.words and rest and rest not in command.words:
        words = f"{', '.join(command.words[:-1])} or {command.words[-1]}"
        chat.output.note(f"{command.name} takes {words}, not {quoted(rest)}")
    elif not command.arguments and rest:
        words = "accepts no argument; put a space before the / to send the line as a message"
        chat.output.note(f"{command.name} {words}")
    else:
        return command.action(chat, rest) is not False
    return True


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
            if command.name != "/think" or chat.thinking.possible:
                chat.output.entry(f"{command.name} {command.arguments}", command.help)
    chat.output.print_line("Keys", "bold")
    for key, what in KEYS.items():
        chat.output.entry(key, what)


def _clear(chat, rest) -> None:
    chat.replace_conversation(chat.new_conversation())
    chat.output.note("a new conversation begins" + chat.previous_session_note())


def _system(chat, rest) -> None:
    if chat.conversation.raw:
        chat.output.note("with --raw there is no system turn")
    elif not rest:
        system = chat.conversation.system
        chat.output.note("there is no system turn" if system is None else f"system: {system}")
    elif rest == "-" and chat.conversation.system is None and chat.system is None:
        chat.output.note("there is no system turn to remove")
    else:
        chat.set_system(None if rest == "-" else rest)
        chat.output.note("the system turn is " + ("removed" if rest == "-" else "set"))


def _last(chat) -> tuple[str, str] | None:
    if chat.conversation.turns:
        return chat.conversation.turns[-1]
    chat.output.note("the conversation has no turns yet")
    return None


def _retry(chat, rest):
    if last := _last(chat):
        return chat.ask(last[0], replaces=True, tries=chat.tries + 1)


def _edit(chat, rest):
    if last := _last(chat):
        if rest:
            return chat.ask(rest, replaces=True)
        if chat.interactive:
            chat.draft = literal(last[0])
        else:
            chat.output.note("/edit needs TEXT if there is no terminal")


def _continue(chat, rest):
    if _last(chat):
        return chat.continue_answer()


def _undo(chat, rest) -> None:
    if last := _last(chat):
        chat.conversation, chat.tries = chat.conversation.without_last(), 0
        chat.save()
        left = len(chat.conversation.turns)
        chat.output.note(f"removed {quoted(last[0])}; {counted(left, 'turn')} left")


def _set(chat, rest) -> None:
    name, _, value = rest.partition(" ")
    if not name:
        for name in chat.settings():
            chat.output.print_line(f"{name:<20} {chat.setting(name)}")
        for name in CHOICES:
            chat.output.print_line(f"{name:<20} {getattr(chat, name)}")
        return
    try:
        if (option := full_name(name)) in CHOICES:
            chat.choose(option, value.strip())
            chat.output.note(f"{option} is {getattr(chat, option)}")
            return
        name = chat.change(name, value.strip())
    except ParameterError as error:
        chat.output.note(str(error))
    else:
        chat.output.note(f"{name} is {chat.setting(name)}")


def _copy(chat, rest) -> None:
    if last := _last(chat):
        what, text = "the last answer", chat.answer_only(last[1])
        if rest:
            blocks = code_blocks(text)
            if not (rest.isdecimal() and len(rest) < 10 and 0 < int(rest) <= len(blocks)):
                there = f"has {counted(len(blocks), 'block')} of code" if blocks else "has no block of code"
                chat.output.note(f"/copy takes the number of a block, not {quoted(rest)}: the last answer {there}")
                return
            what, text = f"block {rest} of {len(blocks)}", blocks[int(rest) - 1]
        copy(text, chat.output)
        chat.output.note(f"asked the terminal to copy {what}, {counted(len(text), 'character')}")


def _model(chat, rest) -> None:
    if rest:
        chat.switch(saving.unquote(rest))
    chat.output.note(f"{chat.model.name} on {chat.model.device}: {chat.describe_capacity()}")


def _think(chat, rest) -> None:
    if rest:
        chat.set_think(rest)
    if not chat.thinking.possible:
        chat.output.note("this model's chat template knows no thinking")
        return
    chat.output.note(f"thinking is {chat.think}")


def _plain(chat, rest) -> None:
    if chat.conversation.raw and rest == "off":
        chat.output.note("with --raw answers are always plain text")
    else:
        chat.plain = rest == "on" if rest else chat.plain
        chat.output.note("answers are " + ("plain text" if chat.plain else "shown as Markdown in a terminal"))


def _stats(chat, rest) -> None:
    for line in stats.lines(chat):
        chat.output.print_line(line)


def quoted(text: str) -> str:
    """Return the beginning of a message in quotation marks."""
    return repr(brief(text, 50))


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
        Command("/save", "FILE", "save the conversation as JSON, to FILE.md as Markdown", saving.save),
        Command("/load", "FILE|SESSION", "continue a conversation that was saved", saving.load),
        Command("/export", "FILE.md", "write the conversation as Markdown", saving.export),
        Command("/copy", "[N]", "copy the last answer, or its Nth block of code", _copy),
    ],
    "Model": [
        Command("/model", "[PATH_OR_ID]", "switch the model (bundled is built in), or show it", _model),
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
