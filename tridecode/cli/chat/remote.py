"""A model behind OpenAI's HTTP API. Uses httpx."""

import json
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import httpx

from ...errors import ParameterError, TooLong, TridecodeError, brief
from ...results import OutputChunk, Timings, Usage
from ...sampling import SamplingParams
from ...text.thinking import CLOSE, OPEN, THINKING_VARIABLE, strip_thinking
from ..bench.client import message_of
from ..terminal import did_you_mean, joined
from .model import Model, Prompt, Thinking

TIMEOUT = httpx.Timeout(600.0, connect=10.0)  # Limit in seconds for the wait for the next byte.
OPENAI = {name: name for name in (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "stop",
)} | {"json_schema": "response_format"}  # fmt: skip
COMMON = OPENAI | {name: name for name in ("top_k", "min_p", "ignore_eos")}
EXTENDED = COMMON | {name: name for name in ("repetition_penalty", "stop_token_ids")}
STRUCTURED = (
    EXTENDED | {name: "structured_outputs" for name in ("regex", "choice", "grammar")} | {"min_tokens": "min_tokens"}
)
# owned_by in /v1/models -> {our name of a sampling option: the server's name of it}.
OPTIONS = {
    "tridecode": STRUCTURED,
    "vllm": STRUCTURED,
    "sglang": EXTENDED,
    "llamacpp": COMMON | {"repetition_penalty": "repeat_penalty"},
}
COUNTING = ("tridecode", "vllm")  # Servers whose /tokenize accepts messages.
TEXTS = ("content", "text")  # Fields of a choice that may contain its text.
REASONING_FIELDS = ("reasoning_content", "reasoning")


class ServerError(TridecodeError):
    """The server cannot be reached, refuses the request, or ends the answer early.

    Attributes:
        code: The code of an error response in OpenAI's API, such as context_length_exceeded.
    """

    def __init__(self, message: str, code: object = None):
        super().__init__(message)
        self.code = code


