"""A server for tests in a thread of the test's process, and clients."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import uvicorn

from tridecode import Engine
from tridecode.server.app import Server
from tridecode.server.listen import bind, config
from tridecode.server.settings import Settings

CHAT = [{"role": "user", "content": "What is 17 + 25?"}]
ANSWER = "17 + 25 = 42."
GREEDY = {"model": "bundled", "messages": CHAT, "temperature": 0}
# The answer runs to the end of the context.
LONG = {"model": "bundled", "prompt": "Once upon a time", "ignore_eos": True}

# A self-signed certificate for 127.0.0.1, which is valid for a hundred years. It protects no data.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUOf1z+weH7gKoinzKUzHM4eGqe9owCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjAxMzkyMFoYDzIxMjYxMDI5
MDEzOTIwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATjRixSvDDnnpK5EGHFNvnwlLUWn31YserdXeXYalqL/V66HYuWOzxN
u7Edu3l+4dR5hQrXcBPFOjtgBwJZKM3Zo28wbTAdBgNVHQ4EFgQUHvvFB1hxSPpD
0xOYV3nHwZSfgjYwHwYDVR0jBBgwFoAUHvvFB1hxSPpD0xOYV3nHwZSfgjYwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARhwR/AAABgglsb2NhbGhvc3QwCgYIKoZI
zj0EAwIDSQAwRgIhALpdVq0iy+fpYHm1EM+XLHZi7pYGowobhoMNxJgZj2WWAiEA
hZWErwkRDUG1O4Iy7zV2PwTju4rpEaEanzH/dCau0zw=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgQg4rmVnqzEpBM0Dy
ES3Kj1R1CNd0NPWSBGOaeuAwIK6hRANCAATjRixSvDDnnpK5EGHFNvnwlLUWn31Y
serdXeXYalqL/V66HYuWOzxNu7Edu3l+4dR5hQrXcBPFOjtgBwJZKM3Z
-----END PRIVATE KEY-----
"""
OTHER_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg7FNkm/lKD8vmbY40
vepoYSQXsHcJ1QrYyq3XY9UuwfyhRANCAARGIJlLf2VoUGe4QRjMX6fPzl7+cGIK
50zTm+1z/v9LLC5mH+b+tgRo5u5F/F4xm7vTDmHQ/HKMe1tbbAd82iXZ
-----END PRIVATE KEY-----
"""
ED25519_KEY = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEILqPKnWh4Rj0SKZ4vdrGQ+zrzDhqyaOpc3Uwb/H7vQDc
-----END PRIVATE KEY-----
"""
# KEY, encrypted with a passphrase.
ENCRYPTED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAjyXwANMKeL5gICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEOxFbWgPzps7E8+qRwbv+v0EgZAZ
061sogqKCsR8jhhcr/FxU+kaoMef7q20GYZaRV4zzHYdjKPZGAkwpSRbi1gEnt8/
iDxj0iX/eQCNaefalhHumCM4xgdIJttdogU04GSKf4Zvi7ZbpG4icJPAfv3dD5uu
sDijSrbdkEPihrHPVbSg81ZNQe+hpjGbHRwatXNH0yzaKEMPbygzbpNq2/VbCGg=
-----END ENCRYPTED PRIVATE KEY-----
"""


class Running:
    """A server on a port of this machine.

    Args:
        port: the port; 0 selects a free one.
        settings: fields of Settings; the model's name is "bundled" by default.
    """

    def __init__(self, engine: Engine, port: int = 0, **settings):
        self.engine = engine
        self.server = Server(engine, Settings(**{"model": "bundled"} | settings))
        self._bound = bind("127.0.0.1", port, settings.get("timeout"))
        self.port = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._uvicorn = uvicorn.Server(config(self.server.app, self.server.settings))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def _run(self) -> None:
        async def main():
            await self.server.start()
            self._ready.set()
            await self._uvicorn.serve(sockets=[self._bound])
            self.server.loop.stop()

        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(main())

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(20)
        while not self._uvicorn.started:
            assert self._thread.is_alive()
            self._ready.wait(0.01)
        return self

    def __exit__(self, *error):
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def connections(self) -> list:
        """Return the open connections."""
        return list(self._uvicorn.server_state.connections)

    def client(self, **options) -> openai.OpenAI:
        """Return OpenAI's client for this server."""
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options)

    def post(self, path: str, body, **options) -> httpx.Response:
        """Send a POST request with bytes, or with a value as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return httpx.post(f"{self.url}{path}", content=content, headers=headers, timeout=60, **options)

    def get(self, path: str, **options) -> httpx.Response:
        """Send a GET request."""
        return httpx.get(f"{self.url}{path}", timeout=60, **options)

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over its labels, or over the samples with a label like 'outcome="stop"'."""
        lines = self.get("/metrics").text.splitlines()
        lines = [line for line in lines if line.startswith(f"tridecode:{name}" + "{") and label in line]
        assert lines, name
        return sum(float(line.split()[-1]) for line in lines)

    @contextmanager
    def stream(self, body: dict, path: str = "/v1/completions", **options):
        """Send a request for a stream and yield its response."""
        timeout = httpx.Timeout(60)
        with httpx.stream("POST", f"{self.url}{path}", json=body | {"stream": True}, timeout=timeout, **options) as got:
            yield got


def until(true, seconds: float = 20) -> None:
    """Wait until `true()` returns a true value."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def slow_passes(engine: Engine, monkeypatch, seconds: float = 0.01) -> None:
    """Delay each pass, so that requests to the end of the context run long enough for a test."""
    replay = engine.steps.replay
    monkeypatch.setattr(engine.steps, "replay", lambda *args: (time.sleep(seconds), replay(*args)))


def events(lines) -> list:
    """Return the data of a stream's events, including [DONE] and comments."""
    data = []
    for line in lines:
        if line.startswith("data: "):
            data.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
        elif line:
            data.append(line)
    return data
