"""`tridecode generate --jsonl`: answers for a file of prompts, one JSON line each. A stopped batch can be resumed."""

import hashlib
import json
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from ...engine import Engine, Prompt
from ...engine import Request as Handle
from ...errors import PromptError, TridecodeError, as_json
from ...sampling import SamplingParams
from ..explain import explain
from ..graph_stats import show_graph_stats
from ..inputs import DIGITS, parse_object, prompt_field, read_file
from ..loading import load_engine
from ..options import SAMPLING
from ..progress import progress
from ..terminal import Output, counted, echo_disabled, one_line
from .prompts import encoded, report, reuse, with_system
from .results import open_results

LARGEST = 256_000_000  # Maximum bytes of the input.
# Errors that fail one line only. The last one is torch's, which also reports missing memory.
FAILURES = (TridecodeError, MemoryError, RuntimeError)
WAITING = 3  # Number of lines that wait for each slot, so that other slots have work while the oldest answer is long.
FIELDS = ("id", *SAMPLING)  # Fields that a line may have in addition to its prompt.


@dataclass(eq=False)
class Request:
    """A line of the input.

    Attributes:
        index: number of the line, from 0
        key: hash of the line, by which a resumed batch matches answers to prompts
        prompt: the prompt
        fields: sampling parameters of the line
        id: the line's own id
        error: the reason for a failed line
        handle: the engine's request
    """

    index: int
    key: int
    prompt: Prompt = ""
    fields: dict = field(default_factory=dict)
    id: object = None
    error: str | None = None
    handle: Handle | None = None

    @property
    def ended(self) -> bool:
        """Whether the answer is complete or failed. A cancelled request has no line in the results."""
        return self.handle is None or self.handle.finish_reason not in (None, "cancelled")

    def fail(self, error: Exception) -> None:
        """Set the error. It names the fields of the line, or the options if the line does not set them."""
        self.error, self.handle = explain(error, [name for name in SAMPLING if name not in self.fields]), None

    def entry(self, **values) -> str:
        """Return a line of the results: index, key and id of the request, and `values`."""
        known = {"index": self.index, "input": f"{self.key:016x}"} | ({} if self.id is None else {"id": self.id})
        return json.dumps(known | values) + "\n"


class Lines:
    """The nonempty lines of a text. Each becomes a Request only when it is needed."""

    def __init__(self, text: str):
        self._text = text
        self.keys = array("Q", (key_of(line) if line.strip() else 0 for line in split(text)))

    def __len__(self) -> int:
        return len(self.keys) - self.keys.count(0)

    def answered(self, index: int, key: str) -> bool:
        """Return whether line `index` has the hexadecimal `key`."""
        return index < len(self.keys) and self.keys[index] == int(key, 16) > 0

    def requests(self, done: set[int], args, output: Output) -> Iterator[Request]:
        """Yield the lines whose indices are not in `done`."""
        for index, (key, line) in enumerate(zip(self.keys, split(self._text))):
            if key and index not in done:
                yield read_request(index, key, line, args, output)


def split(text: str) -> Iterator[str]:
    """Yield the lines of a text one at a time, because a file may be large. Only newlines end a line."""
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def key_of(line: str) -> int:
    """Return 64 bits of the hash of a line, without the white space around it."""
    return int.from_bytes(hashlib.sha256(line.strip().encode()).digest()[:8])


def read_request(index: int, key: int, text: str, args, output: Output) -> Request:
    """Return the request that a line describes. If the line is invalid, the field `error` of the request is set."""
    request, place = Request(index, key), f"line {index + 1}"
    try:
        line = with_own_names(parse_object(text, place, output))
        # A bool is not allowed, and a fraction might be written in another form later.
        if type(line.get("id", "")) not in (str, int):
            raise PromptError(f"id must be a string or an integer, got {as_json(line['id'])}")
        request.id = line.get("id")
        request.prompt = prompt_of(line, place, args)
        request.fields = {name: sampling_field(name, line[name]) for name in SAMPLING if name in line}
        SamplingParams(**request.fields)
    except TridecodeError as error:
        request.error = one_line(error).removeprefix(f"{place}: ")
    return request


def with_own_names(line: dict) -> dict:
    """Return a line with the names of this command. A line of OpenAI's Batch API contains the request as its body."""
    body = line.get("body")
    if not isinstance(body, dict) or not line.keys() <= {"custom_id", "method", "url", "body"}:
        return line
    own = {"max_completion_tokens": "max_tokens"}
    body = {own.get(name, name): value for name, value in body.items() if name != "model"}
    return body | ({"id": line["custom_id"]} if "custom_id" in line else {})


def prompt_of(line: dict, place: str, args) -> Prompt:
    """Return the prompt of a parsed line. Raises PromptError."""
    kind = prompt_field(line, place, FIELDS)
    prompt = line[kind]
    if kind == "prompt_ids":
        if args.system is not None:
            raise PromptError("prompt_ids: --system needs a chat; leave out one of them")
        return prompt
    if kind == "prompt" and args.raw:
        return prompt
    if kind == "prompt" and not prompt.strip():
        raise PromptError(f"prompt must be a nonempty string, got {as_json(prompt)}")
    messages = prompt if kind == "messages" else [{"role": "user", "content": prompt}]
    return with_system(messages, args, place)


