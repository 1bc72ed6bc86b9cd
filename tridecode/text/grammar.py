"""Grammars for structured output, compiled by llguidance.

The source of a grammar is a JSON schema, a regular expression, a list of choices or a grammar in Lark's format. A
Grammar is compiled once, on trial in a child process with limits and then in this process. Each request has its own
Matcher, which computes a mask after each token: one bit for each token of the vocabulary, set if the grammar allows the
token next.
"""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..arguments import shown
from ..errors import EngineClosed, GenerationError, ParameterError, brief, conflict
from ..sampling import SamplingParams
from .sandbox import Program, Sandbox, SandboxError
from .schema import MAX_NUMBER, response_schema
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
CACHE_SIZE = 64  # Maximum compiled grammars in memory.
CACHE_BYTES = 512 << 20  # Maximum bytes of the compiled grammars in memory, if there are several.
# JSON is on one line, as most programs write it. If any white space were allowed, a model could write it without end.
JSON_LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_LITERALS = 1000  # Maximum alternatives that are literals of a grammar. llguidance limits them to 2,000.
MAX_DEPTH = 200  # Maximum nesting of lists and objects in a JSON schema.
STACK_BYTES = 1 << 30  # Address space for the stack of a thread that compiles a grammar.
CPU_SECONDS, SECONDS = 10, 30.0  # Limits of a compilation: CPU time and time in seconds.
MEMORY = 256 << 20  # Bytes of memory for a compilation.
CHILD_BYTES = 256 << 20  # Bytes of address space of a child process before it compiles, without the stack.
MAX_CHILDREN = 4  # Maximum number of grammars that are compiled on trial at the same time.
REFUSAL_SECONDS = 600.0  # Seconds for which a grammar that exceeds a limit is not compiled again.


class TooCostly(ParameterError):
    """The compilation of a grammar exceeds a limit.

    Attributes:
        until: value of time.monotonic() until which the grammar is not compiled again.
    """

    def __init__(self, message: str, argument: str):
        super().__init__(message, argument, "range")
        self.until = time.monotonic() + REFUSAL_SECONDS


