"""SamplingParams: how one generation draws its tokens and when it ends."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .arguments import flag, shown
from .errors import ParameterError, brief
from .layout import MAX_LOGPROBS

STRUCTURES = ("json_schema", "regex", "choice", "grammar")
STRUCTURE_CHARACTERS = 1 << 18


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one generation; checked on construction (ParameterError).

    temperature: 0 is greedy. top_k: 0 is off. top_p in (0, 1], min_p in [0, 1]: 1 and 0 are off.
    repetition_penalty >= 0.001 acts on tokens of prompt and output (as transformers), presence_penalty and
    frequency_penalty in [-2, 2] on tokens of the output only (as OpenAI's API).
    logit_bias: token id -> value added to that logit before everything else.
    seed: None draws one. max_tokens: None is up to the context's end. stop: strings, never shown.
    stop_token_ids: beside the model's own, at most 16 in all. ignore_eos: the model's own do not stop.
    logprobs: number of most likely tokens to report a step, 0 to 20; None reports nothing.
    json_schema (a dict, or its JSON text), regex, choice (strings) or grammar (Lark), one of them: the answer is such a
    text, and ends where nothing can follow. What llguidance cannot follow is refused when a request is submitted.
    Order: mask of these, bias, repetition, presence and frequency penalty, temperature, top-k, top-p, min-p; ties at a
    threshold stay.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: Mapping | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind in (("stop", tuple), ("stop_token_ids", tuple), ("logit_bias", dict)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(() if value is None else value))
            except (TypeError, ValueError):
                expected = "a list" if kind is tuple else "a mapping of token ids to numbers"
                raise ParameterError(f"{name} must be {expected}, got {shown(value)}") from None
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, low_open=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.001, 100.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        flag("ignore_eos", self.ignore_eos)
        self._integer("top_k", 0, 2**31 - 1)
        self._integer("seed", -(2**63), 2**64 - 1, optional=True)
        self._integer("max_tokens", 1, 2**31 - 1, optional=True)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ParameterError(f"stop: every entry must be a non-empty string, got {shown(text)}")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                what = "every entry must be a token id (an integer >= 0)"
                raise ParameterError(f"stop_token_ids: {what}, got {shown(token)}")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ParameterError(f"logit_bias: every key must be a token id (an integer >= 0), got {shown(token)}")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not abs(bias) <= 1e30:
                what = f"token {shown(token)} must have a number from -1e30 to 1e30"
                raise ParameterError(f"logit_bias: {what}, got {shown(bias)}")

        self._check_structure()

    def _check_structure(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ParameterError(f"{given[1]}: an answer has one form, and {given[0]} is given too")
        if not given:
            return
        (name,), value = given, getattr(self, given[0])
        if name == "choice":
            if isinstance(value, str) or not isinstance(value, Sequence) or not value:
                raise ParameterError(f"choice must be a list of at least one string, got {shown(value)}")
            for text in value:
                if not isinstance(text, str) or not text:
                    raise ParameterError(f"choice: every entry must be a non-empty string, got {shown(text)}")
            object.__setattr__(self, "choice", tuple(value))
        elif name == "json_schema":
            object.__setattr__(self, "json_schema", _schema(value))
        elif not isinstance(value, str) or not value:
            raise ParameterError(f"{name} must be a non-empty string, got {shown(value)}")
        if (size := len(text := self.structure[1])) > STRUCTURE_CHARACTERS:
            raise ParameterError(f"{name}: at most {STRUCTURE_CHARACTERS:,} characters are supported, got {size:,}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ParameterError(f"{name}: lone surrogates are no text, got {shown(value)}") from None

    @property
    def structure(self) -> tuple[str, str] | None:
        """Which of json_schema, regex, choice and grammar is given, and it as text."""
        for name in STRUCTURES:
            if (value := getattr(self, name)) is not None:
                return name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return None

    def _number(self, name: str, low: float, high: float, low_open: bool = False):
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (low_open and value == low):
            bound = "above" if low_open else "from"
            raise ParameterError(f"{name} must be a number {bound} {low:g} to {high:g}, got {shown(value)}")

    def _integer(self, name: str, low: int, high: int, optional: bool = False):
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ParameterError(f"{name} must be an integer from {low:,} to {high:,}, got {shown(value)}")

    @property
    def penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def greedy(self) -> bool:
        """The plain argmax of the raw logits: the one-launch greedy step serves it."""
        return self.temperature == 0 and not self.penalties and not self.logit_bias


def _schema(value) -> str:
    """A JSON schema, which is an object or true, as JSON text. Raises ParameterError."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        found = json.loads(text, parse_constant=_no_number)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # 1e999, and lone surrogates by escapes
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"json_schema must be plain JSON: {brief(error)}") from None
    if found is True:
        return "{}"
    if not isinstance(found, dict):
        raise ParameterError(f"json_schema must be a JSON object, got {shown(found)}")
    return text


def _no_number(name: str):
    raise ValueError(f"{name} is no number of it")
