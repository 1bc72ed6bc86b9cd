"""The exchange between gateways that share a port: each one knows all loads and conversations.

A turn of a conversation may arrive at any gateway. Without this exchange, eight gateways of 64 replicas would reuse 11%
of the prompt tokens instead of 31% (benchmarks/fleet_sim.py). The gateways run on one machine, and send datagrams
through sockets in one folder.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from .policy import Policy, Report

SECONDS = 0.05  # Seconds between two messages.
LARGEST = 1 << 20  # Bytes of a message.


class Peers:
    """The other gateways.

    Args:
        policies: the policy of each model.
        folder: the folder of the sockets.
        name: name of this gateway, which no other one has.
    """

    def __init__(self, policies: Mapping[str, Policy], folder: Path, name: str = str(os.getpid())):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._policies, self._name, self._own = policies, name, folder / name
        self._own.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._own))
        self._decode = msgspec.msgpack.Decoder(tuple[str, dict[str, Report]]).decode

    async def run(self) -> None:
        """Send and receive until the task is cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self.receive)
        try:
            while True:
                await asyncio.sleep(SECONDS)
                self.send()
        finally:
            loop.remove_reader(self._socket)
            self._socket.close()
            self._own.unlink(missing_ok=True)

    def send(self) -> None:
        """Send a report to all others."""
        data = msgspec.msgpack.encode((self._name, {name: each.report() for name, each in self._policies.items()}))
        for path in self._own.parent.iterdir():
            if path != self._own:
                try:
                    self._socket.sendto(data, str(path))
                except (ConnectionRefusedError, FileNotFoundError):  # That process has ended.
                    path.unlink(missing_ok=True)
                except OSError:  # It does not read at present.
                    pass

    def receive(self) -> None:
        """Read all messages that have arrived."""
        with suppress(BlockingIOError):
            while data := self._socket.recv(LARGEST):
                peer, reports = self._decode(data)
                for name, each in reports.items():
                    if name in self._policies:
                        self._policies[name].receive(peer, each, time.monotonic())
