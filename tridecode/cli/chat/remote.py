"""A model behind OpenAI's HTTP API, as a chat needs it. HTTP is httpx's."""

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import httpx

from ...errors import ParameterError, PromptError, TooLong, TridecodeError, brief
from ...results import OutputChunk, Timings, Usage
from ...sampling import SamplingParams
from ...text.thinking import CLOSE, OPEN, SWITCH, strip_thinking
from ..bench.client import message_of
from ..terminal import did_you_mean, joined
from .model import Model, Prompt, Thinking

TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # seconds without a byte
LONGEST = 1 << 24  # bytes of an event
OPENAI = {name: name for name in (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "stop",
)}  # fmt: skip
COMMON = OPENAI | {name: name for name in ("top_k", "min_p", "ignore_eos")}
OURS = COMMON | {name: name for name in ("repetition_penalty", "stop_token_ids")}
# By owned_by in /v1/models: our names of the sampling options that such a server takes, and its own.
OPTIONS = {
    "tridecode": OURS,
    "vllm": OURS,
    "sglang": OURS,
    "llamacpp": COMMON | {"repetition_penalty": "repeat_penalty"},
}
COUNTING = ("tridecode", "vllm")  # their /tokenize takes messages
TEXTS = ("content", "text")  # of a choice: where its text may stand
THOUGHTS = ("reasoning_content", "reasoning")


class ServerError(TridecodeError):
    """The server cannot be reached, refuses, or its answer was cut off."""


class RemoteModel(Model):
    """A model of one server; `device` is the server's address. Nothing is kept there between two answers.

    Options that are not set have the values of the server.
    """

    unit, defaults = "piece", "as the server has it"  # a server may put several tokens into one piece
    continues = seeds = False
    device: str
    options: dict[str, str]  # our names and the server's

    def __init__(self, url: str, key: str | None, name: str | None = None, overrides: Collection[str] = ()):
        """name: as the server calls the model, None for its first one. overrides: the names of sampling options that it
        has to take. Raises ServerError and ParameterError."""
        self.device = str(httpx.URL(url).copy_with(userinfo=b"")).rstrip("/")  # as it is shown
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        # Servers close what is idle for some seconds (uvicorn: 5): no request should meet that.
        limits = httpx.Limits(keepalive_expiry=3.0)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits)
        self.switch(name, overrides)

    def switch(self, name: str | None, overrides: Collection[str], raw: bool = False) -> None:
        """Go on with another of the server's models. Raises ServerError and ParameterError, and nothing has changed."""
        with failing(self.device):
            response = self._http.get("/v1/models")
            check(response)
        try:
            cards = {card["id"]: card for card in response.json()["data"] if isinstance(card["id"], str)}
        except (ValueError, LookupError, TypeError, RecursionError):
            cards = {}
        if not cards:
            raise ServerError(f"{self.device}/v1/models names no model; is this a server with OpenAI's API?")
        if name is not None and name not in cards:
            names = ", ".join([brief(known, 80) for known in cards][:8])
            fix = did_you_mean(name, cards) or f"it has {names}"
            raise ParameterError(f"the server at {self.device} has no model {brief(name, 80)!r}; {fix}")
        name = next(iter(cards)) if name is None else name
        card = cards[name]
        owner, meta = card.get("owned_by"), card.get("meta")
        owner = brief(owner, 40) if isinstance(owner, str) else "no known kind"
        for option in overrides:
            check_option(option, owner)
        self.name, self.owner, self.options = name, owner, OPTIONS.get(owner, OPENAI)
        self.models = [known for known in cards if known.isprintable()]
        told = card.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        self.capacity = told if type(told) is int and told > 0 else None
        self.counts = owner in COUNTING and self.capacity is not None

    def check(self, option: str) -> None:
        check_option(option, self.owner)

    def thinking(self, mode: str, raw: bool) -> Thinking:
        """Return how the server handles thinking. `on` leaves it to the server, which does not report whether its model
        thinks."""
        if raw:
            return Thinking(refusal="with --raw there is no chat template")
        if self.owner not in OPTIONS:  # these servers pass variables to the template
            return Thinking(True, refusal=f"no chat template can be told through a server of {self.owner}")
        variables = {SWITCH: False} if mode == "off" else None
        return Thinking(True, variables=variables, advice="/think on leaves thinking to the server")

    def facts(self, last: OutputChunk | None) -> list[str]:
        return [f"model {self.name} at {self.device}, a server of {self.owner}"]

    def close(self) -> None:
        self._http.close()

    def count(self, prompt: Prompt, thinking: Thinking, prefix: str = "") -> int:
        """Tokens of a prompt. Raises ServerError, and TooLong where the server does not count so many."""
        with failing(self.device):
            response = self._post("/tokenize", self._body(prompt_field(prompt), {}, thinking.variables))
            try:
                check(response)
                return int(response.json()["count"])
            except TooLong:  # a ValueError as well
                raise
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"{self.device}/tokenize counts no tokens") from None

    def stream(
        self, prompt: Prompt, params: SamplingParams, overrides: Collection[str], thinking: Thinking, prefix: str = ""
    ) -> Iterator[OutputChunk]:
        """Yield an OutputChunk without token ids for each event with text, then a last one; see Engine.stream.

        Thinking that the server sends apart from the answer is put between tags, as models write it. Closing the
        iterator closes the stream, which cancels the request. Raises ServerError, and TooLong.

        Args:
            overrides: Names of the options that are sent; for the others the server uses its defaults.
        """
        options = {name: getattr(params, name) for name in overrides}
        path = "/v1/completions" if isinstance(prompt, str) else "/v1/chat/completions"
        body = prompt_field(prompt) | {"stream": True, "stream_options": {"include_usage": True}}
        with failing(self.device):
            answer = Answer()
            request = self._http.build_request("POST", path, **encoded(self._body(body, options, thinking.variables)))
            response = self._http.send(request, stream=True)
            try:
                if response.status_code != 200:
                    response.read()
                check(response)
                for data in events(response.iter_bytes()):
                    if text := answer.event(data):
                        yield OutputChunk(None, text)
            finally:
                response.close()
            yield answer.end()

    def _post(self, path: str, body: dict) -> httpx.Response:
        return self._http.post(path, **encoded(body))

    def _body(self, asked: dict, options: dict, variables: dict | None) -> dict:
        body = {"model": self.name} | asked
        for name, value in options.items():
            if value not in (None, (), {}):
                body[self.options[name]] = value
        return body | ({"chat_template_kwargs": variables} if variables else {})