class RemoteModel(Model):
    """A model of one server. `device` is the server's address. The server keeps no state between answers.

    The server's defaults apply to options that are not set.
    """

    unit, defaults = "chunk", "the server's default"  # A server may put several tokens into one chunk.
    continues = seeds = False
    no_adapters = "a server lists its adapters as models; use /model NAME"
    device: str
    options: dict[str, str]  # Name of an option in tridecode -> its name in requests to the server.

    def __init__(self, url: str, key: str | None, name: str | None = None, overrides: Collection[str] = ()):
        """Connect to a server.

        Args:
            url: Address of the server.
            key: API key.
            name: Name of the model on the server. None selects the first model that the server lists.
            overrides: Names of sampling options that the server must support.

        Raises:
            ServerError: The server cannot be used.
            ParameterError: The server lacks the model or an option.
        """
        # The URL is for display, without user and password.
        self.device = str(httpx.URL(url).copy_with(userinfo=b"")).rstrip("/")
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        # Servers close connections that are idle for a few seconds (uvicorn: 5). The client closes them earlier.
        limits = httpx.Limits(keepalive_expiry=3.0)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits)
        self.switch(name, overrides)

    def switch(self, name: str | None, overrides: Collection[str], raw: bool = False) -> None:
        """Use another model of the server. After a ServerError or ParameterError nothing has changed."""
        with failing(self.device):
            response = self._http.get("/v1/models")
            check(response)
        try:
            cards = {card["id"]: card for card in response.json()["data"] if isinstance(card["id"], str)}
        except (ValueError, LookupError, TypeError, RecursionError):
            cards = {}
        if not cards:
            raise ServerError(f"{self.device}/v1/models lists no model; is this a server with OpenAI's API?")
        if name is not None and name not in cards:
            names = ", ".join([brief(known, 80) for known in cards][:8])
            fix = did_you_mean(name, cards) or f"its models are {names}"
            raise ParameterError(f"the server at {self.device} has no model {brief(name, 80)!r}; {fix}")
        name = next(iter(cards)) if name is None else name
        card = cards[name]
        owner, meta = card.get("owned_by"), card.get("meta")
        owner = brief(owner, 40) if isinstance(owner, str) else "no known kind"
        for option in overrides:
            check_option(option, owner)
        self.name, self.owner, self.options = name, owner, OPTIONS.get(owner, OPENAI)
        self.models = [known for known in cards if known.isprintable()]
        context = card.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        self.capacity = context if type(context) is int and context > 0 else None
        self.counts = owner in COUNTING and self.capacity is not None

    def check(self, option: str) -> None:
        """Raise ParameterError if servers of this kind do not support the sampling option."""
        check_option(option, self.owner)

    def thinking(self, mode: str, raw: bool) -> Thinking:
        """Return how the server handles thinking.

        The mode `on` leaves thinking to the server, which does not report whether its model supports it.
        """
        if raw:
            return Thinking(refusal="with --raw there is no chat template")
        if self.owner not in OPTIONS:  # These servers pass variables to the template.
            return Thinking(True, refusal=f"a server of {self.owner} does not set variables of its chat template")
        variables = {THINKING_VARIABLE: False} if mode == "off" else None
        return Thinking(True, variables=variables, advice="/think on leaves thinking to the server")

    def facts(self, last: OutputChunk | None) -> list[str]:
        """Return one line: the model, the address and the kind of server."""
        return [f"model {self.name} at {self.device}, a server of {self.owner}"]

    def close(self) -> None:
        """Close the connections to the server."""
        self._http.close()

    def count(self, prompt: Prompt, thinking: Thinking, prefix: str = "") -> int:
        """Return the number of tokens of a prompt.

        Raises ServerError, or TooLong if the prompt is too long for the server.
        """
        try:
            with self._post("/tokenize", self._body(prompt_field(prompt), {}, thinking.variables)) as response:
                response.read()
                return int(response.json()["count"])
        except ServerError as error:
            if error.code == "context_length_exceeded" and self.capacity is not None:
                raise TooLong(self.capacity + 1, self.capacity, is_lower_bound=True) from None
            raise
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.device}/tokenize did not return a number of tokens") from None

    def stream(
        self, prompt: Prompt, params: SamplingParams, overrides: Collection[str], thinking: Thinking, prefix: str = ""
    ) -> Iterator[OutputChunk]:
        """Yield an OutputChunk without token ids for each event with text, then a last chunk; see Engine.stream.

        If the server sends thinking in a separate field, it is put between think tags, as models write it. Closing the
        iterator closes the stream, which cancels the request.

        Args:
            overrides: Names of the options to send; for the others the server uses its defaults.

        Raises:
            ServerError: The request fails, or the answer ends early.
        """
        options = {name: getattr(params, name) for name in overrides}
        path = "/v1/completions" if isinstance(prompt, str) else "/v1/chat/completions"
        body = prompt_field(prompt) | {"stream": True, "stream_options": {"include_usage": True}}
        answer = Answer()
        with self._post(path, self._body(body, options, thinking.variables)) as response:
            for data in events(response.iter_bytes()):
                if text := answer.event(data):
                    yield OutputChunk(None, text)
        yield answer.end()

    @contextmanager
    def _post(self, path: str, body: dict) -> Iterator[httpx.Response]:
        """Send a request and yield its response, whose body is not read yet. Raises ServerError."""
        # The body is ASCII, because typed text may contain lone surrogates, which UTF-8 cannot encode.
        content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
        with failing(self.device), self._http.stream("POST", path, content=content, headers=headers) as response:
            check(response)
            yield response

    def _body(self, fields: dict, options: dict, variables: dict | None) -> dict:
        body = {"model": self.name} | fields
        for name, value in options.items():
            if value not in (None, (), {}):
                body[self.options[name]] = as_sent(name, value)
        return body | ({"chat_template_kwargs": variables} if variables else {})


def check_option(name: str, owner: str) -> None:
    """Raise ParameterError for a sampling option that a server might ignore, or whose result would not be shown."""
    if name == "logprobs":
        raise ParameterError("logprobs: not available with --url; leave it out")
    if name not in OPTIONS.get(owner, OPENAI):
        problem = f"a server of {owner} does not support this option and might ignore it"
        raise ParameterError(f"{name}: {problem}; leave it out")


