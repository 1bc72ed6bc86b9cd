"""Grammars: what an answer may be, from a JSON schema, a regular expression, a list of choices or Lark, by llguidance.

A Grammar is compiled once; each request follows it with a Matcher of its own, which says after every token what may
come next, as bits over the vocabulary.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..arguments import shown
from ..errors import GenerationError, ParameterError, brief, conflict
from ..sampling import SamplingParams
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
KEPT = 64  # grammars that stay compiled
# JSON as most programs write it, on one line: a model that may write any white space can write it for ever.
LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STATES = 50_000  # of a lexer, of 1 to 2 kB each
STACK = 1 << 30  # of a thread that compiles; only what is used of it is memory


class Grammars:
    """Compiles grammars for one model's tokens. stop_ids: those that end its texts."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._vocab, self._stop_ids = tokenizer, vocab_size, tuple(stop_ids)
        self._turn = threading.Lock()
        self._made: dict[tuple[str, str], Future[Grammar]] = {}  # by name and source, the last used behind the others
        self._vocabulary: Future | None = None  # an llguidance.LLTokenizer

    def start(self) -> None:
        """Build llguidance's form of the vocabulary in the background: up to a second for a large one."""
        with self._turn:
            if self._vocabulary is None and self._tokenizer is not None:
                self._vocabulary = in_deep_thread(llguidance_tokens, self._tokenizer, self._vocab, self._stop_ids)

    def wait(self) -> None:
        """Wait for what `start` has begun. The first grammar reports its errors."""
        if self._vocabulary is not None:
            self._vocabulary.exception()

    def of(self, params: SamplingParams) -> "Grammar | None":
        """What `params` ask for, compiled; None where they ask for nothing. Raises ParameterError with the reason.

        Whoever asks waits for a grammar of its own only, and those who ask for the same one for the same thread.
        """
        if (asked := params.structure) is None:
            return None
        with self._turn:
            made = self._made.pop(asked, None)
            if made is None or made.done() and made.exception():
                made = in_deep_thread(self._compile, *asked)
            self._made[asked] = made
            if len(self._made) > KEPT:
                del self._made[next(iter(self._made))]
        return made.result()

    def _compile(self, name: str, source: str) -> "Grammar":
        try:
            return self._made_of(name, source)
        except ParameterError:
            raise
        except BaseException as error:  # a panic of llguidance is no Exception
            message = f"{name} cannot be compiled: {type(error).__name__}: {brief(error)}"
            raise ParameterError(message, name, "type") from error

    def _made_of(self, name: str, source: str) -> "Grammar":
        if self._tokenizer is None:
            raise conflict(name, " needs a tokenizer, and this engine has none")
        try:
            import llguidance
        except ModuleNotFoundError:
            raise conflict(name, " needs the package llguidance; install it: pip install llguidance") from None
        self.start()
        assert self._vocabulary is not None
        matcher, made = llguidance.LLMatcher, None
        if name == "json_schema":
            made = matcher.grammar_from_json_schema(exact(json.loads(source)), overrides=LAYOUT)
        elif name == "regex":
            made = matcher.grammar_from_regex(source)
        else:
            lark = checked(source) if name == "grammar" else lark_of_choices(json.loads(source))
            made = matcher.grammar_from_lark(lark)
        limits = llguidance.LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
        first = matcher(self._vocabulary.result(), made, log_level=0, limits=limits)
        if first.is_error():
            raise ParameterError(f"{name}: {reason(first.get_error())}", name, "type")
        grammar = Grammar(first, self._vocab)
        try:
            grammar.first = grammar.matcher(()).allowed()
        except GenerationError as error:
            raise ParameterError(f"{name}: {error}", name, "type") from None
        return grammar


def in_deep_thread(work: Callable[..., T], *args) -> Future[T]:
    """work(*args), in a thread for llguidance, which recurses as deep as a grammar goes and ends the process where a
    stack does."""
    made: Future[T] = Future()

    def run():
        try:
            made.set_result(work(*args))
        except BaseException as error:
            made.set_exception(error)

    with _starting:
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()  # an end of the process waits for none
        finally:
            threading.stack_size(usual)
    return made


_starting = threading.Lock()  # the size of a stack is said to the whole process