def check_option(name: str, owner: str) -> None:
    """Raise ParameterError for a sampling option that a server might ignore."""
    if name not in OPTIONS.get(owner, OPENAI):
        raise ParameterError(f"{name}: not known to a server of {owner}, which might ignore it; leave it out")


class Answer:
    """An answer as its events come, with their times."""

    def __init__(self):
        self._started = time.perf_counter()
        self._first = self._last = self._usage = self._reason = None
        self._thinking = False

    def event(self, data: bytes) -> str:
        """The text that an event brings. Raises ServerError."""
        try:
            found = json.loads(data)
            if found.get("error") or found.get("object") == "error":
                raise ServerError(f"the server ended the answer: {message_of(found)}")
            if usage := found.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                reused = details.get("cached_tokens")
                self._usage = Usage(usage["prompt_tokens"], reused, usage["completion_tokens"])  # type: ignore[arg-type]  # None if absent
                if {type(n) for n in vars(self._usage).values()} - {int, type(None)}:
                    raise TypeError
            text = "".join(map(self._text, found.get("choices") or ()))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            shown = brief(data.decode(errors="replace"), 80)
            raise ServerError(f"an event of the answer is none of OpenAI's API: {shown}") from None
        if text:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        return text

    def _text(self, choice: dict) -> str:
        part = choice.get("delta") or choice
        thought = next(filter(None, map(part.get, THOUGHTS)), "")
        text = next(filter(None, map(part.get, TEXTS)), "")
        if reason := choice.get("finish_reason"):
            self._reason = reason
        made = ""
        if thought:
            made, self._thinking = ("" if self._thinking else f"{OPEN}\n") + thought, True
        return made + (self._closed() + text if text else "")

    def _closed(self) -> str:
        """Return the end of the thinking if it has begun."""
        was, self._thinking = self._thinking, False
        return f"\n{CLOSE}\n\n" if was else ""

    def end(self) -> OutputChunk:
        """The last chunk; timings are from the request to the first text, and from there to the last. Raises
        ServerError."""
        if not isinstance(self._reason, str):
            raise ServerError("the answer was cut off: its stream ended early")
        if self._reason in ("error", "abort"):
            raise ServerError("the server gave the answer up")
        first = self._first or time.perf_counter()
        decode = (self._last or first) - first
        rate = (self._usage.completion_tokens - 1) / decode if self._usage and decode > 0 else 0.0
        return OutputChunk(
            None, self._closed(), None, self._reason, self._usage, Timings(first - self._started, decode, rate)
        )


def prompt_field(prompt: str | list[dict]) -> dict[str, object]:
    """Return the field of a request that holds the prompt."""
    return {"prompt": prompt} if isinstance(prompt, str) else {"messages": sent(prompt)}


def sent(messages: list[dict]) -> list[dict]:
    """Messages without the thinking of earlier answers, which no server wants back."""
    return [
        message | {"content": strip_thinking(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]


def encoded(body: dict) -> dict:
    # ASCII: what was typed may hold what UTF-8 cannot.
    return {"content": json.dumps(body).encode(), "headers": {"content-type": "application/json"}}


def events(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events, to [DONE] or the end. Raises ServerError."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > LONGEST:
            raise ServerError(f"an event of the answer has more than {LONGEST:,} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield data


def check(response: httpx.Response) -> None:
    """Raises ServerError for a response, read to its end, that is none with status 200; TooLong for a prompt that does
    not fit, with its length where the server tells it."""
    status = response.status_code
    if status == 200:
        return
    try:
        found = response.json()
        said = message_of(found)
        code = found["error"].get("code") if isinstance(found.get("error"), dict) else None
    except (ValueError, LookupError, AttributeError, RecursionError):
        said, code = brief(response.text), None
    if code == "context_length_exceeded" and (numbers := re.search(r"(\d[\d,]*) tokens.*?(\d[\d,]*)", said)):
        raise Refused(said, int(numbers[1].replace(",", "")))
    hints = {401: "give TRIDECODE_API_KEY or --api-key-file"}
    if wait := response.headers.get("retry-after"):
        hints[503] = hints[429] = f"it can be asked again in {brief(wait, 40)}{' s' if wait.isdecimal() else ''}"
    said = f"the server answers {status}: {said or response.reason_phrase}"
    raise ServerError(joined(said, hints[status]) if status in hints else said)


class Refused(TooLong):
    """A prompt that is too long, in the server's words."""

    def __init__(self, said: str, tokens: int):
        PromptError.__init__(self, said)
        self.tokens, self.or_more = tokens, "tokens or more" in said


@contextmanager
def failing(url: str):
    """Within, what goes wrong on the way to a server and back raises ServerError."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        words = brief(error) or "no answer"
        raise ServerError(f"cannot connect to {url}: {words}; is a server there?") from None
    except httpx.TimeoutException:
        raise ServerError(f"{url} said nothing for {TIMEOUT.read:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
        raise ServerError(f"the connection to {url} was lost ({brief(error) or type(error).__name__})") from None
