"""Request bodies: parsing and validation. An unknown parameter is an error that names the parameter."""

import json
import re
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from ..arguments import nearest, shown
from ..errors import as_json
from ..text.prompt import Reading
from ..text.thinking import THINKING_VARIABLE
from ..text.tokenizer import Tokenizer
from .constraints import ResponseFormat, parse_response_format, thinking_off
from .errors import ApiError, bad_request
from .fields import (
    DEMANDING,
    EMPTY,
    IGNORED,
    NEUTRAL,
    NEUTRAL_IN_COMPLETIONS,
    is_neutral,
    replacement,
    without_off_values,
)
from .settings import MAX_ANSWERS, MAX_DETOKENIZE_TOKENS, MAX_LOGIT_BIASES, MAX_STOP_CHARACTERS, MAX_STOPS


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # Whether each event contains the usage so far.
    include_obfuscation: bool = False  # The server accepts this option, but adds no obfuscation.


class RequestBody(msgspec.Struct, kw_only=True):
    """The body of a request.

    Args:
        neutral: parameter of this API that the server does not implement -> values that request nothing. These and
            the next are in addition to those that all APIs share, in fields.py.
        without_effect: parameters that are ignored.
        renamed: field of SamplingParams -> its name in this request, for errors.
    """

    neutral: ClassVar[dict[str, list]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[dict[str, str]] = {}
    allows_no_tokens: ClassVar[bool] = False  # Whether max_tokens may be 0.
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
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_prompt: bool = True
    cache_salt: str = ""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def reading(self) -> Reading:
        """How the prompt is read."""
        return Reading()

    @property
    def only_prompt(self) -> bool:
        """Whether the request computes its prompt, but samples no token: max_tokens is 0."""
        return self.max_tokens == 0 and self.allows_no_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are requested."""
        return False

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with an event with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each event of a stream contains the usage so far."""
        return self.with_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self) -> dict:
        """Return the fields of SamplingParams that the request sets."""
        fields = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.only_prompt:
            fields["max_tokens"] = 1  # The engine samples one token, which Choice drops.
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
        if self.stream_options is not None and not self.stream and self.stream_options != StreamOptions():
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
        """Check that min_tokens is possible: stop strings may end the answer earlier."""
        minimum = self.min_tokens or 0
        if minimum < 0 or 0 < (self.max_tokens or 0) < minimum:
            raise bad_request(f"min_tokens must be from 0 to max_tokens, got {shown(minimum)}", "min_tokens")
        if minimum and self.stop:
            name = self.names.get("stop", "stop")
            raise bad_request(f"min_tokens is not supported together with {name}; leave one of them out", "min_tokens")

    def check_ended_by(self, parameter: str) -> None:
        """Refuse min_tokens together with a `parameter` that constrains the answer, which may be complete earlier."""
        if self.min_tokens:
            raise bad_request(
                f"min_tokens: {parameter} determines the answer's end; leave one of them out", "min_tokens"
            )


