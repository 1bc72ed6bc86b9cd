"""The commands of the chat: what each does, and which one was meant."""

from ...errors import ParameterError, brief
from ..terminal import counted, did_you_mean
from . import saving, stats
from .clipboard import copy
from .markup import code_blocks
from .settings import CHOICES, full_name

# Group -> name -> arguments and what it does, in the order of /help.
GROUPS = {
    "Conversation": {
        "/retry": ("", "ask the last message again"),
        "/continue": ("", "go on with the last answer where it ended"),
        "/edit": ("[TEXT]", "change the last message and ask it again"),
        "/undo": ("", "take back the last message and its answer"),
        "/clear": ("", "begin a new conversation"),
        "/system": ("[TEXT]", "set the system turn; - removes it, alone shows it"),
        "/history": ("[N]", "show what was said, or the last N turns of it"),
    },
    "Saved conversations": {
        "/sessions": ("[ACTION]", "list them; rename [OLD] NEW, or delete NAME ..."),
        "/title": ("[TEXT]", "what this one is called there; - for its first words"),
    },
    "Files and clipboard": {
        "/save": ("FILE", "save the conversation as JSON, to FILE.md as Markdown"),
        "/load": ("FILE|SESSION", "continue a conversation that was saved"),
        "/export": ("FILE.md", "write the conversation as Markdown"),
        "/copy": ("[N]", "copy the last answer, or its Nth block of code"),
    },
    "Model": {
        "/model": ("[PATH_OR_ID]", "another model (bundled is built in); alone says which"),
        "/think": ("[on|off|hide]", "think, do not, or hide it; alone says which"),
        "/set": ("[NAME VALUE]", "sampling, stats, ...; VALUE may be default"),
        "/stats": ("", "the model, its speed, memory and context"),
    },
    "Chat": {
        "/plain": ("[on|off]", "answers as the model writes them, or as Markdown"),
        "/help": ("", "show this"),
        "/exit": ("", "leave"),
    },
}
COMMANDS = {name: words for group in GROUPS.values() for name, words in group.items()}
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


def run(chat, word: str, rest: str) -> bool:
    """One command; False ends the chat. `chat` is a talk.Chat."""
    word = ALIASES.get(word.lower(), word.lower())
    if word not in COMMANDS:
        fix = f"{did_you_mean(word, COMMANDS)} /help lists them, // begins a message with a /"
        chat.output.error(f"there is no command {word[:80]}; {fix.lstrip()}")
        if not chat.interactive:  # what was meant as a message has no answer
            chat.exit_code = 1
        return True
    arguments = COMMANDS[word][0]
    if arguments.startswith("FILE") and not rest:
        chat.output.note(f"{word} needs {arguments}")
    elif not arguments and rest:
        chat.output.note(f"{word} takes nothing after it; a message that begins with it needs a space before the /")
    elif word == "/exit":
        return False
    else:
        return _ACTIONS[word](chat, rest) is not False
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
        for name, (arguments, what) in group.items():
            if name == "/think" and not chat.thinking.possible:
                continue
            chat.output.entry(f"{name} {arguments}", what)
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
    if rest not in ("", "on", "off", "hide"):
        chat.output.note(f"/think takes on, off or hide, not {quoted(rest)}")
        return
    if rest:
        chat.set_think(rest)
    if not chat.thinking.possible:
        chat.output.note("this model's chat template knows no thinking")
        return
    chat.output.note(f"thinking is {chat.think}")


def _plain(chat, rest) -> None:
    if rest not in ("", "on", "off"):
        chat.output.note(f"/plain takes on or off, not {quoted(rest)}")
    elif chat.conversation.raw and rest == "off":
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


_ACTIONS = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/retry": _retry,
    "/continue": _continue,
    "/undo": _undo,
    "/edit": _edit,
    "/history": saving.history,
    "/sessions": saving.listed,
    "/title": saving.title,
    "/save": saving.save,
    "/load": saving.load,
    "/export": saving.export,
    "/copy": _copy,
    "/model": _model,
    "/think": _think,
    "/plain": _plain,
    "/set": _set,
    "/stats": _stats,
}
