"""The commands of the chat about what is kept: files, sessions, titles and what was said."""

import os
from pathlib import Path

from ..terminal import counted
from . import session, sessions
from .display import open_sink
from .lines import CONTINUED, PROMPT

LISTED = 20  # sessions that /sessions shows
SHOWN = 2000  # characters of the turns that are shown of a conversation which is continued; one is shown in any case


def save(chat, rest: str) -> None:
    path = path_of(rest)
    if path.suffix.lower() in sessions.MARKDOWN:
        return export(chat, rest)
    if os.path.lexists(path):
        session.read(path)  # anything but a session is not overwritten
    session.write(path, session.dumps(chat.conversation, chat.model.name))
    chat.output.note(f"saved to {path}")


def load(chat, rest: str) -> None:
    """A session by its name, which is then continued, or else a file, which goes on in a session of its own."""
    store = None
    if rest in sessions.names():
        store = session.Store(sessions.existing(rest), chat.model.name)
        loaded = store.load()
    else:
        path = path_of(rest)
        try:
            loaded = session.read(path)
        except session.SessionError as error:
            if path.suffix.lower() in sessions.MARKDOWN and path.is_file():
                raise session.SessionError(f"{error}; /load reads JSON, Markdown is only for people") from None
            if not os.path.lexists(path) and path.name == rest and not path.suffix:
                words = "no session of this name, and no file; /sessions lists them"
                raise session.SessionError(f"{rest}: {words}") from None
            raise
    if loaded.raw != chat.conversation.raw:
        chat.output.note(f"this conversation needs a chat {'with' if loaded.raw else 'without'} --raw")
        return
    chat.replace_conversation(loaded)
    if store and chat.store:
        chat.store = store
    show_last(chat)
    goes_on = chat.store and chat.store.name == chat.kept  # what was open was loaded again
    chat.output.note(chat.describe() + ("" if goes_on else chat.kept_in()))


def export(chat, rest: str) -> None:
    path = path_of(rest)
    sessions.export(chat.conversation.markdown(chat.thinking.opened), path)
    chat.output.note(f"exported to {path}")


def title(chat, rest: str) -> None:
    if rest:
        chat.set_title(None if rest == "-" else rest)
    words = sessions.title(chat.conversation)
    chat.output.note(f"the title is {words}" if words else "there is no title yet: it will be the first words")


def listed(chat, rest: str) -> None:
    """/sessions, and what it does with one."""
    action, *names = rest.split() or [""]
    mine = chat.store.name if chat.store else None
    if not action:
        found = sessions.saved()
        for line in sessions.lines(found[:LISTED], chat.output.errors.width):
            chat.output.say(line)
        if len(found) > LISTED:
            chat.output.note(f"and {counted(len(found) - LISTED, 'older one')}; tridecode sessions lists all")
        chat.output.note(f"this is session {mine}" if mine else "this conversation is not saved")
    elif action == "rename" and len(names) in (1, 2):
        old, new = names if len(names) == 2 else (mine, names[0])
        if old is None:
            chat.output.note("this conversation is not saved; /sessions rename takes OLD NEW here")
            return
        chat.store.rename(new) if old == mine else sessions.rename(old, new)
        chat.output.note(f"session {old} is now called {new}")
    elif action == "delete" and names:
        if mine in names:
            chat.output.note(f"session {mine} is this one; /clear begins another, then it can be deleted")
            return
        sessions.delete(names)
        chat.output.note(f"deleted {counted(len(set(names)), 'session')}")
    else:
        chat.output.note("/sessions takes nothing, rename [OLD] NEW, or delete NAME ...")


def history(chat, rest: str) -> None:
    turns = len(chat.conversation.turns)
    if rest and not (rest.isdecimal() and len(rest) < 10 and int(rest)):
        chat.output.note(f"/history takes a number of turns, not {rest[:50]!r}")
    elif not turns:
        chat.output.note("nothing was said yet")
    else:
        show(chat, max(turns - int(rest), 0) if rest else 0)


def show_last(chat) -> None:
    """The end of a conversation that is continued, where somebody reads it."""
    turns, left = chat.conversation.turns, SHOWN
    first = len(turns)
    while first and (left == SHOWN or left >= sum(map(len, turns[first - 1]))):
        first -= 1
        left -= sum(map(len, turns[first]))
    if chat.interactive and turns:
        if first:
            chat.output.note(f"{counted(first, 'earlier turn')}; /history shows all")
        show(chat, first)


def show(chat, first: int) -> None:
    """The turns from `first` on as they looked, without the thinking."""
    for number, (user, answer) in enumerate(chat.conversation.turns[first:]):
        if number:
            chat.output.text("\n")
        chat.output.user(PROMPT + user.replace("\n", "\n" + CONTINUED))
        sink = open_sink(chat.output, chat.plain)
        try:
            sink.push(chat.answer_only(answer))
            sink.finish()
        except BaseException:
            sink.abort()
            raise


def unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def path_of(text: str) -> Path:
    try:
        return Path(os.path.expanduser(unquote(text)))
    except ValueError as error:
        raise session.SessionError(f"{text!r}: {error}") from None
