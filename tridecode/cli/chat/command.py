"""`tridecode chat`: a conversation in the terminal, or one turn a line from a pipe."""

import os
import sys
import time
from dataclasses import replace

from ...errors import TridecodeError
from ...options import OPTIONS
from ...sampling import SamplingParams
from ..api_key import api_key
from ..graph_stats import show_graph_stats
from ..inputs import stdin_lines, with_stdin
from ..loading import Loader, load_engine, tokenizer_of
from ..options import sampling_overrides
from ..terminal import Output
from . import lines, saving, session
from .completion import completed
from .conversation import Conversation
from .lines import Interrupted, join_blocks
from .local import LocalModel
from .model import Model
from .reader import open_reader
from .talk import COUNTING, DEVICE_LOST, IMPATIENCE, Chat

TURN = 0.0005  # seconds that the drawing thread may keep the token loop waiting; Python's own 5 ms are many steps


def chat(args, output: Output) -> int:
    interactive = output.tty and sys.stdin.isatty()
    if args.api_key_file is not None and args.url is None and "api_key_file" not in args.origins:
        args.refuse("--api-key-file needs --url")
    output.quiet, output.redraws = args.quiet, not args.plain
    conversation, store = open_session(args, output, interactive)
    model, params = (open_model if args.url is None else connect)(args, output)
    talk = Chat(
        model,
        params,
        output,
        conversation,
        interactive=interactive,
        store=store,
        overflow=args.overflow or ("drop-oldest" if interactive else "error"),  # `connect` may set it
        stats=args.stats or ("off" if args.quiet else "full"),
        system=args.system,
        plain=args.plain,
        think=args.think,
        overrides=sampling_overrides(args),
    )
    if store:
        store.model = model.name
    if store and store.saved:
        output.note(f"session {store.name}: {talk.describe()}")
        if not args.quiet:
            saving.show_last(talk)
    code = None
    try:
        if interactive:
            sys.setswitchinterval(TURN)
            model.use_idle_time()
            place = f" at {model.device}" if args.url else ""
            output.note(f"{model.name}{place}: {talk.capacity_words()}; /help lists the commands")
            output.quiet = False  # what is asked for from here on is shown
            code = converse(talk, open_reader(lambda typed: completed(typed, talk.offer()), output), args.question)
        else:
            output.quiet = False
            question = args.question is not None and [with_stdin(args.question, output)]
            for line in question or join_blocks(stdin_lines()):
                if not talk.handle(line):
                    break
    finally:
        model.close()
        talk.save()
        if args.graph_stats and isinstance(model, LocalModel) and model.loaded:
            show_graph_stats(model.engine, output)
    code = talk.exit_code if code is None else code
    if code == DEVICE_LOST:
        output.keys.release()
        # What is freed on such a GPU fails once more, in places that end the program by a signal.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def open_model(args, output: Output) -> tuple[LocalModel, SamplingParams]:
    """Load the model."""
    engine, params = load_engine(args, output)
    if not (args.raw or tokenizer_of(engine).has_template):
        engine.encode([{"role": "user", "content": "Hello"}])  # its PromptError, before the user types anything
    if engine.device.type == "cpu":
        output.note("running on the CPU")
    return LocalModel(engine, Loader(args, output)), params


def connect(args, output: Output) -> tuple[Model, SamplingParams]:
    """Return the model of a server that the options name. Raises TridecodeError.

    Engine options from the configuration file or the environment are meant for other chats and do not count here.
    """
    local = {*OPTIONS, "graph_stats"}
    for name, word in args.typed.items():
        if name in local:
            args.refuse(f"{word} is of an engine in this process; a server (--url) has its own")
    try:
        from .remote import RemoteModel
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise TridecodeError("chat --url needs the package httpx; install it: pip install 'tridecode[serve]'") from None
    overrides = sampling_overrides(args)
    params = SamplingParams(**overrides)  # a wrong value fails here
    name = None if "model" in args.origins else args.model
    model = RemoteModel(args.url, api_key(args.api_key_file, output), name, overrides)
    if not model.counts:
        if args.overflow not in (None, "error") and "overflow" not in args.origins:
            args.refuse(f"--overflow {args.overflow} {COUNTING}")
        args.overflow = "error"
    return model, params


def open_session(args, output: Output, interactive: bool) -> tuple[Conversation, session.Store | None]:
    """What --session and --resume ask for; in a terminal every conversation has a file. Before the model is loaded."""
    conversation, store = Conversation(args.raw, args.system), None
    if args.raw and args.system is not None:
        raise session.SessionError("--system needs a chat template; leave out --raw")
    if args.resume or args.session is not None:
        store = session.Store(session.named(args.session) if args.session is not None else session.last_path(), "")
        if args.resume or store.path.exists():
            conversation = store.load()
            if conversation.raw != args.raw:
                fix = "add --raw" if conversation.raw else "leave out --raw"
                raise session.SessionError(f"session {store.name} was a chat of the other kind; {fix}")
            if args.system is not None:
                conversation = replace(conversation, system=args.system)
    elif interactive:
        try:
            store = session.Store(session.new_path(), "")
        except session.SessionError as error:
            output.note(f"conversations are not saved: {error}")
    return conversation, store


def converse(talk: Chat, reader, first: str | None = None) -> int:
    """Read from the terminal until /exit, Ctrl-D, or Ctrl-C twice in a row. first: the first message."""
    if first is not None:
        talk.output.user(lines.PROMPT + first.replace("\n", "\n" + lines.CONTINUED))
        if not talk.handle(first):
            return talk.exit_code
    leaving, between = (
        False,
        first is not None,
    )  # between: whether something was said that a blank line parts from what comes
    while True:
        try:
            draft, talk.draft = talk.draft, None
            if between:
                talk.output.text("\n")
            between = False
            reader.redraws = talk.output.redraws = not talk.plain
            line = reader.read(draft or "")
            leaving, between = False, bool(line.strip())
            if not talk.handle(line, replaces=draft is not None):
                return talk.exit_code
        except EOFError:
            return 0
        except KeyboardInterrupt as error:
            pressed = error if isinstance(error, Interrupted) else Interrupted()
            if leaving and not pressed.typed:
                return 0
            leaving = False
            if pressed.draft:
                talk.output.note("the draft is put aside; Up brings it back")
            elif time.monotonic() - talk.stopped_at > IMPATIENCE:
                leaving = True
                talk.output.note("Ctrl-C again, or Ctrl-D, leaves")
