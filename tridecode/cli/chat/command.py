"""`tridecode chat`: a conversation in the terminal, or one turn per line of a pipe."""

import os
import sys
import time
from dataclasses import replace

from ...errors import TridecodeError
from ...options import OPTIONS
from ..api_key import api_key
from ..graph_stats import show_graph_stats
from ..inputs import stdin_lines, with_stdin
from ..loading import Loader, first_adapter, load_engine, tokenizer_of
from ..options import sampling_overrides
from ..terminal import Output
from . import saving, session, settings
from .completion import completed
from .conversation import Conversation
from .lines import PROMPT, Interrupted, PlainReader, as_typed, join_blocks, shows_editor
from .local import LocalModel
from .model import Model
from .settings import COUNTING
from .talk import DEVICE_LOST, Chat

INTERRUPT_GRACE = 1.0  # Seconds after a stopped answer in which another Ctrl-C does not end the chat.
# Interval in seconds at which Python switches threads. Python's 5 ms would delay the token loop while text is drawn.
SWITCH_INTERVAL = 0.0005


def chat(args, output: Output) -> int:
    """Run the command and return its exit code."""
    interactive = output.tty and sys.stdin.isatty()
    if args.api_key_file is not None and args.url is None and "api_key_file" not in args.origins:
        args.refuse("--api-key-file needs --url")
    output.quiet, output.redraws = args.quiet, not args.plain
    conversation, store = open_session(args, output, interactive)
    question = args.question
    if question is not None and not interactive:
        question = with_stdin(question, output)
    model = open_model(args, output, interactive) if args.url is None else connect(args, output)
    overflow = args.overflow or ("drop-oldest" if interactive else "error")
    talk = Chat(
        model,
        output,
        conversation,
        interactive=interactive,
        store=store,
        overflow=overflow if model.counts else "error",
        stats=args.stats or ("off" if args.quiet else "full"),
        plain=args.plain,
        think=args.think,
        overrides=sampling_overrides(args),
        configured={name: value for name, value in sampling_overrides(args).items() if name in args.origins},
    )
    if store and store.saved:
        settings.restore(talk, args.typed)
        output.note(f"session {store.name}: {talk.describe()}")
        if not args.quiet:
            saving.show_last(talk)
        if args.model is None:
            saving.note_model(talk, "--model")
    try:
        if interactive:
            sys.setswitchinterval(SWITCH_INTERVAL)
            place = f" at {model.device}" if args.url else ""
            output.note(f"{model.name}{place}: {talk.describe_capacity()}; /help lists the commands")
        output.quiet = False  # The output of commands is shown even with --quiet.
        if interactive:
            output.error_prefix = ""
            converse(talk, open_reader(talk), question)
        else:
            lines = stdin_lines(output, PROMPT if output.wraps and sys.stdin.isatty() else "")
            for line in join_blocks(lines) if question is None else [question]:
                if not talk.handle(line):
                    break
    finally:
        model.close()
        talk.save()
        if args.graph_stats and isinstance(model, LocalModel) and model.loaded:
            show_graph_stats(model.engine, output)
    if interactive and not args.quiet:
        saving.note_return(talk, named=args.session is not None)
    if talk.exit_code == DEVICE_LOST:
        output.keys.release()
        # Skip destructors. After the loss of a GPU, freeing memory fails again and may end the process by a signal.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(DEVICE_LOST)
    return talk.exit_code


def open_model(args, output: Output, interactive: bool) -> Model:
    """Load the model and return it."""
    engine, _ = load_engine(args, output)
    if not (args.raw or tokenizer_of(engine).has_template):
        # If a template is missing, this call raises PromptError before the user types anything.
        engine.encode([{"role": "user", "content": "Hello"}])
    if engine.device.type == "cpu":
        output.note("running on the CPU")
    if engine.adapters:
        output.note(f"adapter {first_adapter(engine)}; /adapter selects another one, or none")
    return LocalModel(engine, Loader(args, output), captures=interactive)


def connect(args, output: Output) -> Model:
    """Return the model of the server that the options select.

    Engine options from the configuration file or the environment apply to other chats and are ignored here.

    Raises:
        TridecodeError: An option is not supported, or the server cannot be used.
    """
    local = {*OPTIONS, "graph_stats"}
    for name, word in args.typed.items():
        if name in local:
            args.refuse(f"{word} sets up an engine in this process; a server (--url) ignores it; leave it out")
    try:
        from .remote import RemoteModel
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise TridecodeError(
            f"{args.command} --url needs the package httpx; install it: pip install 'tridecode[serve]'"
        ) from None
    name = None if "model" in args.origins else args.model
    model = RemoteModel(args.url, api_key(args.api_key_file, output), name, sampling_overrides(args))
    if getattr(args, "overflow", None) not in (None, "error") and "overflow" not in args.origins and not model.counts:
        args.refuse(f"--overflow {args.overflow} {COUNTING}")
    return model


def open_session(args, output: Output, interactive: bool) -> tuple[Conversation, session.Store | None]:
    """Open the conversation that --session or --resume selects, and its file. This runs before the model is loaded.

    In a terminal a new conversation gets a file too. The store is None if the conversation is not saved.
    """
    conversation, store = Conversation(args.raw, args.system), None
    if args.raw and args.system is not None:
        raise session.SessionError("--system needs a chat template; leave out --raw")
    if args.resume or args.session is not None:
        store = session.Store(session.named(args.session) if args.session is not None else session.last_path())
        if args.resume or store.path.exists():
            conversation = store.load()
            if conversation.raw != args.raw:
                fix = "add --raw" if conversation.raw else "leave out --raw"
                kind = "with" if conversation.raw else "without"
                raise session.SessionError(f"session {store.name} was saved {kind} --raw; {fix}")
            if args.system is not None:
                conversation = replace(conversation, system=args.system)
        else:
            file = f"; /load ./{args.session} continues the file of this name" if os.path.isfile(args.session) else ""
            output.note(f"new session {args.session}{file}")
    elif interactive:
        try:
            store = session.Store(session.new_path())
        except session.SessionError as error:
            output.note(f"conversations are not saved: {error}")
    return conversation, store


def open_reader(talk: Chat):
    """Return a line editor if the terminal can show one, otherwise a plain reader."""
    if not shows_editor():
        return PlainReader(talk.output.keys)
    from .keyboard import Keyboard  # A chat in a pipe does not need prompt_toolkit.

    return Keyboard(lambda typed: completed(typed, talk), talk.output)


def converse(talk: Chat, reader, first: str | None = None) -> None:
    """Run the chat until /exit, Ctrl-D, or two Ctrl-C in a row.

    Args:
        first: The first message, if it was on the command line.
    """
    if first is not None:
        talk.output.user(as_typed(first))
        if not talk.handle(first):
            return
    leaving = False
    separate = first is not None  # Whether to print a blank line before the prompt.
    while True:
        try:
            (draft, replaces), talk.draft = talk.draft or ("", False), None
            if separate:
                talk.output.text("\n")
            separate = False
            talk.output.redraws = not talk.plain
            line = reader.read(draft)
            leaving, separate = False, bool(line.strip())
            if not talk.handle(line, replaces):
                return
        except EOFError:
            return
        except KeyboardInterrupt as error:
            pressed = error if isinstance(error, Interrupted) else Interrupted()
            if leaving and not pressed.typed:
                return
            leaving = False
            if pressed.draft:
                talk.output.note("the draft is stored; Up restores it")
            elif time.monotonic() - talk.stopped_at > INTERRUPT_GRACE:
                leaving = True
                talk.output.note("press Ctrl-C again, or Ctrl-D, to leave")
