"""Chat commands for files, sessions, titles and the history."""

import os
import shlex
from pathlib import Path

from ..terminal import counted
from . import session, sessions
from .display import open_sink
from .lines import as_typed
from .turn import COLUMNS

LISTED = 20  # Maximum number of sessions that /sessions shows.
# Maximum characters of the turns that are shown when a conversation continues. The last turn is always shown.
SHOWN = 2000


def save(chat, rest: str) -> None:
    """Run /save."""
    path = path_of(rest)
    if path.suffix.lower() in sessions.MARKDOWN:
        return export(chat, rest)
    if os.path.lexists(path) and session.stamp(path) not in chat.files:
        raise session.SessionError(f"{path} exists already; choose another name")
    session.write(path, session.dumps(chat.conversation, chat.model.name))
    chat.files.add(session.stamp(path))
    saved = f"saved to {path}"
    hint = f"{saved}; /load {rest} continues it"
    chat.output.note(hint if len(hint) <= COLUMNS and rest not in sessions.names() else saved)


def load(chat, rest: str) -> None:
    """Run /load. A session continues in its file. The conversation of another file continues in a new session."""
    store, stamp = None, None
    if rest in sessions.names():
        store = session.Store(sessions.existing(rest))
        loaded = store.load()
    else:
        path = path_of(rest)
        if not os.path.lexists(path) and path.name == rest and not path.suffix:
            words = "there is no session and no file of this name; /sessions lists the sessions"
            raise session.SessionError(f"{rest}: {words}")
        if path.suffix.lower() in sessions.MARKDOWN and path.is_file():
            fix = "/sessions lists the saved conversations"
            raise session.SessionError(f"{path}: exported Markdown cannot be loaded; {fix}")
        stamp, loaded = session.stamp(path), session.read(path)
    if loaded.raw != chat.conversation.raw:
        raise session.SessionError(f"this conversation needs a chat {'with' if loaded.raw else 'without'} --raw")
    kept = chat.begin(loaded)
    if store and chat.store:
        chat.store = store
    if stamp:
        chat.files.add(stamp)
    show_last(chat)
    chat.output.note(chat.describe())
    note_model(chat, "/model")
    if kept != rest:
        note_previous(chat, kept)


def note_previous(chat, name: str) -> None:
    """Print how to continue the previous conversation, which is saved in session `name`, if it is not ""."""
    if name:
        chat.output.note(f"the previous one is saved; /load {name} continues it")


def note_model(chat, word: str) -> None:
    """Print a note if a conversation was saved with another model.

    Args:
        word: The command or option that selects this model.
    """
    name = chat.conversation.model
    if name is not None and chat.model.can_switch_to(name):
        chat.output.note(f"the session used the model {name}; {word} {shlex.quote(name)} continues with it")


def note_return(chat, named: bool) -> None:
    """Print how to continue the conversation in a later chat, if it is saved.

    Args:
        named: Name the session, even if it is the latest one.
    """
    if chat.store and chat.store.holds(chat.conversation):
        latest = not named and sessions.names()[:1] == [chat.store.name]
        options = "--resume" if latest else f"--session {shlex.quote(chat.store.name)}"
        options += " --raw" if chat.conversation.raw else ""
        chat.output.note(f"tridecode chat {options} continues this conversation")


def export(chat, rest: str) -> None:
    """Run /export."""
    path = path_of(rest)
    sessions.export(chat.conversation.markdown(chat.thinking.opened), path)
    chat.output.note(f"exported to {path}")


def title(chat, rest: str) -> None:
    """Run /title."""
    if rest:
        chat.change_conversation(title=None if rest == "-" else rest)
    words = sessions.title(chat.conversation)
    chat.output.note(f"the title is {words}" if words else "there is no title yet; the first words will be the title")


def list_sessions(chat, rest: str) -> None:
    """Run /sessions and its actions rename and delete."""
    action, *names = rest.split() or [""]
    own_session = chat.store.name if chat.store else None
    if not action:
        entries = sessions.saved()
        for line in sessions.lines(entries[:LISTED], chat.output.errors.width):
            chat.output.print_line(line)
        if len(entries) > LISTED:
            chat.output.note(f"and {counted(len(entries) - LISTED, 'older session')}; tridecode sessions lists all")
        chat.output.note(f"this is session {own_session}" if own_session else "this conversation is not saved")
    elif action == "rename" and len(names) in (1, 2):
        old, new = names if len(names) == 2 else (own_session, names[0])
        if old is None:
            raise session.SessionError(
                "this conversation has no saved session; to rename another one, use /sessions rename OLD NEW"
            )
        chat.store.rename(new) if old == own_session else sessions.rename(old, new)
        chat.output.note(f"session {old} is now called {new}")
    elif action == "delete" and names:
        if own_session in names:
            fix = "begin another with /clear before you delete it"
            raise session.SessionError(f"session {own_session} is in use; {fix}")
        sessions.delete(names)
        chat.output.note(f"deleted {counted(len(set(names)), 'session')}")
    else:
        raise session.SessionError("/sessions accepts no argument, rename [OLD] NEW, or delete NAME ...")


def history(chat, rest: str) -> None:
    """Run /history."""
    turns = len(chat.conversation.turns)
    if rest and not (rest.isdecimal() and len(rest) < 10 and int(rest)):
        raise session.SessionError(f"/history accepts a number of turns, not {rest[:50]!r}")
    if not turns:
        chat.output.note("the conversation has no turns yet")
    show(chat, max(turns - int(rest), 0) if rest else 0)


def show_last(chat) -> None:
    """Show the last turns of a continued conversation in an interactive chat."""
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
    """Show the turns from index `first` on as in the chat, without the thinking."""
    for number, (user, answer) in enumerate(chat.conversation.turns[first:]):
        if number:
            chat.output.text("\n")
        chat.output.user(as_typed(user))
        sink = open_sink(chat.output, chat.plain)
        try:
            sink.push(chat.answer_only(answer))
            sink.finish()
        except BaseException:
            sink.abort()
            raise


def unquote(text: str) -> str:
    """Remove a pair of quotation marks around `text`."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def path_of(text: str) -> Path:
    """Return the path that the user typed."""
    return Path(os.path.expanduser(unquote(text)))
