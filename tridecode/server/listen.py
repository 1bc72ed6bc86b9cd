"""The process of a server or gateway: sockets, files, threads and uvicorn."""

import asyncio
import errno
import gc
import re
import resource
import socket
import sys
from functools import partial
from typing import Any, cast

import uvicorn

from ..errors import TridecodeError
from .connection import Connection, Connections
from .settings import Settings
from .tls import Tls

# Bytes of a response that the kernel buffers. If the buffer is full, tokens wait and are sent together.
SEND_BUFFER = 1 << 16
STALL_TIMEOUT = 600  # Seconds that the send buffer may stay full if requests have no deadline.
OTHER_FILES = 256  # File descriptors that are not connections of clients.
STARTED_SECONDS = 0.01  # Seconds between two looks at whether a server listens.
SWITCH_INTERVAL = 1e-4  # Interval in seconds at which Python switches threads.


def bind(host: str, port: int, timeout: float | None = None, shared: bool = False) -> socket.socket:
    """Bind a socket that does not listen yet.

    Args:
        timeout: seconds, as in Settings. The kernel closes a connection whose client does not read for this time.
        shared: whether other processes may listen on the same port; the kernel distributes the connections.

    Raises:
        TridecodeError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit these options.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (timeout or STALL_TIMEOUT)))
        bound.bind(address)
        return bound
    except OSError as error:
        fix = "; choose another port with --port N" if error.errno == errno.EADDRINUSE else ""
        if both := re.fullmatch(r"([^:]+|\[.*\]):(\d+)", host):
            fix = f"; use --host {both[1].strip('[]')} --port {both[2]}"
        raise TridecodeError(f"cannot listen on {host}, port {port}: {error.strerror}{fix}") from None


def config(app, settings: Settings, tls: Tls | None = None) -> uvicorn.Config:
    """Return the configuration of uvicorn for an ASGI application."""
    protocol = partial(Connection, limits=Connections(settings.max_connections))
    return uvicorn.Config(
        app,
        http=cast(Any, protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.timeout_keep_alive,
        timeout_graceful_shutdown=int(settings.grace) + 2,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )


def allow_files(connections: int) -> None:
    """Raise the limit of open files of this process for a number of connections.

    Raises:
        TridecodeError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        fix = f"use --max-connections {max(hard - OTHER_FILES, 1)}, or raise the limit with ulimit -n"
        raise TridecodeError(f"{connections} connections need {needed} open files, the system allows {hard}: {fix}")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def prepare_threads() -> None:
    """Let Python's threads switch more often, and garbage collections, which stop all threads, skip loaded objects."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()


async def started(server: uvicorn.Server, bound: socket.socket) -> asyncio.Task[None]:
    """Start a server in this event loop, and return its task when clients can connect. Raises the server's error."""
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not serving.done():
        await asyncio.sleep(STARTED_SECONDS)
    if serving.done():
        serving.result()
    return serving
