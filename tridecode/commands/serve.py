"""serve: the HTTP server, from its options to its end."""

import logging
import os
import sys
from pathlib import Path

from ..errors import TridecodeError
from .loading import load_model
from .terminal import Output

KEY_VARIABLE = "TRIDECODE_API_KEY"


def serve(args, output: Output) -> int:
    try:
        from ..server.run import Tls, bind
        from ..server.run import serve as run
        from ..server.settings import Settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tridecode"):
            raise
        missing = f"serve needs the package {error.name}"
        raise TridecodeError(f"{missing}; install it: pip install 'tridecode[serve]'") from None
    if args.ssl_keyfile and not args.ssl_certfile:
        args.refuse("--ssl-keyfile needs --ssl-certfile")
    tls = None
    if args.ssl_certfile:
        tls = Tls(args.ssl_certfile, args.ssl_keyfile)
        tls.check()
    settings = Settings(
        model=args.served_model_name or public_name(args.model),
        any_model=args.any_model,
        max_queue=args.max_queue,
        timeout=args.timeout or None,
        grace=args.grace,
        api_key=api_key(args.api_key_file),
        cors=tuple(args.cors or ()),
        log_prompts=args.log_prompts,
    )
    bound = bind(args.host, args.port)
    engine = load_model(args, args.model, args.max_seq_len, output)
    if engine.tokenizer is None:
        raise TridecodeError("this checkpoint has no tokenizer")
    log_requests()
    sys.setswitchinterval(SWITCH)
    host, port = bound.getsockname()[:2]
    place = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/v1"
    room = f"{engine.slots:,} at a time, context {engine.capacity:,}"
    output.note(f"serving {settings.model} at {place}: {room}; Ctrl-C stops")
    code = run(engine, settings, bound, tls)
    if code == 0:  # a lost GPU has nothing to give back
        engine.close()
    return code


SWITCH = 5e-4  # seconds for which a thread may keep others from running: the device's must not wait for the network's


def public_name(model: str | None) -> str:
    """The name that clients give: a Hugging Face id, or the last part of a directory's path, never the path."""
    if model is None:
        return "bundled"
    return Path(model).resolve().name if Path(model).is_dir() else model


def api_key(file: str | None) -> str | None:
    """The key from a file, or from the environment; its first line."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    key = Path(file).read_text(encoding="utf-8").strip()
    if not key or "\n" in key:
        raise TridecodeError(f"{file}: expected one line with the API key")
    return key


def log_requests() -> None:
    """A line for each request on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name in ("tridecode.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "tridecode.server" else logging.ERROR)