class ChatRequest(Generation, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def reading(self) -> Reading:
        """How the messages are read."""
        return Reading(add_special_tokens=self.add_special_tokens, continued=self.continue_final_message)

    def variables(self, tokenizer: Tokenizer) -> dict:
        """Return the variables of the chat template."""
        return thinking_off(self.reasoning_effort, tokenizer) | template_variables(
            self.chat_template_kwargs, tokenizer, self.add_generation_prompt
        )

    def sampling(self) -> dict:
        """Return the sampling parameters. The API's logprobs is a flag; top_logprobs is their number."""
        fields = super().sampling()
        return fields | {"logprobs": self.top_logprobs or 0} if self.logprobs else fields

    def check(self) -> None:
        """Check the parameters of a chat. Raises ApiError."""
        self.alias("max_completion_tokens", "max_tokens")
        check_continuation(self)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        super().check()

    @property
    def names(self) -> dict[str, str]:
        """The API's names of parameters that have another name in the engine."""
        renamed = {"logprobs": "top_logprobs", "template_variables": "chat_template_kwargs"}
        return renamed if self.max_completion_tokens is None else renamed | {"max_tokens": "max_completion_tokens"}


class CompletionRequest(Generation, kw_only=True):
    """Body of /v1/completions."""

    neutral: ClassVar[dict[str, list]] = NEUTRAL_IN_COMPLETIONS
    allows_no_tokens: ClassVar[bool] = True
    prompt: str | list[str | int | list[int]]
    suffix: str = ""
    echo: bool = False
    logprobs: int | bool | None = None
    add_special_tokens: bool = True

    @property
    def reading(self) -> Reading:
        """How a text prompt is read: its control tokens are control tokens."""
        return Reading(True, self.add_special_tokens)

    def sampling(self) -> dict:
        """Return the sampling parameters, with the number of log-probabilities."""
        fields = super().sampling()
        return fields if self.logprobs is None else fields | {"logprobs": self.logprobs}

    def check(self) -> None:
        """Check the parameters of a completion. Raises ApiError."""
        if self.logprobs is False:
            self.logprobs = None
        super().check()
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise bad_request("suffix needs a prompt that is text, got token ids", "suffix")
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
        kinds = set(map(type, items))
        if len(kinds) != 1:
            raise bad_request(
                "prompt must be text, a list of texts, token ids or a list of lists of token ids", "prompt"
            )
        return cast(list, [items] if kinds == {int} else items)


class TokenizeRequest(RequestBody, kw_only=True):
    """Body of /tokenize."""

    renamed: ClassVar[dict[str, str]] = {"template_variables": "chat_template_kwargs"}
    prompt: str | None = None
    messages: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Any] | None = None
    return_token_strs: bool = False

    @property
    def reading(self) -> Reading:
        """How the prompt is read, as in completions and chats."""
        return Reading(True, self.add_special_tokens, self.continue_final_message)

    def variables(self, tokenizer: Tokenizer) -> dict:
        """Return the variables of the chat template."""
        return template_variables(self.chat_template_kwargs, tokenizer, self.add_generation_prompt)

    def check(self) -> None:
        """Check that there is either a prompt or messages. Raises ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("set either prompt or messages", "prompt")
        check_continuation(self)
        for name in ("chat_template_kwargs", "continue_final_message", "tools"):
            if getattr(self, name) and self.messages is None:
                raise bad_request(f"{name} needs messages", name)


class DetokenizeRequest(RequestBody, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]

    def check(self) -> None:
        """Check the number of tokens. Raises ApiError."""
        if len(self.tokens) > MAX_DETOKENIZE_TOKENS:
            raise bad_request(f"tokens: at most {MAX_DETOKENIZE_TOKENS:,}, got {len(self.tokens):,}", "tokens")


# Variables with which clients control the thinking of some model. Templates without them ignore them.
THINKING_VARIABLES = {THINKING_VARIABLE, "thinking", "reasoning_effort", "thinking_budget", "reasoning"}


def template_variables(
    values: dict | None, tokenizer: Tokenizer, add_generation_prompt: bool | None = None
) -> dict:  # fmt: skip
    """Return the variables of the chat template, without those for thinking that this template does not read."""
    known = tokenizer.template_variables if values and THINKING_VARIABLES & values.keys() else frozenset()
    made = {
        name: value for name, value in (values or {}).items() if name not in THINKING_VARIABLES or name in known
    }  # fmt: skip
    return made if add_generation_prompt is None else made | {"add_generation_prompt": add_generation_prompt}


def check_continuation(payload: ChatRequest | TokenizeRequest) -> None:
    """Refuse a chat that both ends with its last message and begins an answer. Raises ApiError."""
    if payload.continue_final_message and payload.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other; set one of them",
            "continue_final_message",
        )


# Fields of SamplingParams whose form differs between the endpoints, without logprobs.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def parse_body(body: bytes, body_type: type[F]) -> F:
    """Parse and check a body. A parameter that is null counts as absent.

    Raises:
        ApiError: (400) the body is invalid.
    """
    try:
        values = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from None
    if not isinstance(values, dict):
        raise bad_request(f"the body must be a JSON object, got {_JSON_TYPES[type(values).__name__]}")
    values = {name: value for name, value in values.items() if value is not None}
    fields = body_type.__struct_fields__
    for name in [name for name in values if name not in fields]:
        _check_other(name, values.pop(name), body_type)
    try:
        request = msgspec.convert(without_off_values(values), body_type)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _invalid(str(error)) from None
    request.check()
    return request


def _decode(body: bytes):
    """Decode JSON. A lone surrogate, such as half of an emoji, becomes U+FFFD, as in the tokenizer."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # msgspec rejects a lone surrogate. json accepts it.
        text = body.decode()
        try:
            text = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise error from None
        return msgspec.json.decode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _check_other(name: str, value, body_type: type[RequestBody]) -> None:
    """Refuse a parameter that this server does not implement, unless it is ignored or its value requests nothing."""
    neutral, fields = NEUTRAL | body_type.neutral, body_type.__struct_fields__
    if name in IGNORED | body_type.without_effect or value in EMPTY and name not in DEMANDING:
        return
    if is_neutral(value, neutral.get(name, [])):
        return
    shown_name = as_json(name).strip('"')
    if instead := replacement(name, fields):
        message = f"{shown_name} is not a parameter of this API: {instead}"
        raise bad_request(message, shown_name, "unknown_parameter")
    if name in neutral:
        accepted = " or ".join(as_json(other) for other in neutral[name])
        only = f" (only {accepted} is accepted)" if accepted else ""
        message = f"{name} is not supported: leave it out{only}, got {as_json(value)}"
        raise bad_request(message, name, "unsupported_parameter")
    similar = nearest(name[:100], fields)
    hint = f"did you mean {similar}?" if similar else "leave it out"
    raise bad_request(f"{shown_name} is not a parameter of this API: {hint}", shown_name, "unknown_parameter")


