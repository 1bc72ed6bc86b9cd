"""`tridecode serve`: the HTTP server."""

import gc
from ipaddress import ip_address
from pathlib import Path

from ..checkpoint.names import model_name
from ..engine import Engine
from ..errors import TridecodeError
from .api_key import VARIABLE, api_key
from .loading import load_model
from .terminal import Output, counted


def serve(args, output: Output) -> int:
    """Run `tridecode serve` until it is stopped. Return the exit code."""
    try:
        from ..server.access import log_requests
        from ..server.listen import allow_files, bind, prepare_threads
        from ..server.run import serve as run
        from ..server.settings import Settings
        from ..server.tls import Tls
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
    names = {name for name, _ in args.adapters or ()}
    if args.adapter_root and not names and args.adapter_memory is None:
        args.refuse("--adapter-root needs --adapter-memory GIB, the memory for adapters on the device")
    if args.adapter_root and not Path(args.adapter_root).is_dir():
        args.refuse(f"--adapter-root: there is no directory {args.adapter_root}")
    key = api_key(args.api_key_file, output)
    if args.adapter_root and not key:
        args.refuse(f"--adapter-root needs an API key; set {VARIABLE} or --api-key-file")
    settings = Settings(
        model=args.served_model_name or public_name(args.model),
        any_model=args.any_model,
        max_queue=args.max_queue,
        timeout=args.timeout or None,
        grace=args.grace,
        api_keys=(key,) if key else (),
        cors=tuple(args.cors or ()),
        log_prompts=args.log_prompts,
        allow_hosts=(*(args.allow_host or ()), args.host),
        max_connections=args.max_connections,
        timeout_keep_alive=args.timeout_keep_alive,
        adapter_root=args.adapter_root,
    )
    if settings.model in names:
        args.refuse(f"--adapter {settings.model}: this is the name of the base model; choose another one")
    allow_files(settings.max_connections)
    bound = bind(args.host, args.port, settings.timeout)
    engine = load_model(args, args.model, args.max_seq_len, output)
    log_requests()
    prepare_threads()

    def ready() -> None:
        announce(output, engine, settings, bound.getsockname(), "https" if tls else "http")

    code = run(engine, settings, bound, tls, ready)
    gc.unfreeze()  # Otherwise extension modules report leaked objects at exit.
    if code == 0:  # The memory of a lost GPU cannot be freed.
        engine.close()
    return code


def announce(output: Output, engine: Engine, settings, address: tuple, scheme: str) -> None:
    """Print the address of the server, its limits, and a warning if anyone in the network may use it."""
    host, port = address[:2]
    place = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    output.note(f"serving {settings.model} at {place}/v1")
    if engine.adapters:
        output.note(f"with adapters as models: {', '.join(engine.adapters)}")
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host)  # A browser cannot open an address that means all.
    output.note(f"open {f'{scheme}://{local}:{port}' if local else place} in a browser to chat")
    if not settings.api_keys and not ip_address(host).is_loopback:
        output.note(f"this server accepts requests without an API key; set {VARIABLE} to require one")
    output.note(f"{counted(engine.slots, 'request')} at a time, a context of {engine.capacity:,}; Ctrl-C stops")


def public_name(model: str | None) -> str:
    """Return the model's name for clients: a Hugging Face id, or the last part of a directory's path."""
    return Path(model).resolve().name if model and Path(model).is_dir() else model_name(model)
