"""`tridecode sessions`: list, rename, delete and export saved conversations."""

from pathlib import Path

from .chat import session, sessions
from .terminal import Output, counted


def run(args, output: Output) -> int:
    """Run `tridecode sessions`: list, show, rename, delete or export conversations. Return the exit code."""
    if args.action == "rename":
        sessions.rename(args.name, args.new)
        output.note(f"session {args.name} is now called {args.new}")
    elif args.action == "show":
        path = session.last_path() if args.name is None else sessions.existing(args.name)
        output.text(sessions.markdown(session.read(path)))
    elif args.action in ("delete", "rm"):
        sessions.delete(args.names)
        output.note(f"deleted {counted(len(set(args.names)), 'session')}")
    elif args.action == "export":
        text = sessions.markdown(session.read(sessions.existing(args.name)))
        if args.file is None:
            output.text(text)
        else:
            sessions.export(text, Path(args.file))
            output.note(f"exported to {args.file}")
    else:
        show(args, output)
    return 0


def show(args, output: Output) -> None:
    """Print the saved conversations as names, JSON lines or a table."""
    if args.names:
        shown = sessions.names()
    elif args.json:
        shown = [one.json() for one in sessions.saved()]
    else:
        shown = sessions.lines(sessions.saved(), output.console.width if output.tty else None)
    output.text("".join(f"{line}\n" for line in shown))
    if shown and not (args.names or args.json):
        output.note("tridecode chat --resume continues the latest, --session NAME another one")
    if not shown:
        output.note(f"there is no session yet in {session.sessions_dir()}; chats in a terminal are saved there")
