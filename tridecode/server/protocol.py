"""Request bodies: parsing and validation. An unknown parameter is an error that names the parameter."""

import json
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from ..arguments import nearest, shown
from ..errors import as_json
from .constraints import ResponseFormat, parse_response_format
from .errors import ApiError, bad_request
from .settings import MAX_ANSWERS, MAX_DETOKENIZE_TOKENS, MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS

# Parameters that never change the text. docs/serving.md lists them.
WITHOUT_EFFECT = frozenset(
    "user metadata service_tier prompt_cache_key prompt_cache_retention safety_identifier request_id priority "
    "verbosity".split()
)
# Unsupported parameter -> values that are accepted because they request nothing.
NEUTRAL: dict[str, list] = {
    "best_of": [1],
    "function_call": ["none"],
    "functions": [[]],
    "length_penalty": [1],
    "modalities": [["text"]],
    "skip_special_tokens": [True],
    "store": [False],
    "suffix": [""],
    "use_beam_search": [False],
}
NEUTRAL_IN_CHATS: dict[str, list] = {
    "add_generation_prompt": [True], "add_special_tokens": [False], "continue_final_message": [False],
}  # fmt: skip
NEUTRAL_IN_COMPLETIONS: dict[str, list] = {
    "add_special_tokens": [True], "parallel_tool_calls": [True, False], "tool_choice": ["none", "auto"], "tools": [[]],
}  # fmt: skip


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # The server accepts this option, but adds no obfuscation.


