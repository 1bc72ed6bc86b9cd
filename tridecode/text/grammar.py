"""Grammars by llguidance: the form of an answer, from a JSON schema, a regular expression, choices or Lark.

A Grammar is compiled once. Each request follows it with a Matcher of its own, which returns after every token which
tokens may come next, as bits over the vocabulary.
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
KEPT = 64  # compiled grammars
# JSON as most programs write it, on one line: a model that may write any white space can write it for ever.
LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STATES = 50_000  # of a lexer, of 1 to 2 kB each
STACK = 1 << 30  # bytes of address space for the stack of a thread that compiles


class Grammars:
    """Compiles grammars for the tokens of one model.

    Args:
        stop_ids: the tokens that end its texts.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, tuple(stop_ids)
        self._lock = threading.Lock()
        self._grammars: dict[tuple[str, str], Future[Grammar]] = {}  # by name and source; the last used is the last
        self._vocabulary: Future | None = None  # an llguidance.LLTokenizer

    def start(self) -> None:
        """Build llguidance's form of the vocabulary in the background: half a second for 150,000 tokens."""
        with self._lock:
            if self._vocabulary is None and self._tokenizer is not None:
                self._vocabulary = in_deep_thread(vocabulary, self._tokenizer, self._vocab_size, self._stop_ids)

    def wait(self) -> None:
        """Wait for the vocabulary if `start` was called. The first grammar reports its errors."""
        if self._vocabulary is not None:
            self._vocabulary.exception()

    def of(self, params: SamplingParams) -> "Grammar | None":
        """Return the grammar of `params`, None if they have no form.

        A caller waits for its own grammar only. Callers that request the same one wait for one compilation.

        Raises:
            ParameterError: the grammar cannot be compiled.
        """
        if (form := params.structure) is None:
            return None
        with self._lock:
            grammar = self._grammars.pop(form, None)
            if grammar is None or grammar.done() and grammar.exception():
                grammar = in_deep_thread(self._compile, *form)
            self._grammars[form] = grammar
            if len(self._grammars) > KEPT:
                del self._grammars[next(iter(self._grammars))]
        return grammar.result()

    def _compile(self, name: str, source: str) -> "Grammar":
        try:
            return self.compiled(name, source)
        except ParameterError:
            raise
        except GenerationError as error:
            raise ParameterError(f"{name}: {error}", name, "type") from None
        except BaseException as error:  # a panic of llguidance is not an Exception
            message = f"{name} cannot be compiled: {type(error).__name__}: {brief(error)}"
            raise ParameterError(message, name, "type") from error

    def compiled(self, name: str, source: str) -> "Grammar":
        """Compile a grammar in the calling thread.

        Args:
            name: the field of SamplingParams that has it.
        """
        if self._tokenizer is None:
            raise conflict(name, " needs a tokenizer, and this engine has none")
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError:
            raise conflict(name, " needs the package llguidance; install it: pip install llguidance") from None
        if name == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(exact(json.loads(source)), overrides=LAYOUT)
        elif name == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        else:
            lark = checked(source) if name == "grammar" else lark_of_choices(json.loads(source))
            grammar = LLMatcher.grammar_from_lark(lark)
        self.start()
        assert self._vocabulary is not None
        limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary.result(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ParameterError(f"{name}: {reason(matcher.get_error())}", name, "type")
        return Grammar(matcher, self._vocab_size)


def in_deep_thread(work: Callable[..., T], *args) -> Future[T]:
    """Call work(*args) in a thread with a large stack.

    llguidance recurses as deep as a grammar is nested, and the end of a stack ends the process.
    """
    done: Future[T] = Future()

    def run():
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()  # the process does not wait for it
        finally:
            threading.stack_size(usual)
    return done


_starting = threading.Lock()  # threading.stack_size is global


class Grammar:
    """A compiled grammar.

    Attributes:
        first: the mask of an answer's first token, int32 [words]; see layout.mask_words.
    """

    def __init__(self, matcher, vocab_size: int):
        self._matcher, self._vocab_size, self._lock = matcher, vocab_size, threading.Lock()
        self.first = self.matcher(()).allowed()

    def matcher(self, sampled: Sequence[int]) -> "Matcher":
        """Return the matcher of a request with these tokens so far. Raises GenerationError."""
        with self._lock:
            own = self._matcher.deep_copy()
        matcher = Matcher(own, self._vocab_size)
        for token in sampled:
            matcher.accept(token)
        return matcher


class Matcher:
    """The place of one answer in its grammar."""

    def __init__(self, matcher, vocab_size: int):
        self._matcher, self._words = matcher, -(-vocab_size // 32)

    def accept(self, token: int) -> bool:
        """Accept the token; return whether the answer ends there. Raises GenerationError."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """Return the mask of the next token, int32 [words]. Raises GenerationError."""
        mask = np.empty(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"the grammar cannot be followed: {brief(self._matcher.get_error())}")


# ---- numbers

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # objects by name
_UNREAD = ("default", "examples")  # hold no part of an answer
_INWARD = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_MOST = 2**63 - 1024  # the largest that floating point and 64 bits both hold
# A $ref may lead to what `exact` leaves out.
_ALL_READ = json.JSONDecoder(object_hook=lambda made: {f"${k}" if k in _UNREAD else k: v for k, v in made.items()})


def exact(schema):
    """Return a JSON schema with numbers that llguidance holds, which has floating point and integers of 64 bits.

    Bounds that it cannot hold become the next tighter ones that it can.

    Raises:
        ParameterError: another number would change its value.
    """
    try:
        return _exact("json_schema", schema)
    except RecursionError:
        raise _refused("lists and objects in it are nested too deeply") from None


def checked(lark: str) -> str:
    """Return a text in Lark. Raises ParameterError if `exact` refuses a schema in it.

    Some of those llguidance follows for ever, and ends the process.
    """
    for found in re.finditer(r"%json\s*", lark):
        try:
            schema = _ALL_READ.raw_decode(lark, found.end())[0]
        except (ValueError, RecursionError):  # llguidance reports it
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
            made[name] = _distinct(item)
        elif name in _INWARD and _number(item):
            made[name] = _tightened(name, item)
        elif name in _NAMED and isinstance(item, dict):
            made[name] = {key: _exact(name, schema) for key, schema in item.items()}
        elif name not in _UNREAD:
            made[name] = _exact(name, item)
    return made


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _held(place: str, value):
    if _number(value) and abs(value) > _MOST:
        raise _refused(f"{place}: numbers of up to 63 bits are supported, got {shown(value)}")
    return value


def _distinct(value):
    """Check a value that an answer may be."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _distinct(item)
    if _number(value) and (abs(value) > _MOST or int(float(value)) != int(value)):
        raise _refused(f"the number {shown(value)} is too large to be told from its neighbours")
    return value


def _tightened(name: str, value):
    inward = _INWARD[name]
    value = _held(name, max(value, -_MOST) if inward > 0 else min(value, _MOST))
    if isinstance(value, float):
        return value
    held = float(value)
    if (int(held) - value) * inward < 0:
        held = math.nextafter(held, inward * math.inf)
    return int(held)


def _refused(message: str) -> ParameterError:
    return ParameterError(f"json_schema: {message}", "json_schema", "range")


# ---- text for llguidance, and from it


def reason(message: str) -> str:
    """Return llguidance's error without the grammar around the place."""
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", "\n".join(lines))
    return brief(re.sub(r"oneOf constraints are not .*", "oneOf: a value may fit two of them; use anyOf", text))


def lark_of_choices(choices: Sequence[str]) -> str:
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "start: " + " | ".join(literals).replace("\x7f", "\\u007f")  # llguidance accepts no raw one


def vocabulary(tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
    """Return an llguidance.LLTokenizer. Tokens that the tokenizer lacks have no bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ends = [token for token in stop_ids if token < vocab_size] or [*eos]
    if not ends:
        raise ParameterError("this model has no token that ends a text: no grammar can be followed")

    known = min(vocab_size, tokenizer.vocab_size)

    class Vocabulary:
        eos_token_id, bos_token_id = ends[0], None
        tokens = [*map(tokenizer.token_bytes, range(known)), *[b""] * (vocab_size - known)]
        special_token_ids = sorted(tokenizer.special_ids)

        def __call__(self, text: bytes) -> list[int]:
            """Return the tokens of a text whose continuation is certain."""
            ids = tokenizer.encode_within(text.decode())
            exact = b"".join(map(self.tokens.__getitem__, ids)) == text
            return ids if exact else made.greedy_tokenize(text.decode())

    made = LLTokenizer(TokenizerWrapper(Vocabulary()), n_vocab=vocab_size, eos_token=ends)
    return made