class Grammars:
    """A compiler of grammars for one model, with a cache.

    Args:
        tokenizer: the tokenizer of the engine, or None. Then every grammar is refused.
        vocab_size: number of token ids of the model.
        stop_ids: ids of the tokens that end a text.
        open_objects: see EngineOptions.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: Sequence[int], open_objects: bool = False
    ):
        self._open_objects = open_objects
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, tuple(stop_ids)
        self._lock = threading.Lock()
        # (parameter, source) -> grammar, in the order of last use.
        self._grammars: dict[tuple[str, str], Future[Grammar]] = {}
        self._vocabulary: Future | None = None  # The result is an llguidance.LLTokenizer.
        self._closed = False
        self._sandbox = Sandbox(
            Program(
                "tridecode.text.grammar_worker:compiler", partial(_setup, tokenizer, vocab_size),
                memory=STACK_BYTES + CHILD_BYTES + MEMORY, seconds=SECONDS, max_answer_bytes=1 << 20,
                stack=STACK_BYTES, max_children=MAX_CHILDREN,
            )
        )  # fmt: skip

    def start(self) -> None:
        """Start a child process, and convert the vocabulary for llguidance in the background.

        The conversion takes half a second for 150,000 tokens.
        """
        with self._lock:
            if self._vocabulary is None and self._tokenizer is not None:
                self._vocabulary = in_deep_thread(vocabulary, self._tokenizer, self._vocab_size, self._stop_ids)
                self._sandbox.start()

    def wait(self) -> None:
        """Wait for the child process and the vocabulary if `start` was called. Errors appear at the first grammar."""
        if self._vocabulary is not None:
            self._vocabulary.exception()
            self._sandbox.wait()

    def close(self) -> None:
        """End the child processes. Compilations in progress and later calls raise EngineClosed."""
        self._closed = True
        self._sandbox.close()
        with self._lock:
            self._grammars.clear()
            self._vocabulary = None

    def of(self, params: SamplingParams) -> "Grammar | None":
        """Return the grammar of `params`; None if they have no response format.

        A caller waits only for its own grammar. Callers that request the same grammar share one compilation.

        Raises:
            ParameterError: the grammar cannot be compiled, or its compilation exceeds a limit.
            EngineClosed: `close` was called.
        """
        if (key := params.structure) is None:
            return None
        with self._lock:
            if self._closed:
                raise EngineClosed
            grammar = self._grammars.pop(key, None)
            if grammar is None or _can_be_retried(grammar):
                grammar = in_deep_thread(self._compile, *key)
            self._grammars[key] = grammar
        try:
            return grammar.result()
        finally:
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used grammars that exceed the limits of the cache."""
        with self._lock:
            # A grammar without result has no known size.
            sizes = [one.result().size if one.done() and not one.exception() else 0 for one in self._grammars.values()]
            total, count = sum(sizes), len(sizes)
            for key, size in zip([*self._grammars], sizes):
                if count <= CACHE_SIZE and (total <= CACHE_BYTES or count == 1):
                    return
                del self._grammars[key]
                total, count = total - size, count - 1

    def _compile(self, name: str, source: str) -> "Grammar":
        """Compile a grammar. Every error becomes a ParameterError."""
        try:
            return self.compiled(name, source)
        except (ParameterError, EngineClosed):
            raise
        except GenerationError as error:
            raise ParameterError(f"{name}: {error}", name, "type") from None
        except BaseException as error:  # A panic of llguidance is not an Exception.
            message = f"{name} cannot be compiled: {type(error).__name__}: {brief(error)}"
            raise ParameterError(message, name, "type") from error

    def compiled(self, name: str, source: str) -> "Grammar":
        """Compile a grammar in the calling thread.

        Args:
            name: the field of SamplingParams that contains the source.
            source: the text of that field; choices as a JSON list.
        """
        if self._tokenizer is None:
            raise conflict(name, " needs a tokenizer, but this engine has none")
        try:
            from llguidance import LLMatcher

            from .grammar_worker import LIMITS
        except ModuleNotFoundError:
            raise conflict(name, " needs the package llguidance; install it: pip install llguidance") from None
        if name == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(
                exact_schema(json.loads(source), self._open_objects), overrides=JSON_LAYOUT
            )
        elif name == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        else:
            lark = check_lark(source) if name == "grammar" else choices_grammar(json.loads(source))
            grammar = LLMatcher.grammar_from_lark(lark)
        self.start()
        error, size = self._try(name, grammar)
        if not error:
            if (vocabulary := self._vocabulary) is None:
                raise EngineClosed
            matcher = LLMatcher(vocabulary.result(), grammar, log_level=0, limits=LIMITS)
            error = matcher.get_error()
        if error:
            gbnf = name == "grammar" and "::=" in source
            fix = "; grammars use Lark's syntax, not GBNF: a rule is name: ..." if gbnf else ""
            raise ParameterError(f"{name}: {shorten_error(error)}{fix}", name, "type")
        return Grammar(matcher, self._vocab_size, size)

    def _try(self, name: str, grammar: str) -> tuple[str, int]:
        """Compile a grammar of llguidance in a child process; return its error ("" for none) and its size in bytes."""
        try:
            return self._sandbox.call(grammar, SECONDS, CPU_SECONDS)
        except SandboxError as error:
            if self._closed:
                raise EngineClosed from None
            if error.kind or not error.ready:
                reason = f"{error.kind}: {error}" if error.kind else str(error)
                raise ParameterError(f"{name} cannot be compiled: {reason}", name, "type") from None
            limits = f"{CPU_SECONDS} s, or more than {MEMORY >> 20} MiB of memory"
            raise TooCostly(f"{name}: its compilation takes more than {limits}; simplify it", name) from None


def _setup(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, dict[int, str]]:
    """Return the setup of a child process; see grammar_worker.compiler."""
    assert tokenizer is not None
    return vocab_size, {i: tokenizer.token_bytes(i).decode() for i in tokenizer.special_ids if i < vocab_size}


def _can_be_retried(grammar: "Future[Grammar]") -> bool:
    """Return whether a compilation has failed and may be repeated."""
    error = grammar.exception() if grammar.done() else None
    return error is not None and not (isinstance(error, TooCostly) and time.monotonic() < error.until)