class RequestBody(msgspec.Struct, kw_only=True):
    """The body of a request.

    Args:
        neutral: unsupported parameter -> values that are accepted because they request nothing.
        without_effect: parameters that are ignored.
        renamed: field of SamplingParams -> its name in this request, for errors.
    """

    neutral: ClassVar[dict[str, list]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[dict[str, str]] = {}
    model: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """Field of SamplingParams -> its name in this request."""
        return self.renamed

    def check(self) -> None:
        """Check constraints that the field types do not express. Raises ApiError."""


F = TypeVar("F", bound=RequestBody)


class Generation(RequestBody, kw_only=True):
    """Parameters that all APIs share: those of SamplingParams, and how the answer is sent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_prompt: bool = True
    cache_salt: str = ""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are requested."""
        return False

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict:
        """Return the fields of SamplingParams that the request sets."""
        fields = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if "logit_bias" in fields:
            fields["logit_bias"] = {_token(key): value for key, value in fields["logit_bias"].items()}
        return fields

    @property
    def structure(self) -> ResponseFormat | None:
        """The response format of the request, if it has one."""
        return parse_response_format(self.response_format, self.structured_outputs)

    def alias(self, name: str, general: str) -> None:
        """Store the field `name` of an API under its `general` name. Raises ApiError if both are set and differ."""
        value = getattr(self, name)
        if value is not None and getattr(self, general) not in (None, value):
            raise bad_request(f"{general} and {name} have the same meaning; set one of them", name)
        setattr(self, general, getattr(self, general) if value is None else value)

    def check_single_format(self, value: dict[str, Any] | None, name: str) -> None:
        """Check that there is at most one response format. `value` is the format in the API's own parameter `name`."""
        if value is not None and (self.response_format is not None or self.structured_outputs is not None):
            raise bad_request(
                f"{name}, response_format and structured_outputs have the same meaning; set one of them", name
            )

    def check_single_answer(self, answer: str) -> None:
        """Refuse parameters that an API with one `answer` per request cannot represent."""
        if self.n != 1:
            raise bad_request(f"n must be 1: {answer} is one answer", "n")
        if self.return_token_ids:
            raise bad_request(f"return_token_ids: {answer} cannot contain them; leave it out", "return_token_ids")

    def check(self) -> None:
        """Check the parameters that all APIs share. Raises ApiError."""
        structure = self.structure
        if not 1 <= self.n <= MAX_ANSWERS:
            raise bad_request(f"n must be from 1 to {MAX_ANSWERS}, got {shown(self.n)}", "n")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            name = self.names.get("stop", "stop")
            raise bad_request(
                f"{name}: at most {MAX_STOPS} strings of at most {MAX_STOP_CHARACTERS} characters each", name
            )
        if self.logit_bias and len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise bad_request(
                f"logit_bias: at most {MAX_LOGIT_BIASES:,} tokens, got {len(self.logit_bias):,}", "logit_bias"
            )
        self._check_min_tokens()
        if structure is not None:
            self.check_ended_by(structure.parameter)

    def _check_min_tokens(self) -> None:
        """Accept min_tokens only with ignore_eos and without stops, because the sampler cannot exclude stop tokens."""
        if self.min_tokens < 0 or 0 < (self.max_tokens or 0) < self.min_tokens:
            raise bad_request(f"min_tokens must be from 0 to max_tokens, got {shown(self.min_tokens)}", "min_tokens")
        if self.min_tokens and (not self.ignore_eos or self.stop or self.stop_token_ids):
            raise bad_request(
                "min_tokens is supported together with ignore_eos: true and without stop and stop_token_ids; "
                "leave it out, or set ignore_eos",
                "min_tokens",
            )

    def check_ended_by(self, parameter: str) -> None:
        """Refuse min_tokens together with a `parameter` that constrains the answer, which may be complete earlier."""
        if self.min_tokens:
            raise bad_request(
                f"min_tokens: {parameter} determines the answer's end; leave one of them out", "min_tokens"
            )


class ChatRequest(Generation, kw_only=True):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[dict[str, list]] = NEUTRAL | NEUTRAL_IN_CHATS
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    def sampling(self) -> dict:
        """Return the sampling parameters. The API's logprobs is a flag; top_logprobs is their number."""
        fields = super().sampling()
        return fields | {"logprobs": self.top_logprobs or 0} if self.logprobs else fields

    def check(self) -> None:
        """Check the parameters of a chat. Raises ApiError."""
        self.alias("max_completion_tokens", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        super().check()

    @property
    def names(self) -> dict[str, str]:
        """The API's names of parameters that have another name in the engine."""
        renamed = {"logprobs": "top_logprobs", "template_variables": "chat_template_kwargs"}
        return renamed if self.max_completion_tokens is None else renamed | {"max_tokens": "max_completion_tokens"}


class CompletionRequest(Generation, kw_only=True):
    """Body of /v1/completions."""

    neutral: ClassVar[dict[str, list]] = NEUTRAL | NEUTRAL_IN_COMPLETIONS
    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None

    def sampling(self) -> dict:
        """Return the sampling parameters, with the number of log-probabilities."""
        fields = super().sampling()
        return fields if self.logprobs is None else fields | {"logprobs": self.logprobs}

    def check(self) -> None:
        """Check the parameters of a completion. Raises ApiError."""
        super().check()
        if self.scores_prompt and self.stream:
            raise bad_request("echo together with logprobs needs stream: false", "echo")
        if len(self.prompts) * self.n > MAX_ANSWERS:
            raise bad_request(f"prompt: at most {MAX_ANSWERS} answers a request, prompts times n", "prompt")

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer contains log-probabilities of the prompt."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts or lists of token ids. Raises ApiError."""
        items: list[str | int | list[int]] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not items or any(type(item) is not type(items[0]) for item in items):
            raise bad_request(
                "prompt must be text, a list of texts, token ids or a list of lists of token ids", "prompt"
            )
        tokens = [item for item in items if isinstance(item, int)]
        return [tokens] if tokens else [item for item in items if not isinstance(item, int)]


class TokenizeRequest(RequestBody, kw_only=True):
    """Body of /tokenize."""

    renamed: ClassVar[dict[str, str]] = {"template_variables": "chat_template_kwargs"}
    prompt: str | None = None
    messages: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Check that there is either a prompt or messages. Raises ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("set either prompt or messages", "prompt")
        if self.chat_template_kwargs and self.messages is None:
            raise bad_request("chat_template_kwargs needs messages", "chat_template_kwargs")


class DetokenizeRequest(RequestBody, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]

    def check(self) -> None:
        """Check the number of tokens. Raises ApiError."""
        if len(self.tokens) > MAX_DETOKENIZE_TOKENS:
            raise bad_request(f"tokens: at most {MAX_DETOKENIZE_TOKENS:,}, got {len(self.tokens):,}", "tokens")


# Fields of SamplingParams whose form differs between the endpoints, without logprobs.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def parse_body(body: bytes, body_type: type[F]) -> F:
    """Parse and check a body. A parameter that is null counts as absent.

    Raises:
        ApiError: (400) the body is invalid.
    """
    try:
        values = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object")
    values = {name: value for name, value in values.items() if value is not None}
    fields = body_type.__struct_fields__
    for name in [name for name in values if name not in fields]:
        _check_other(name, values.pop(name), body_type.neutral, WITHOUT_EFFECT | body_type.without_effect, fields)
    try:
        request = msgspec.convert(values, body_type)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _invalid(str(error)) from None
    request.check()
    return request


def _decode(body: bytes):
    """Decode JSON. A lone surrogate, such as half of an emoji, becomes U+FFFD, as in the tokenizer."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # msgspec rejects a lone surrogate. json accepts it.
        try:
            text = json.dumps(json.loads(body.decode()), ensure_ascii=False)
        except ValueError:
            raise error from None
        return msgspec.json.decode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _check_other(name: str, value, neutral: dict[str, list], no_effect: frozenset, fields: tuple[str, ...]) -> None:
    """Refuse a parameter that this server does not support, unless its value has no effect or disables it."""
    if name in no_effect or any(type(value) is type(other) and value == other for other in neutral.get(name, ())):
        return
    if name in neutral:
        accepted = " or ".join(as_json(other) for other in neutral[name])
        only = f" (only {accepted} is accepted)" if accepted else ""
        message = f"{name} is not supported: leave it out{only}, got {as_json(value)}"
        raise bad_request(message, name, "unsupported_parameter")
    shown_name = as_json(name).strip('"')
    similar = nearest(name[:100], fields)
    hint = f"did you mean {similar}?" if similar else "leave it out"
    raise bad_request(f"{shown_name} is not a parameter of this API: {hint}", shown_name, "unknown_parameter")


def _invalid(message: str) -> ApiError:
    """Rewrite an error of msgspec so that it begins with the parameter."""
    if missing := re.match(r"Object missing required field `(\w+)`$", message):
        return bad_request(f"{missing[1]} is required", missing[1])
    match = re.match(r"(.*) - at `(?:key in )?\$\.?(.*)`$", message, re.DOTALL)
    problem, place = match.groups() if match else (message, "")
    problem = problem.replace("`", "").replace(" | null", "").replace(" | ", " or ")
    return bad_request(
        f"{place}: {problem[:1].lower()}{problem[1:]}" if place else problem, re.split(r"\W", place)[0] or None
    )


def _token(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", key):
        raise bad_request(f"logit_bias: every key must be a token id, got {shown(key)}", "logit_bias")
    return int(key)
