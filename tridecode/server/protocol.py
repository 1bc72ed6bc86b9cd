"""Requests: from a body to checked values. What would change the text and is not known here is refused by name."""

import difflib
import json
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from ..arguments import shown
from ..errors import as_json
from .errors import ApiError, refusal
from .form import Structure, response_format
from .settings import ANSWERS, BIASES, STOP_CHARACTERS, STOPS, TOKENS

# Without effect on the text, whatever they say; docs/serving.md lists them.
WITHOUT_EFFECT = frozenset(
    "user metadata service_tier prompt_cache_key prompt_cache_retention safety_identifier request_id priority "
    "verbosity".split()
)
# Accepted where they ask for nothing.
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
OF_CHATS: dict[str, list] = {
    "add_generation_prompt": [True], "add_special_tokens": [False], "continue_final_message": [False],
}  # fmt: skip
OF_TEXTS: dict[str, list] = {
    "add_special_tokens": [True], "parallel_tool_calls": [True, False], "tool_choice": ["none", "auto"], "tools": [[]],
}  # fmt: skip


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # there is none here, and none is needed


class Form(msgspec.Struct, kw_only=True):
    """The body of a request.

    Args:
        neutral: unsupported parameter -> values that are accepted because they request nothing.
        without_effect: parameters that are ignored.
        renamed: field of SamplingParams -> its name in this request.
    """

    neutral: ClassVar[dict[str, list]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[dict[str, str]] = {}
    model: str | None = None

    @property
    def names(self) -> dict[str, str]:
        return self.renamed

    def check(self) -> None:
        """Check what the types do not. Raises ApiError."""


F = TypeVar("F", bound=Form)


class Generation(Form, kw_only=True):
    """The parameters of all APIs: SamplingParams by their usual names, and how the answer is sent."""

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
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict:
        """Fields of SamplingParams that were given."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if "logit_bias" in given:
            given["logit_bias"] = {_token(key): value for key, value in given["logit_bias"].items()}
        return given

    @property
    def structure(self) -> Structure | None:
        return response_format(self.response_format, self.structured_outputs)

    def keep(self, name: str, general: str) -> None:
        """The field that an API calls `name`, kept under its `general` name. Raises ApiError where both differ."""
        value = getattr(self, name)
        if value is not None and getattr(self, general) not in (None, value):
            raise refusal(f"{general} and {name} say the same; give one", name)
        setattr(self, general, getattr(self, general) if value is None else value)

    def keep_format(self, given: dict[str, Any] | None, name: str) -> None:
        """The same for the form of an answer, which other APIs have elsewhere."""
        if given is not None and (self.response_format is not None or self.structured_outputs is not None):
            raise refusal(f"{name}, response_format and structured_outputs say the same; give one", name)

    def single(self, what: str) -> None:
        """Refuse what an API with one answer a request, `what`, has no place for."""
        if self.n != 1:
            raise refusal(f"n must be 1: {what} is one answer", "n")
        if self.return_token_ids:
            raise refusal(f"return_token_ids: {what} has no place for them; leave it out", "return_token_ids")

    def check(self) -> None:
        structure = self.structure
        if not 1 <= self.n <= ANSWERS:
            raise refusal(f"n must be from 1 to {ANSWERS}, got {shown(self.n)}", "n")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options needs stream: true", "stream_options")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS or any(len(stop) > STOP_CHARACTERS for stop in stops):
            name = self.names.get("stop", "stop")
            raise refusal(f"{name}: at most {STOPS} strings of at most {STOP_CHARACTERS} characters each", name)
        if self.logit_bias and len(self.logit_bias) > BIASES:
            raise refusal(f"logit_bias: at most {BIASES:,} tokens, got {len(self.logit_bias):,}", "logit_bias")
        self._check_min_tokens()
        if structure is not None:
            self.check_ended_by(structure.place)

    def _check_min_tokens(self) -> None:
        """The sampler cannot keep a stop token from being drawn for a while; where nothing stops it, it need not."""
        if self.min_tokens < 0 or 0 < (self.max_tokens or 0) < self.min_tokens:
            raise refusal(f"min_tokens must be from 0 to max_tokens, got {shown(self.min_tokens)}", "min_tokens")
        if self.min_tokens and (not self.ignore_eos or self.stop or self.stop_token_ids):
            raise refusal(
                "min_tokens is supported together with ignore_eos: true and without stop and stop_token_ids; "
                "leave it out, or set ignore_eos",
                "min_tokens",
            )

    def check_ended_by(self, place: str) -> None:
        """Refuse min_tokens where `place` asks for a form, which may be whole sooner."""
        if self.min_tokens:
            raise refusal(f"min_tokens: {place} says where the answer ends; leave one of them out", "min_tokens")


class ChatRequest(Generation, kw_only=True):
    neutral: ClassVar[dict[str, list]] = NEUTRAL | OF_CHATS
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
        given = super().sampling()
        return given | {"logprobs": self.top_logprobs or 0} if self.logprobs else given

    def check(self) -> None:
        self.keep("max_completion_tokens", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs needs logprobs: true", "top_logprobs")
        super().check()

    @property
    def names(self) -> dict[str, str]:
        renamed = {"logprobs": "top_logprobs", "template_variables": "chat_template_kwargs"}
        return renamed if self.max_completion_tokens is None else renamed | {"max_tokens": "max_completion_tokens"}


class CompletionRequest(Generation, kw_only=True):
    neutral: ClassVar[dict[str, list]] = NEUTRAL | OF_TEXTS
    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None

    def sampling(self) -> dict:
        given = super().sampling()
        return given if self.logprobs is None else given | {"logprobs": self.logprobs}

    def check(self) -> None:
        super().check()
        if self.scores_prompt and self.stream:
            raise refusal("echo together with logprobs needs stream: false", "echo")
        if len(self.prompts) * self.n > ANSWERS:
            raise refusal(f"prompt: at most {ANSWERS} answers a request, prompts times n", "prompt")

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        given: list[str | int | list[int]] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not given or any(type(item) is not type(given[0]) for item in given):
            raise refusal("prompt must be text, a list of texts, token ids or a list of lists of token ids", "prompt")
        tokens = [item for item in given if isinstance(item, int)]
        return [tokens] if tokens else [item for item in given if not isinstance(item, int)]


class TokenizeRequest(Form, kw_only=True):
    renamed: ClassVar[dict[str, str]] = {"template_variables": "chat_template_kwargs"}
    prompt: str | None = None
    messages: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("give prompt or messages, one of them", "prompt")
        if self.chat_template_kwargs and self.messages is None:
            raise refusal("chat_template_kwargs needs messages", "chat_template_kwargs")


class DetokenizeRequest(Form, kw_only=True):
    tokens: list[int]

    def check(self) -> None:
        if len(self.tokens) > TOKENS:
            raise refusal(f"tokens: at most {TOKENS:,}, got {len(self.tokens):,}", "tokens")


# Those of SamplingParams, but for logprobs, whose form differs between the endpoints.
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def parsed(body: bytes, form: type[F]) -> F:
    """Return the checked `form` that a body holds. null counts as absent. Raises ApiError (400)."""
    try:
        given = _decoded(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise refusal(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise refusal("the body must be a JSON object")
    given = {name: value for name, value in given.items() if value is not None}
    fields = form.__struct_fields__
    for name in [name for name in given if name not in fields]:
        _check_other(name, given.pop(name), form.neutral, WITHOUT_EFFECT | form.without_effect, fields)
    try:
        made = msgspec.convert(given, form)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _invalid(str(error)) from None
    made.check()
    return made


def _decoded(body: bytes):
    """Its JSON; half of a surrogate pair, as of an emoji that was cut, is U+FFFD there, as for the tokenizer."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:  # msgspec takes no such half
        try:
            text = json.dumps(json.loads(body.decode()), ensure_ascii=False)
        except ValueError:
            raise error from None
        return msgspec.json.decode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _check_other(name: str, value, neutral: dict[str, list], no_effect: frozenset, fields: tuple[str, ...]) -> None:
    """A parameter that is not ours: it has no effect, or asks for nothing, or is refused."""
    if name in no_effect or any(type(value) is type(fine) and value == fine for fine in neutral.get(name, ())):
        return
    if name in neutral:
        known = " or ".join(as_json(fine) for fine in neutral[name])
        only = f" (only {known} is accepted)" if known else ""
        message = f"{name} is not supported: leave it out{only}, got {as_json(value)}"
        raise refusal(message, name, "unsupported_parameter")
    shown_name = as_json(name).strip('"')
    near = difflib.get_close_matches(name[:100], fields, n=1)
    meant = f"did you mean {near[0]}?" if near else "leave it out"
    raise refusal(f"{shown_name} is not a parameter that this server knows: {meant}", shown_name, "unknown_parameter")


def _invalid(message: str) -> ApiError:
    """msgspec's words, which say the place last, with it in front."""
    if missing := re.match(r"Object missing required field `(\w+)`$", message):
        return refusal(f"{missing[1]} is required", missing[1])
    found = re.match(r"(.*) - at `(?:key in )?\$\.?(.*)`$", message, re.DOTALL)
    what, place = found.groups() if found else (message, "")
    what = what.replace("`", "").replace(" | null", "").replace(" | ", " or ")
    return refusal(f"{place}: {what[:1].lower()}{what[1:]}" if place else what, re.split(r"\W", place)[0] or None)


def _token(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", key):
        raise refusal(f"logit_bias: every key must be a token id, got {shown(key)}", "logit_bias")
    return int(key)