def sampling_field(name: str, value):
    """Return a sampling option as SamplingParams takes it: JSON has only strings as keys."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if key.isdecimal() and len(key) <= DIGITS else key: bias for key, bias in value.items()}
    return value


def batch(args, output: Output, load: Callable = load_engine) -> int:
    """Answer the lines of --jsonl and return the exit code, 1 if a line failed.

    `load(args, output)` returns the engine and the sampling parameters.
    """
    lines = Lines(read_file(args.jsonl, output, LARGEST))
    if not len(lines):
        raise PromptError(f'{args.jsonl}: contains no prompts; expected lines like {{"prompt": "..."}}')
    with open_results(args.output, lines.answered, output) as (done, write):
        left = len(lines) - len(done)
        if not left:
            subject = "the line is" if len(lines) == 1 else f"all {len(lines):,} lines are"
            output.note(f"{args.output}: {subject} answered")
            return 0
        answers = Answers(args, output, write, left, len(done))
        try:
            answers.run(lines.requests(done, args, output), load)
        finally:  # This also runs after an interrupt.
            output.note(answers.summary())
            if args.graph_stats and answers.loaded:
                show_graph_stats(answers.engine, output)
    return int(answers.failed > 0)


class Answers:
    """A batch that answers lines.

    It writes the answers in the order of the lines, or with --unordered in the order of their ends.

    It submits as many lines as there are slots and places in the queue. If a signal ends it early, finished answers are
    written, and the others are cancelled.
    """

    def __init__(self, args, output: Output, write: Callable[[str], None], left: int, before: int):
        self._args, self._output, self._write = args, output, write
        self._left, self._before = left, before
        self.engine: Engine  # This attribute exists if `loaded` is True.
        self._params: SamplingParams
        self.loaded = False
        self.answered = self.failed = self.tokens = 0
        self.cut: Counter[str | None] = Counter()  # Number of answers by the limit that ended them.
        self._running: deque[Request] = deque()
        self._started = time.perf_counter()

    def run(self, requests: Iterator[Request], load: Callable) -> None:
        """Answer the requests. load(args, output) is called at the first line that needs the engine."""
        for first in requests:
            if first.error is None:
                break
            self._put(first, self._failed(first, {}))
        else:
            return
        self.engine, self._params = load(self._args, self._output)
        self.loaded = True
        self._started = time.perf_counter()
        limit = self.engine.slots + (self._args.max_queue or WAITING * self.engine.slots)
        # A progress bar would appear between the lines of stdout.
        between = self._output.tty and self._args.output is None
        bar = progress("answering", self._output, self.rate, shows=not between)
        task = bar.add_task("answering", total=self._before + self._left, completed=self._before + self.failed)
        try:
            with bar, echo_disabled(not bar.disable, bar.stop, bar.start):
                for request in chain([first], requests):
                    self._running.append(self._begin(request))
                    while len(self._running) >= limit:
                        self._end_one()
                        bar.advance(task)
                while self._running:
                    self._end_one()
                    bar.advance(task)
        except (KeyboardInterrupt, SystemExit):
            for each in self._running:
                if each.ended:
                    self._put(each, self._line(each))
            raise
        finally:
            for each in self._running:
                if each.handle is not None and not each.ended:
                    each.handle.cancel()

    def _begin(self, request: Request) -> Request:
        if request.error is None:
            try:
                prompt = encoded(request.prompt, self._args, self.engine)
                params = replace(self._params, **request.fields)
                request.handle = self.engine.submit(prompt, params, **reuse(self._args))
            except FAILURES as error:
                request.fail(error)
        return request

    def _end_one(self) -> None:
        """Wait for the next answer and write it."""
        request = self._first_ended() if self._args.unordered else self._running[0]
        line = self._line(request)
        self._running.remove(request)
        self._put(request, line)

    def _put(self, request: Request, line: str) -> None:
        """Write a line, and count it after it is written."""
        self._write(line)
        if request.error is None:
            self.answered += 1
        else:
            self.failed += 1

    def _first_ended(self) -> Request:
        """Wait until one of the oldest requests has ended, and return it. The oldest requests occupy the slots."""
        oldest = list(islice(self._running, self.engine.slots))
        if not any(each.ended for each in oldest):
            with suppress(*FAILURES):  # The next result() raises the error as an error of its line.
                self.engine.wait([each.handle for each in oldest if each.handle is not None])
        return next((each for each in oldest if each.ended), oldest[0])

    def _line(self, request: Request) -> str:
        """Wait for an answer and return its line. An error fails only that line."""
        values = {}
        if request.handle is not None:
            try:
                result = request.handle.result()
                max_tokens = replace(self._params, **request.fields).max_tokens
                values = report(result, self.engine, max_tokens)
                self.cut.update([values["cut_by"]])
                self.tokens += result.usage.completion_tokens
                request.error = values.get("error")
            except FAILURES as error:
                request.fail(error)
        return request.entry(**values) if request.error is None else self._failed(request, values)

    def _failed(self, request: Request, values: dict) -> str:
        self._output.error(f"{self._args.jsonl}: line {request.index + 1}: {request.error}")
        return request.entry(**values | {"error": f"line {request.index + 1}: {request.error}"})

    def summary(self) -> str:
        """Return the line that ends a batch: the numbers of lines and tokens, and the seconds."""
        words = [f"{self.answered:,} answered", f"{self.failed:,} failed"]
        words += [f"{self._before:,} already answered"] if self._before else []
        left = self._left - self.answered - self.failed
        words += [f"{left:,} left"] if left else []
        words += [f"{self.cut[by]:,} cut by {by}" for by in ("max_tokens", "context") if self.cut[by]]
        seconds = time.perf_counter() - self._started
        return ", ".join(words) + f" · {counted(self.tokens, 'token')} in {seconds:,.1f} s"

    def rate(self) -> float:
        """Return tokens per second, including unfinished answers, for the thread of the progress bar."""
        handles = [each.handle for each in list(self._running)]
        tokens = self.tokens + sum(handle.completion_tokens for handle in handles if handle)
        return tokens / (time.perf_counter() - self._started)
