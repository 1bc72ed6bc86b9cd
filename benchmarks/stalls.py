"""Measure how long hostile requests delay the stream of another client: python -m benchmarks.stalls [CASE ...].

It starts a server with the bundled model on the CPU. For each case it prints the longest gap between two events of a
stream, and the growth of the server's memory. The case `none` sends nothing, and `busy` only computes.

The server has two cores. With four cores or more, the clients run on the others. Otherwise they share the server's
cores, and the process that sends has the lowest priority.
"""

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SECONDS = 6.0  # Duration of the measured stream.
Send = Callable[[bytes], None]


def endless_header(send: Send) -> None:
    """64 MB of one header."""
    send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
    for _ in range(64):
        send(b"a" * (1 << 20))


def endless_url(send: Send) -> None:
    """64 MB of one URL."""
    send(b"GET /")
    for _ in range(64):
        send(b"a" * (1 << 20))


def many_ids(send: Send) -> None:
    """A prompt of 10,000,000 ids whose size is announced."""
    body = b'{"model": "bundled", "prompt": [' + b"17," * 9_999_999 + b"17]}"
    send(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def many_ids_chunked(send: Send) -> None:
    """A prompt of 10,000,000 ids whose size is not announced."""
    send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
    part = b"17," * 10_000
    for _ in range(1000):
        send(b"%x\r\n%s\r\n" % (len(part), part))


def largest_body(send: Send) -> None:
    """Bodies with as many values as are accepted."""
    body = b'{"model": "bundled", "prompt": [' + b"17," * 65_000 + b"17]}"
    for _ in range(8):
        send(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def long_text(send: Send) -> None:
    """Texts as long as a body may be."""
    body = b'{"model": "bundled", "prompt": "' + b"word " * 800_000 + b'"}'
    for _ in range(8):
        send(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def tiny_chunks(send: Send) -> None:
    """A body of 3,000,000 chunks of one byte."""
    send(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(30):
        send(b"1\r\n \r\n" * 100_000)


def pipeline(send: Send) -> None:
    """300,000 requests in one connection."""
    for _ in range(300):
        send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)


def bomb(send: Send) -> None:
    """A body of 1 MB that decompresses to 1 GB."""
    body = gzip.compress(bytes(1 << 30), 1)
    send(f"{HEAD}Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def busy(send: Send) -> None:
    """Compute for three seconds and send nothing."""
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass


CASES: dict[str, tuple[Callable[[Send], None] | None, int]] = {  # name: (attack, number of connections)
    "none": (None, 0),
    "busy": (busy, 1),
    "endless_header": (endless_header, 4),
    "endless_url": (endless_url, 4),
    "half_sent_heads": (lambda send: send(b"GET /health HTTP/1.1\r\nHo"), 1100),
    "many_ids": (many_ids, 4),
    "many_ids_chunked": (many_ids_chunked, 4),
    "largest_body": (largest_body, 4),
    "long_text": (long_text, 4),
    "tiny_chunks": (tiny_chunks, 2),
    "pipeline": (pipeline, 2),
    "gzip_bomb": (bomb, 4),
}


def attack(port: int, case: str) -> None:
    """Send the requests of a case, and read no responses until all are sent."""
    os.nice(19)
    work, count = CASES[case]
    clients = []
    for _ in range(count if work else 0):
        client = socket.create_connection(("127.0.0.1", port), 10)
        client.settimeout(2)
        clients.append(client)
        with suppress(OSError):  # The server closes the connection, or stops reading.
            work(client.sendall)
    for client in clients:
        client.close()


def longest_gap(port: int, case: str) -> float:
    """Return the longest time in ms between two events of a stream while a case runs."""
    body = json.dumps({"model": "bundled", "prompt": "Once", "ignore_eos": True, "stream": True, "max_tokens": 2000})
    times = []
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        client.recv(1 << 16)
        attacker = threading.Thread(target=lambda: subprocess.run([sys.executable, __file__, str(port), case]))
        attacker.start()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and client.recv(1 << 16):
            times.append(time.monotonic())
        attacker.join()
    return 1000 * max(later - earlier for earlier, later in zip(times, times[1:]))


def memory(pid: int, name: str) -> int:
    """Return a field of the memory of a process, in MB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) >> 10


def main() -> None:
    """Run the cases and print a line for each."""
    argv = [sys.executable, "cli.py", "serve", "--device", "cpu", "--port", "0", "--slots", "4"]
    cores = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
        if len(cores) >= 4:
            os.sched_setaffinity(server.pid, cores[:2])
            os.sched_setaffinity(0, cores[2:])
        try:
            line = next(line for line in server.stderr if line.startswith("serving "))
            threading.Thread(target=server.stderr.read, daemon=True).start()
            port = int(re.search(r":(\d+)/v1", line)[1])
            for case in ["none", *(sys.argv[1:] or [name for name in CASES if name != "none"])]:
                before = memory(server.pid, "VmRSS")
                Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # Reset the peak.
                gap = longest_gap(port, case)
                grown = memory(server.pid, "VmHWM") - before
                print(f"{case:20} longest gap {gap:6.1f} ms, memory {grown:+4d} MB", flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdecimal():
        attack(int(sys.argv[1]), sys.argv[2])
    else:
        os.environ.setdefault("PYTHONPATH", ".")
        main()