class Answer:
    """The state of a streaming answer, with the times of its events."""

    def __init__(self):
        self._started = time.perf_counter()
        self._first = self._last = self._usage = self._reason = None
        self._thinking = False

    def event(self, data: bytes) -> str:
        """Return the text of an event. Raises ServerError."""
        try:
            fields = json.loads(data)
            if fields.get("error") or fields.get("object") == "error":
                raise ServerError(f"the server ended the answer: {message_of(fields)}")
            if usage := fields.get("usage"):
                details = usage.get("prompt_tokens_details") or {}
                reused = details.get("cached_tokens")
                self._usage = Usage(usage["prompt_tokens"], reused, usage["completion_tokens"])  # type: ignore[arg-type]  # None if absent
                if {type(n) for n in vars(self._usage).values()} - {int, type(None)}:
                    raise TypeError
            text = "".join(map(self._text, fields.get("choices") or ()))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            shown = brief(data.decode(errors="replace"), 80)
            raise ServerError(f"the server sent an event that is not part of OpenAI's API: {shown}") from None
        if text:
            self._last = time.perf_counter()
            self._first = self._first or self._last
        return text

    def _text(self, choice: dict) -> str:
        part = choice.get("delta") or choice
        reasoning = next(filter(None, map(part.get, REASONING_FIELDS)), "")
        text = next(filter(None, map(part.get, TEXTS)), "")
        if reason := choice.get("finish_reason"):
            self._reason = reason
        opened = ""
        if reasoning:
            opened, self._thinking = ("" if self._thinking else f"{OPEN}\n") + reasoning, True
        return opened + (self._closed() + text if text else "")

    def _closed(self) -> str:
        """Return the closing tag of the think block if one is open."""
        was, self._thinking = self._thinking, False
        return f"\n{CLOSE}\n\n" if was else ""

    def end(self) -> OutputChunk:
        """Return the last chunk. It contains the seconds until the first text, and from the first to the last text.

        Raises:
            ServerError: The answer is incomplete.
        """
        if not isinstance(self._reason, str):
            raise ServerError("the answer is incomplete: the stream ended early")
        if self._reason in ("error", "abort"):
            raise ServerError("the server aborted the answer")
        if self._usage and self._first and not self._usage.completion_tokens:
            self._usage = None  # The server does not count.
        first = self._first or time.perf_counter()
        decode = (self._last or first) - first
        rate = (self._usage.completion_tokens - 1) / decode if self._usage and decode > 0 else 0.0
        return OutputChunk(
            None, self._closed(), None, self._reason, self._usage, Timings(first - self._started, decode, rate)
        )


def as_sent(name: str, value: object) -> object:
    """Return the value of an option as OpenAI's API expects it."""
    if name == "json_schema":
        schema = {"name": "answer", "schema": json.loads(str(value)), "strict": True}
        return {"type": "json_schema", "json_schema": schema}
    return {name: value} if name in ("regex", "choice", "grammar") else value


def prompt_field(prompt: str | list[dict]) -> dict[str, object]:
    """Return the field of a request that holds the prompt."""
    return {"prompt": prompt} if isinstance(prompt, str) else {"messages": sent(prompt)}


def sent(messages: list[dict]) -> list[dict]:
    """Return the messages without the thinking of earlier answers, which servers do not expect."""
    return [
        message | {"content": strip_thinking(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]


def events(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events up to [DONE] or the end."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield data


def check(response: httpx.Response) -> None:
    """Raise ServerError if the status of a response is not 200."""
    status = response.status_code
    if status == 200:
        return
    response.read()
    try:
        body = response.json()
        message, error = message_of(body), body.get("error")
    except (ValueError, AttributeError, RecursionError):
        message, error = brief(response.text), None
    hints = {401: "give TRIDECODE_API_KEY or --api-key-file"}
    if wait := response.headers.get("retry-after"):
        hints[503] = hints[429] = f"try again in {brief(wait, 40)}{' s' if wait.isdecimal() else ''}"
    message = f"the server answers {status}: {message or response.reason_phrase}"
    code = error.get("code") if isinstance(error, dict) else None
    raise ServerError(joined(message, hints[status]) if status in hints else message, code)


@contextmanager
def failing(url: str):
    """Turn errors of the connection to a server into ServerError within the context."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        words = brief(error) or "no answer"
        raise ServerError(f"cannot connect to {url}: {words}; is a server there?") from None
    except httpx.TimeoutException:
        raise ServerError(f"{url} sent no data for {TIMEOUT.read:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
        raise ServerError(f"the connection to {url} was lost ({brief(error) or type(error).__name__})") from None
