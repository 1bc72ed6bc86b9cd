"""A network between a client and a server of a test, which the test can cut."""

import re
import socket
import struct
import threading


class Wire:
    """A port that forwards connections to another port of this machine.

    Args:
        port: the other port.
        host: value of the header Host of the forwarded requests, as a proxy sets it; None keeps the header.

    Attributes:
        url: address of the port.
        silent: whether data is discarded, as by a network that fails without a sign.
    """

    def __init__(self, port: int, host: str | None = None):
        self._to, self._host, self._sockets, self.silent = port, host, [], False
        self._is_cut = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        self._start(self._accept)
        return self

    def __exit__(self, *error):
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset all connections, and new ones until `restore`."""
        self._is_cut.set()
        for each in self._sockets:
            try:  # SO_LINGER with the time 0 makes close() reset the connection.
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
        self._sockets.clear()

    def restore(self) -> None:
        self._is_cut.clear()

    @staticmethod
    def _start(work, *args) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut.is_set():
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [client, server]
            self._start(self._forward, client, server)
            self._start(self._forward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if self._host:
                    data = re.sub(rb"(?i)\r\nhost: [^\r]*", f"\r\nHost: {self._host}".encode(), data)
                if not self.silent:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass
