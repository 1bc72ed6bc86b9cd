"""A small server with OpenAI's API and known delays, for tests of clients."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field


@dataclass
class FakeServer:
    """A server whose answers have known lengths and delays.

    Args:
        first: seconds before the first word.
        gap: seconds between words.
        tokens: words of an answer; None uses max_tokens of the request.
        behave: number of a request (from 0, including warm-up) -> "ok" or a failure; see `respond`.
    """

    first: float = 0.0
    gap: float = 0.0
    tokens: int | None = None
    owner: str | None = None  # Field owned_by of its models.
    behave: object = lambda number: "ok"
    got: list = field(default_factory=list)  # (time, path, headers, body) of each POST request
    running: int = 0
    max_running: int = 0  # Largest value that `running` had.

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *raised):
        async def close():
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def bodies(self):
        return [body for _, _, _, body in self.got]

    async def _connected(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, path, _ = first.split()
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    names = ("a-model", "another")
                    models = {"object": "list", "data": [{"id": name, "owned_by": self.owner} for name in names]}
                    respond_json(writer, 200, models if path == "/v1/models" else {})
                    continue
                self.got.append((time.perf_counter(), path, headers, json.loads(body)))
                self.running += 1
                self.max_running = max(self.max_running, self.running)
                try:
                    if not await self.respond(writer, len(self.got) - 1, path, json.loads(body)):
                        break
                finally:
                    self.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def respond(self, writer, number, path, body) -> bool:
        """Answer a request and return whether the connection stays open."""
        how = self.behave(number)
        if how == "500":
            respond_json(writer, 500, {"error": {"message": "out of luck", "type": "server_error", "code": None}})
            return True
        if how == "template":
            respond_json(writer, 400, {"error": {"message": "the chat template does not read enable_thinking"}})
            return True
        if how == "503":
            respond_json(writer, 503, {"error": {"message": "256 requests wait already"}}, b"retry-after: 2\r\n")
            return True
        if how == "401":
            respond_json(writer, 401, {"error": "no key"})
            return True
        if how == "text":
            respond_json(writer, 502, b"<html>Bad gateway</html>")
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        chat = path.endswith("/chat/completions")
        tokens = self.tokens or body["max_tokens"]
        if chat:
            event(writer, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        chunk(writer, b": keep-alive\n\n")
        await asyncio.sleep(self.first)
        start = time.perf_counter()
        for i in range(tokens):
            await asyncio.sleep(start + i * self.gap - time.perf_counter())
            if writer.is_closing():  # The client has disconnected.
                return False
            if i == tokens // 2 and how == "cut":
                return False
            if i == tokens // 2 and how == "garbage":
                chunk(writer, b'data: {"choices": [}\n\n')
            if i == tokens // 2 and how == "error":
                event(writer, error={"message": "the engine died", "type": "server_error"})
            if i == tokens // 2 and how == "stuck":
                await asyncio.sleep(60)
            event(writer, choices=[{"index": 0} | ({"delta": {"content": " word"}} if chat else {"text": " word"})])
        event(writer, choices=[{"index": 0, "finish_reason": "length"} | ({"delta": {}} if chat else {"text": ""})])
        prompt = body.get("prompt", body.get("messages"))
        prompt_tokens = len(prompt) if isinstance(prompt, list) and not chat else 7
        if how != "no usage":
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
            event(writer, choices=[], usage=dict.fromkeys(usage, 0) if how == "zero usage" else usage)
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True


def event(writer, **fields):
    data = json.dumps({"id": "cmpl-1", "object": "chunk", "created": 1, "model": "a-model"} | fields)
    half = len(data) // 2  # The server sends an event in two parts, which clients must accept.
    chunk(writer, f"data: {data[:half]}".encode())
    chunk(writer, f"{data[half:]}\n\n".encode())


def chunk(writer, data: bytes):
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def respond_json(writer, status, body, headers=b""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(data), data))
