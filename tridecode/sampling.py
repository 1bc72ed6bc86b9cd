"""SamplingParams: the sampling and stopping parameters of one request."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .arguments import (
    Constraint,
    Flag,
    Integer,
    Number,
    Option,
    Rejected,
    Several,
    Text,
    check_fields,
    documented,
    option,
    shown,
)
from .errors import ParameterError, brief, conflict
from .layout import MAX_LOGPROBS

STRUCTURES = ("json_schema", "regex", "choice", "grammar")
STRUCTURE_CHARACTERS = 1 << 18
COMMANDS = ("chat", "generate")


TOKEN = Integer(0, expects="a token id (an integer >= 0)")
NON_EMPTY = Text("a non-empty string", r"(?s).+")


@dataclass(frozen=True)
class Bias(Constraint):
    """A mapping of token ids to numbers."""

    expects = "a mapping of token ids to numbers"

    @property
    def item(self) -> Constraint:
        """The constraint of one pair of token and bias."""
        return BiasItem()

    def accept(self, value: Any) -> dict[int, float]:
        """Return a dict from token id to bias. Raises Rejected for wrong types, ids or biases."""
        try:
            biases = dict(() if value is None else value)
        except (TypeError, ValueError):
            raise Rejected("type") from None
        for token, bias in biases.items():
            try:
                TOKEN.accept(token)
            except Rejected as error:
                raise Rejected(error.code, f"every key must be {TOKEN.expected}", token) from None
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 1e30:
                raise Rejected("range", f"token {shown(token)} must have a number from -1e30 to 1e30", bias)
        return biases


@dataclass(frozen=True)
class BiasItem(Constraint):
    """A token id and a number, ID=VALUE on the command line."""

    expects = "ID=VALUE, like 42=-1.5"

    def accept(self, value: Any) -> tuple[int, float]:
        """Return the pair of token id and bias. Raises Rejected."""
        if not isinstance(value, tuple):
            raise Rejected("type")
        ((token, bias),) = Bias().accept([value]).items()
        return token, bias

    def read(self, text: str) -> tuple[int, float] | str:
        """Return the pair of a text such as 42=-1.5, or the text itself."""
        token, _, value = text.partition("=")
        try:
            return int(token), float(value)
        except ValueError:
            return text


@dataclass(frozen=True)
class Schema(Constraint):
    """A JSON schema: a dict, or its JSON text."""

    expects = "a JSON object"

    def accept(self, value: Any) -> str:
        """Return the schema as JSON text. Raises Rejected."""
        return _schema(value)


def _option(default: Any, constraint: Constraint, help: str, **rest: Any) -> Any:
    """Declare an option of the group "sampling"."""
    return option(default, constraint, help, **{"group": "sampling", "commands": COMMANDS} | rest)


def _format(constraint: Constraint, help: str, **rest: Any) -> Any:
    """Declare an option of the group of response formats."""
    return option(None, constraint, help, group="form of the answer", commands=("generate",), **rest)


@documented
@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request, validated on construction.

    Sampling applies in this order: the mask of json_schema, regex, choice or grammar, then logit_bias, the repetition,
    presence and frequency penalties, temperature, top-k, top-p and min-p. Tokens that are tied at a threshold are all
    kept.

    Raises:
        ParameterError: a value is invalid. `.argument` is the name of the parameter.
    """

    # fmt: off
    temperature: float = _option(1.0, Number(0, 100), "0 is greedy", metavar="T",
        default_text="the model's, or 1",
        brief="randomness of the answer; 0 is none")
    top_k: int = _option(0, Integer(0, 2**31 - 1), "sample from the K most likely tokens; 0 is off", metavar="K",
        default_text="the model's, or 0",
        brief="choose among the K most likely tokens")
    top_p: float = _option(1.0, Number(0, 1, above=True), "sample from the most likely tokens whose probabilities "
        "add up to P; 1 is off", metavar="P", default_text="the model's, or 1",
        brief="choose among tokens that add up to P, up to 1")
    min_p: float = _option(0.0, Number(0, 1), "sample from tokens whose probability is at least P times that of the "
        "most likely token; 0 is off", metavar="P", default_text="the model's, or 0")
    repetition_penalty: float = _option(1.0, Number(0.001, 100), "penalty for tokens of prompt and answer, as in "
        "transformers; 1 is off", metavar="R", default_text="the model's, or 1")
    presence_penalty: float = _option(0.0, Number(-2, 2), "penalty for tokens that the answer contains, as in "
        "OpenAI's API; 0 is off",
        metavar="P")
    frequency_penalty: float = _option(0.0, Number(-2, 2), "penalty for each occurrence of a token in the answer; 0 "
        "is off",
        metavar="P")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata={
            "option": Option(
                Bias(), "number that is added to the logit of a token; repeatable", {}, "sampling", commands=COMMANDS,
                metavar="ID=VALUE",
                repeated=True, default_text="none",
            )
        },
    )  # fmt: skip
    seed: int | None = _option(None, Integer(-(2**63), 2**64 - 1), "random seed; equal seeds and prompts give equal "
        "tokens", metavar="N", default_text="random", brief="equal seeds give equal answers")
    max_tokens: int | None = _option(None, Integer(1, 2**31 - 1), "maximum tokens of the answer", metavar="N",
        default_text="the rest of the context", brief="longest answer, in tokens")
    min_tokens: int = _option(0, Integer(0, 2**31 - 1), "tokens before which no stop token ends the answer",
        metavar="N")
    stop: Sequence[str] = _option((), Several(NON_EMPTY, "a text or a list of texts", 0), "a string that ends the "
        "answer and is not shown; repeatable", metavar="STRING", repeated=True, default_text="none",
        brief="text that ends the answer; repeatable")
    stop_token_ids: Sequence[int] = _option((), Several(TOKEN, min_items=0), "token ids that end the answer, "
        "in addition to the model's own", metavar="IDS", default_text="none")
    ignore_eos: bool = _option(False, Flag(), "the model's own stop tokens do not end the answer")
    logprobs: int | None = _option(None, Integer(0, MAX_LOGPROBS), "report the logprob of each token and of the N most "
        "likely ones; on the command line with --json", metavar="N", commands=("generate",), unsaved=("generate",),
        default_text="none")
    adapter: str | None = option(None, NON_EMPTY, "the name of a LoRA adapter that the engine has loaded; see "
        "docs/adapters.md", default_text="none")
    json_schema: Mapping[str, Any] | str | None = _format(Schema(), "the answer is JSON that this schema allows; on "
        "the command line a file, or the schema itself if it begins with {",
        metavar="FILE",
        from_file=True, brief="JSON of this schema, a file or {...}")
    regex: str | None = _format(NON_EMPTY, "the answer is a text that this regular expression matches completely",
        metavar="PATTERN", brief="the answer matches this expression")
    choice: Sequence[str] | None = _format(Several(NON_EMPTY, "a list of at least one string"), "the answer is one "
        "of these texts; repeatable", metavar="TEXT", repeated=True, brief="one possible answer; repeatable")
    grammar: str | None = _format(NON_EMPTY, "the answer is a text that this Lark grammar allows", metavar="FILE",
        from_file=True)
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_structure()
        if self.min_tokens and (other := self.structure[0] if self.structure else "stop" if self.stop else ""):
            raise conflict("min_tokens", f" cannot be combined with {other}, which may end the answer earlier")

    def _check_structure(self) -> None:
        if (structure := self.structure) is None:
            return
        name, text = structure
        if others := [other for other in STRUCTURES if other != name and getattr(self, other) is not None]:
            raise conflict(others[0], f": an answer has only one format, and {name} is also set")
        if len(text) > STRUCTURE_CHARACTERS:
            limit = f"at most {STRUCTURE_CHARACTERS:,} characters are supported, got {len(text):,}"
            raise ParameterError(f"{name}: {limit}", name, "range")
        try:
            text.encode()
        except UnicodeEncodeError:
            message = f"{name}: a lone surrogate is not text, got {shown(getattr(self, name))}"
            raise ParameterError(message, name, "type") from None

    @property
    def structure(self) -> tuple[str, str] | None:
        """Name and text of the response format: json_schema, regex, choice or grammar; None if none is set."""
        for name in STRUCTURES:
            if (value := getattr(self, name)) is not None:
                return name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return None

    @property
    def bounded_below(self) -> bool:
        """Whether a mask excludes stop tokens until the answer has min_tokens tokens."""
        return self.min_tokens > 0 and (not self.ignore_eos or bool(self.stop_token_ids))

    @property
    def masked(self) -> bool:
        """Whether each sampled token depends on a mask."""
        return self.structure is not None or self.bounded_below

    @property
    def penalties(self) -> bool:
        """Whether any penalty changes logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def greedy(self) -> bool:
        """Whether the sampled token is the argmax of the raw logits, which a greedy pass computes in one launch."""
        return self.temperature == 0 and not self.penalties and not self.logit_bias


def random_seed(count: int = 1) -> int:
    """Return a random seed. It and the `count - 1` seeds after it are below 2**53, which any reader of JSON keeps."""
    return secrets.randbelow(2**53 - count)


def _schema(value: Any) -> str:
    """Return the text of a JSON schema, which must be an object or true. Raises ParameterError or Rejected."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        schema = json.loads(text, parse_constant=_reject_constant)
        # This rejects 1e999, which is infinite, and escaped lone surrogates.
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"json_schema must be plain JSON: {brief(error)}", "json_schema", "type") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise Rejected("type")
    return text


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and infinities, which Python accepts but JSON does not allow."""
    raise ValueError(f"{name} is not a JSON number")