def in_deep_thread(work: Callable[..., T], *args) -> Future[T]:
    """Call work(*args) in a thread with a large stack.

    llguidance recurses as deep as a grammar is nested, and a stack overflow would end the process.
    """
    done: Future[T] = Future()

    def run():
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(
                target=run, name="grammar", daemon=True
            ).start()  # The process does not wait for a daemon thread at exit.
        finally:
            threading.stack_size(usual)
    return done


_starting = threading.Lock()  # threading.stack_size sets a global value.


class Grammar:
    """A compiled grammar.

    Attributes:
        first: mask of the first token of an answer, int32 [words]; see layout.mask_words.
        size: memory of the grammar in bytes, estimated.
    """

    def __init__(self, matcher, vocab_size: int, size: int = 0):
        self._matcher, self._vocab_size, self._lock = matcher, vocab_size, threading.Lock()
        self.size = size
        self.first = self.matcher(()).allowed()

    def matcher(self, sampled: Sequence[int]) -> "Matcher":
        """Return a new matcher for a request that has these output tokens so far. Raises GenerationError."""
        with self._lock:
            own = self._matcher.deep_copy()
        matcher = Matcher(own, self._vocab_size)
        for token in sampled:
            matcher.accept(token)
        return matcher


class Matcher:
    """The state of one answer in its grammar."""

    def __init__(self, matcher, vocab_size: int):
        self._matcher, self._words = matcher, -(-vocab_size // 32)

    def accept(self, token: int) -> bool:
        """Append a token to the answer; return whether the answer ends with it. Raises GenerationError."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """Compute the mask of the next token, int32 [words]. Raises GenerationError."""
        mask = np.empty(self._words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"the grammar cannot be enforced: {brief(self._matcher.get_error())}")


# ---- numbers

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ANNOTATIONS = ("default", "examples")  # Keywords that do not restrict an answer.
# The direction in which a bound becomes stricter.
_TIGHTER = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
# For schemas within Lark. `exact_schema` removes annotations, but a $ref may refer to one. After this renaming, the
# check includes them.
_LARK_SCHEMA_DECODER = json.JSONDecoder(
    object_hook=lambda made: {f"${k}" if k in _ANNOTATIONS else k: v for k, v in made.items()}
)


def exact_schema(schema, open_objects: bool = False):
    """Return the schema that an answer follows, with numbers that llguidance represents exactly.

    It uses doubles and 64-bit integers. If a bound is not representable, the next tighter representable bound replaces
    it. See `response_schema` for the meaning of other keywords.

    Raises:
        ParameterError: a number is not representable, and no tighter bound is.
    """
    return response_schema(_exact_value("json_schema", schema), open_objects)


def check_lark(lark: str) -> str:
    """Return a grammar in Lark's format unchanged. Raises ParameterError if `exact_schema` refuses a schema in it.

    With some of these schemas llguidance recurses without end, which would end the process.
    """
    for match in re.finditer(r"%json\s*", lark):
        try:
            schema = _LARK_SCHEMA_DECODER.raw_decode(lark, match.end())[0]
        except (ValueError, RecursionError):  # llguidance reports the error.
            continue
        try:
            exact_schema(schema)
        except ParameterError as error:
            raise ParameterError(f"grammar: a %json block is not supported: {error}", "grammar", "type") from None
    return lark


def _exact_value(place: str, value, depth: int = MAX_DEPTH):
    """Return a part of a schema in the form that `exact_schema` returns.

    `place` is the name of its key, for messages.
    """
    _check_depth(depth)
    if isinstance(value, list):
        return [_exact_value(place, item, depth - 1) for item in value]
    if not isinstance(value, dict):
        return _check_magnitude(place, value)
    made = {}
    for name, item in value.items():
        if name in ("enum", "const"):
            made[name] = _check_constant(item, depth - 1)
        elif name in _TIGHTER and _number(item):
            made[name] = _tightened(name, item)
        elif name in _SCHEMAS_BY_NAME and isinstance(item, dict):
            made[name] = {key: _exact_value(name, schema, depth - 1) for key, schema in item.items()}
        elif name == "oneOf" and "anyOf" not in value and _distinct_constants(item):
            made["anyOf"] = _exact_value(name, item, depth - 1)  # No value fits two of them.
        elif name not in _ANNOTATIONS:
            made[name] = _exact_value(name, item, depth - 1)
    return made


def _distinct_constants(schemas) -> bool:
    """Return whether each of the schemas allows one constant, and no two of them the same."""
    if not isinstance(schemas, list) or not all(isinstance(each, dict) and "const" in each for each in schemas):
        return False
    constants = {json.dumps(each["const"], sort_keys=True) for each in schemas}
    numbers = {float(each["const"]) for each in schemas if _number(each["const"])}  # 1 equals 1.0.
    return len(constants) == len(schemas) and len(numbers) == sum(_number(each["const"]) for each in schemas)


def _number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_magnitude(place: str, value):
    """Return `value`. Raises ParameterError if it is a number of more than 63 bits."""
    if _number(value) and abs(value) > MAX_NUMBER:
        raise _refused(f"{place}: numbers of up to 63 bits are supported, got {shown(value)}")
    return value


def _check_constant(value, depth: int):
    """Return `value`, a constant in a schema. Raises ParameterError if a number in it is not representable."""
    _check_depth(depth)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_constant(item, depth - 1)
    if _number(value) and (abs(value) > MAX_NUMBER or int(float(value)) != int(value)):
        raise _refused(f"the number {shown(value)} is too large to be represented exactly; use a smaller number")
    return value


def _check_depth(depth: int) -> None:
    """Raise ParameterError if no further level of nesting is allowed."""
    if depth == 0:
        raise _refused(f"lists and objects are nested more than {MAX_DEPTH} deep")


def _tightened(name: str, value):
    """Return a bound that is representable: `value`, or the next tighter number."""
    direction = _TIGHTER[name]
    value = _check_magnitude(name, max(value, -MAX_NUMBER) if direction > 0 else min(value, MAX_NUMBER))
    if isinstance(value, float):
        return value
    rounded = float(value)
    if (int(rounded) - value) * direction < 0:
        rounded = math.nextafter(rounded, direction * math.inf)
    return int(rounded)


def _refused(message: str) -> ParameterError:
    return ParameterError(f"json_schema: {message}", "json_schema", "range")


# ---- conversions for llguidance


def shorten_error(message: str) -> str:
    """Return an error message of llguidance without its excerpt of the grammar and the stack of a panic."""
    message = message.partition("<backtrace>")[0]
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: |\s*<non-verbose/>", "", "\n".join(lines))
    text = re.sub(r"Unsatisfiable schema(?=: )", "no text fits this schema", text)
    return brief(re.sub(r"oneOf constraints are not .*", "oneOf: a value may fit two of them; use anyOf", text))


def choices_grammar(choices: Sequence[str]) -> str:
    """Return a Lark grammar that allows exactly one of `choices`."""
    if len(choices) > MAX_LITERALS:
        escaped = (re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):x}}}", choice) for choice in choices)
        return f"start: /{'|'.join(escaped)}/"
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "start: " + " | ".join(literals).replace("\x7f", "\\u007f")  # llguidance refuses an unescaped DEL.


def vocabulary(tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
    """Return an llguidance.LLTokenizer. Ids of the model that are not in the tokenizer have no bytes.

    Raises:
        ParameterError: no token ends a text.
    """
    from .grammar_worker import Vocabulary

    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ends = [token for token in stop_ids if token < vocab_size] or [*eos]
    if not ends:
        raise ParameterError("structured output needs a token that ends a text, but this model has no such token")

    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [*map(tokenizer.token_bytes, range(known)), *[b""] * (vocab_size - known)]
    special = sorted(tokenizer.special_ids)
    greedy = cache(Vocabulary(tokens, special, ends, lambda text: []).converted)

    def encode(text: bytes) -> list[int]:
        ids = tokenizer.encode_within(text.decode())
        lossless = b"".join(map(tokens.__getitem__, ids)) == text
        return ids if lossless else greedy().greedy_tokenize(text.decode())

    return Vocabulary(tokens, special, ends, encode).converted()
