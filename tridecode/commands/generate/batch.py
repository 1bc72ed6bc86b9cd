"""`tridecode generate --jsonl`: a file of prompts, one JSON line an answer, resumed where it stopped."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...engine import Engine, Prompt
from ...errors import ParameterError, PromptError, TridecodeError, as_json
from ...sampling import SamplingParams
from ..explain import explain
from ..inputs import DIGITS, check_messages, parse_json, read_file
from ..loading import load_engine
from ..parser import SAMPLING
from ..terminal import Output, did_you_mean, one_line
from .prompts import encoded, reuse, with_system
from .reports import report
from .results import open_results

FIELDS = ("prompt", "messages", "id", *SAMPLING)
LARGEST = 256_000_000  # bytes of the input, all lines together


@dataclass
class Request:
    """A line of the input. key: of its text, so that an answer is never taken for that to another prompt."""

    index: int
    key: str
    prompt: Prompt = ""
    fields: dict = field(default_factory=dict)
    id: object = None
    error: str | None = None

    def entry(self, **values) -> str:
        known = {"index": self.index, "input": self.key} | ({} if self.id is None else {"id": self.id})
        return json.dumps(known | values) + "\n"


def batch(args, output: Output) -> int:
    text = read_file(args.jsonl, output, LARGEST)
    requests = [read_request(i, line, args, output) for i, line in enumerate(text.split("\n")) if line.strip()]
    if not requests:
        raise PromptError(f'{args.jsonl}: no prompts in it; expected lines like {{"prompt": "..."}}')
    keys = {request.index: request.key for request in requests}
    with open_results(args.output, keys, output) as (done, write):
        waiting = [request for request in requests if request.index not in done]
        if not waiting:
            output.note(f"{args.output}: all {len(requests):,} lines are answered")
            return 0
        return answer_all(waiting, len(done), write, args, output)


def answer_all(waiting: list[Request], done: int, write: Callable[[str], None], args, output: Output) -> int:
    counts = {"answered": 0, "failed": 0, "tokens": 0}
    started = time.perf_counter()
    with engine_of(args, waiting, output) as (engine, params):
        try:
            with progress(args, output) as bar:
                task = bar.add_task("answering", total=done + len(waiting), completed=done)
                for request in waiting:
                    write(answer(request, engine, params, args, output, counts))
                    bar.advance(task)
        finally:  # interrupted or not
            words = [f"{counts['answered']:,} answered", f"{counts['failed']:,} failed"]
            words += [f"{done:,} were there already"] if done else []
            left = len(waiting) - counts["answered"] - counts["failed"]
            words += [f"{left:,} left"] if left else []
            seconds = time.perf_counter() - started
            output.note(", ".join(words) + f" · {counts['tokens']:,} tokens in {seconds:,.1f} s")
    return int(counts["failed"] > 0)


@contextmanager
def engine_of(args, waiting: list[Request], output: Output):
    """The engine, if there is a line that needs it."""
    if all(request.error for request in waiting):
        yield None, None
    else:
        yield load_engine(args, output)


def answer(request: Request, engine: Engine, params, args, output: Output, counts: dict) -> str:
    """The line of the answer; what goes wrong with it is that line's alone."""
    found, error = {}, request.error
    if error is None:
        try:
            prompt = encoded(request.prompt, args, engine)
            result = engine.generate(prompt, replace(params, **request.fields), **reuse(args))
            found = report(result, engine)
            error = found.get("error")
            counts["tokens"] += result.usage.completion_tokens
        except (TridecodeError, MemoryError, RuntimeError) as failure:  # RuntimeError: torch's, out of memory too
            error = explain(failure, [name for name in SAMPLING if name not in request.fields])
    if error is None:
        counts["answered"] += 1
        return request.entry(**found)
    counts["failed"] += 1
    output.error(f"{args.jsonl}: line {request.index + 1}: {error}")
    return request.entry(**found | {"error": f"line {request.index + 1}: {error}"})


def read_request(index: int, line: str, args, output: Output) -> Request:
    """A line of the input, checked as far as it can be without the model; what is wrong becomes its error."""
    request = Request(index, hashlib.sha256(line.strip().encode()).hexdigest()[:16])
    try:
        found = parse_json(line, f"line {index + 1}", output)
        if not isinstance(found, dict):
            raise PromptError(f'expected an object like {{"prompt": "..."}}, got {as_json(found)}')
        if not isinstance(found.get("id", ""), (str, int, float)):
            raise PromptError(f"id must be a string or a number, got {as_json(found['id'])}")
        request.id = found.get("id")
        for name in found:
            if name not in FIELDS:
                known = f"known are {', '.join(FIELDS)}"
                raise PromptError(f"unknown field {as_json(name)}; {did_you_mean(name, FIELDS) or known}")
        request.prompt = prompt_of(found, args)
        request.fields = {name: sampling_field(name, found[name]) for name in SAMPLING if name in found}
        SamplingParams(**request.fields)
    except TridecodeError as error:
        request.error = one_line(error).removeprefix(f"line {index + 1}: ")
    return request


def prompt_of(found: dict, args) -> Prompt:
    if ("prompt" in found) == ("messages" in found):
        raise PromptError("expected one of prompt and messages, got " + ("both" if "prompt" in found else "neither"))
    if "messages" in found:
        return with_system(check_messages(found["messages"], "messages"), args, "messages")
    text = found["prompt"]
    if not isinstance(text, str) or not (text if args.raw else text.strip()):
        raise PromptError(f"prompt must be a text that is not empty, got {as_json(text)}")
    return text if args.raw else with_system([{"role": "user", "content": text}], args, "prompt")


def sampling_field(name: str, value):
    """A sampling option as SamplingParams takes it: JSON has only strings as keys."""
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
            raise ParameterError(f'logit_bias must be an object like {{"42": -1.5}}, got {as_json(value)}')
        if (longest := max(map(len, value), default=0)) > DIGITS:
            raise ParameterError(f"logit_bias: a key of {longest:,} digits is no token id")
        return {int(key): bias for key, bias in value.items()}
    lists = {"stop": (str, list), "stop_token_ids": list}
    if not isinstance(value, lists.get(name, object)):
        raise ParameterError(f"{name} must be a list, got {as_json(value)}")
    if name == "ignore_eos" and not isinstance(value, bool):
        raise ParameterError(f"ignore_eos must be true or false, got {as_json(value)}")
    return value


def progress(args, output: Output) -> Progress:
    """A bar on stderr; none where it would stand between the lines of stdout."""
    columns = TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    shows = output.errors.is_terminal and not (output.tty and args.output is None)
    return Progress(
        *columns, console=output.errors, transient=True, disable=not shows, redirect_stdout=False, redirect_stderr=False
    )