class Grammar:
    """first: the mask of an answer's first token, int32 [words]; see layout.mask_words."""

    first: np.ndarray

    def __init__(self, prototype, vocab: int):
        self._prototype, self._vocab, self._turn = prototype, vocab, threading.Lock()

    def matcher(self, drawn: Sequence[int]) -> "Matcher":
        """That of a request which has drawn these tokens until now. Raises GenerationError."""
        with self._turn:
            own = self._prototype.deep_copy()
        made = Matcher(own, self._vocab)
        for token in drawn:
            made.accept(token)
        return made


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher, vocab: int):
        self._matcher, self._words = matcher, -(-vocab // 32)

    def accept(self, token: int) -> bool:
        """Go on behind the token; True where nothing can follow it. Raises GenerationError."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """The mask of the next token, int32 [words]. Raises GenerationError."""
        mask = np.empty(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"the grammar cannot be followed: {brief(self._matcher.get_error())}")


def exact(schema):
    """A JSON schema with numbers that llguidance holds, which has floating point and integers of 64 bits: bounds that
    it cannot hold are drawn in to the next that it can. Raises ParameterError for others, which would be other values.
    """
    try:
        return _exact("json_schema", schema)
    except RecursionError:
        raise ParameterError(
            "json_schema: lists and objects in it are nested too deeply", "json_schema", "range"
        ) from None


def checked(lark: str) -> str:
    """A text in Lark. Raises ParameterError for what `exact` refuses in a schema within: llguidance would recurse for
    ever with some of it, and end the process."""
    for found in re.finditer(r"%json\s*", lark):
        try:
            schema = _ALL_READ.raw_decode(lark, found.end())[0]
        except (ValueError, RecursionError):  # llguidance says it
            continue
        try:
            exact(schema)
        except ParameterError as error:
            raise ParameterError(f"grammar: in its {error}", "grammar", "type") from None
    return lark


def _exact(place: str, value):
    if isinstance(value, list):
        return [_exact(place, item) for item in value]
    if not isinstance(value, dict):
        return _held(place, value)
    made = {}
    for name, item in value.items():
        if name in ("enum", "const"):
            made[name] = _told_apart(item)
        elif name in _INWARD and _number(item):
            made[name] = _drawn_in(name, item)
        elif name in _NAMED and isinstance(item, dict):
            made[name] = {key: _exact(name, schema) for key, schema in item.items()}
        elif name not in _UNREAD:
            made[name] = _exact(name, item)
    return made


_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # whose keys are names
_UNREAD = ("default", "examples")  # which hold no answer to anything
_INWARD = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_MOST = 2**63 - 1024  # the largest that both hold
# A $ref may lead to what `exact` leaves out.
_ALL_READ = json.JSONDecoder(object_hook=lambda made: {f"${k}" if k in _UNREAD else k: v for k, v in made.items()})


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _held(place: str, value):
    if _number(value) and abs(value) > _MOST:
        message = f"json_schema: {place}: numbers of up to 63 bits are supported, got {shown(value)}"
        raise ParameterError(message, "json_schema", "range")
    return value


def _told_apart(value):
    """A value that an answer may be."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _told_apart(item)
    if _number(value) and (abs(value) > _MOST or int(float(value)) != int(value)):
        message = f"json_schema: the number {shown(value)} is too large to be told from its neighbours"
        raise ParameterError(message, "json_schema", "range")
    return value


def _drawn_in(name: str, value):
    inward = _INWARD[name]
    value = _held(name, max(value, -_MOST) if inward > 0 else min(value, _MOST))
    if isinstance(value, float):
        return value
    held = float(value)
    if (int(held) - value) * inward < 0:
        held = math.nextafter(held, inward * math.inf)
    return int(held)


def reason(message: str) -> str:
    """What llguidance says is wrong, without the grammar around the place."""
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", "\n".join(lines))
    return brief(re.sub(r"oneOf constraints are not .*", "oneOf: a value may fit two of them; use anyOf", text))


def lark_of_choices(choices: Sequence[str]) -> str:
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "start: " + " | ".join(literals).replace("\x7f", "\\u007f")  # which llguidance takes for no character


def llguidance_tokens(tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]):
    """The vocabulary as llguidance takes it: bytes of each token, special ones apart, none where the tokenizer ends."""
    import llguidance

    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ends = [token for token in stop_ids if token < vocab] or [*eos]
    if not ends:
        raise ParameterError("this model has no token that ends a text: no grammar can be followed")

    class Vocabulary:
        eos_token_id, bos_token_id = ends[0], None
        tokens = [tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in range(vocab)]
        special_token_ids = sorted(tokenizer.special_ids)

        def __call__(self, text: bytes) -> list[int]:
            """Tokens of a text whose continuation is certain."""
            ids = tokenizer.encode_within(text.decode())
            exact = b"".join(map(self.tokens.__getitem__, ids)) == text
            return ids if exact else made.greedy_tokenize(text.decode())

    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), n_vocab=vocab, eos_token=ends)
    return made