# Name of a type in errors of msgspec, or in Python -> its name in JSON.
_JSON_TYPES = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "a list",
    "list": "a list", "object": "an object", "null": "null", "NoneType": "null",
}  # fmt: skip


def _not_json(body: bytes, error: Exception) -> ApiError:
    """Return the error for a body that cannot be parsed. It shows the text at the place of the error."""
    problem = str(error).removeprefix("JSON is malformed: ")
    if not body.strip():
        problem = "it is empty; send an object"
    elif isinstance(error, UnicodeDecodeError):
        problem = "its encoding is not UTF-8"
    elif problem == "Input data was truncated":
        problem = "it ends before the value is complete"
    elif match := re.fullmatch(r"(.*) \(byte (\d+)\)", problem):
        rest = body[int(match[2]) :][:40].decode(errors="ignore").split("\n")[0]
        problem = f"{match[1]} at byte {match[2]}, {as_json(rest)}"
        if rest.startswith(("//", "/*", "#")):
            problem += "; JSON has no comments"
    return bad_request(f"the body is not JSON: {problem}", code="invalid_json")


def _invalid(message: str) -> ApiError:
    """Rewrite an error of msgspec so that it begins with the parameter and names types as JSON does."""
    if missing := re.match(r"Object missing required field `(\w+)`$", message):
        return bad_request(f"{missing[1]} is required", missing[1])
    match = re.match(r"(.*) - at `(?:key in )?\$\.?(.*)`$", message, re.DOTALL)
    problem, place = match.groups() if match else (message, "")
    problem = re.sub(r"unknown field `(.*)`", r"the unknown field \1; leave it out", problem.replace(" | null", ""))
    problem = re.sub(r"`([\w| ]+)`", lambda types: " or ".join(map(_json_type, types[1].split(" | "))), problem)
    problem = problem.replace("`", "")
    return bad_request(
        f"{place}: {problem[:1].lower()}{problem[1:]}" if place else problem, re.split(r"\W", place)[0] or None
    )


def _json_type(name: str) -> str:
    return _JSON_TYPES.get(name, name)


def _token(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", key):
        raise bad_request(f"logit_bias: every key must be a token id, got {shown(key)}", "logit_bias")
    return int(key)
