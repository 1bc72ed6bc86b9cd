"""The commands of the chat: what each does, and which one was meant."""

from collections.abc import Callable
from typing import NamedTuple

from ...errors import ParameterError, brief
from ..terminal import counted, did_you_mean
from . import saving, stats
from .clipboard import copy
from .markup import code_blocks
from .settings import CHOICES, full_name

BARE = {"help": "/help", "exit": "/exit", "quit": "/exit"}  # words that alone are hardly meant for the model
# What other chats call them.
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/new": "/clear", "/?": "/help", "/h": "/help"}
KEYS = {
    "Ctrl-C": "stops an answer; clears the prompt's line, twice leaves",
    "Ctrl-D": "leaves",
    "Alt-Enter": "begins a new line; a pasted text stays one message",
    '"""': "begins and ends a message of several lines",
    "Tab": "completes commands, and what may stand after them",
    "Ctrl-X Ctrl-E": "opens the message in $EDITOR",
    "Up, Down": "go through what was typed before, in earlier chats too",
    "//": "begins a message that begins with one /",
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
    """One command; False ends the chat. `chat` is a talk.Chat."""
    command = COMMANDS.get(ALIASES.get(word.lower(), word.lower()))
    if command is None:
        fix = f"{did_you_mean(word, COMMANDS)} /help lists them, // begins a message with a /"
        chat.output.error(f"there is no command {word[:80]}; {fix.lstrip()}")
        if not chat.interactive:  # what was meant as a message has no answer
            chat.exit_code = 1
        return True
    if command.arguments.startswith("FILE") and not rest:
        chat.output.note(f"{command.name} needs {command.arguments}")
    elif command.words and rest and rest not in command.words:
        words = f"{', '.join(command.words[:-1])} or {command.words[-1]}"
        chat.output.note(f"{command.name} takes {words}, not {quoted(rest)}")
    elif not command.arguments and rest:
        words = "takes nothing after it; a message that begins with it needs a space before the /"
        chat.output.note(f"{command.name} {words}")
    else:
        return command.action(chat, rest) is not False
    return True


def meant(message: str) -> str:
    """A question where the message is a word that was probably meant as a command."""
    command = BARE.get(message.rstrip().lower())
    return f"did you mean {command}? With a space before it the word is a message" if command else ""


def literal(message: str) -> str:
    """What is typed to send this message: a space keeps it from being a command or the beginning of a block."""
    return f" {message}" if message.startswith(("/", '"""')) or meant(message) else message


def _help(chat, rest) -> None:
    for title, group in GROUPS.items():
        chat.output.say(title, "bold")
        for command in group:
            if command.name != "/think" or chat.thinking.possible:
                chat.output.entry(f"{command.name} {command.arguments}", command.help)
    chat.output.say("Keys", "bold")
    for key, what in KEYS.items():
        chat.output.entry(key, what)


def _clear(chat, rest) -> None:
    chat.replace_conversation(chat.fresh())
    chat.output.note("a new conversation begins" + chat.kept_in())


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
    chat.output.note("nothing was said yet")
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
            chat.output.note("/edit needs TEXT where there is no terminal")


def _continue(chat, rest):
    if _last(chat):
        return chat.continue_answer()


def _undo(chat, rest) -> None:
    if last := _last(chat):
        chat.conversation, chat.tries = chat.conversation.without_last(), 0
        chat.save()
        left = len(chat.conversation.turns)
        chat.output.note(f"took back {quoted(last[0])}; {counted(left, 'turn')} left")


def _set(chat, rest) -> None:
    name, _, value = rest.partition(" ")
    if not name:
        for name in chat.settings():
            chat.output.say(f"{name:<20} {chat.setting(name)}")
        for name in CHOICES:
            chat.output.say(f"{name:<20} {getattr(chat, name)}")
        return
    try:
        if (found := full_name(name)) in CHOICES:
            chat.choose(found, value.strip())
            chat.output.note(f"{found} is {getattr(chat, found)}")
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
    chat.output.note(f"{chat.model.name} on {chat.model.device}: {chat.capacity_words()}")


def _think(chat, rest) -> None:
    if rest:
        chat.set_think(rest)
    if not chat.thinking.possible:
        chat.output.note("this model's chat template knows no thinking")
        return
    chat.output.note(f"thinking is {chat.think}")


def _plain(chat, rest) -> None:
    if chat.conversation.raw and rest == "off":
        chat.output.note("with --raw answers are always plain: a text that is continued is no Markdown")
    else:
        chat.plain = rest == "on" if rest else chat.plain
        chat.output.note("answers are " + ("plain text" if chat.plain else "shown as Markdown in a terminal"))


def _stats(chat, rest) -> None:
    for line in stats.lines(chat):
        chat.output.say(line)


def quoted(text: str) -> str:
    """The beginning of a message, to tell which one is meant."""
    return repr(brief(text, 50))


def _exit(chat, rest) -> bool:
    return False


# In the order of /help.
GROUPS = {
    "Conversation": [
        Command("/retry", "", "ask the last message again", _retry),
        Command("/continue", "", "go on with the last answer where it ended", _continue),
        Command("/edit", "[TEXT]", "change the last message and ask it again", _edit),
        Command("/undo", "", "take back the last message and its answer", _undo),
        Command("/clear", "", "begin a new conversation", _clear),
        Command("/system", "[TEXT]", "set the system turn; - removes it, alone shows it", _system),
        Command("/history", "[N]", "show what was said, or the last N turns of it", saving.history),
    ],
    "Saved conversations": [
        Command("/sessions", "[ACTION]", "list them; rename [OLD] NEW, or delete NAME ...", saving.listed),
        Command("/title", "[TEXT]", "what this one is called there; - for its first words", saving.title),
    ],
    "Files and clipboard": [
        Command("/save", "FILE", "save the conversation as JSON, to FILE.md as Markdown", saving.save),
        Command("/load", "FILE|SESSION", "continue a conversation that was saved", saving.load),
        Command("/export", "FILE.md", "write the conversation as Markdown", saving.export),
        Command("/copy", "[N]", "copy the last answer, or its Nth block of code", _copy),
    ],
    "Model": [
        Command("/model", "[PATH_OR_ID]", "another model (bundled is built in); alone says which", _model),
        Command("/think", "[on|off|hide]", "think, do not, or hide it; alone says which", _think),
        Command("/set", "[NAME VALUE]", "sampling, stats, ...; VALUE may be default", _set),
        Command("/stats", "", "the model, its speed, memory and context", _stats),
    ],
    "Chat": [
        Command("/plain", "[on|off]", "answers as the model writes them, or as Markdown", _plain),
        Command("/help", "", "show this", _help),
        Command("/exit", "", "leave", _exit),
    ],
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
