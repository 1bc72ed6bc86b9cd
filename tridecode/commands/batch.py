"""`tridecode generate --jsonl`: a file of prompts, one JSON line an answer, resumed where it stopped."""

import difflib
import hashlib
import json
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..engine import Engine, Prompt
from ..errors import ParameterError, PromptError, TridecodeError
from ..sampling import SamplingParams
from .generate import (
    check_messages,
    encoded,
    naming,
    parse_json,
    read_file,
    report,
    reuse,
    shown,
    text_sink,
    with_system,
)
from .loading import load_engine
from .main import explain
from .parser import SAMPLING
from .terminal import Output

FIELDS = ("prompt", "messages", "id", *SAMPLING)
BEGINS = b'{"index": '  # every line of a result


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
    text = read_file(args.jsonl, output)
    requests = [read_request(i, line, args, output) for i, line in enumerate(text.split("\n")) if line.strip()]
    if not requests:
        raise PromptError(f'{args.jsonl}: no prompts in it; expected lines like {{"prompt": "..."}}')
    done = resume(args.output, requests, output) if args.output is not None else set()
    waiting = [request for request in requests if request.index not in done]
    if not waiting:
        output.note(f"{args.output}: all {len(requests)} lines are answered")
        return 0
    counts = {"answered": 0, "failed": 0, "tokens": 0}
    started = time.perf_counter()
    with append(args.output, output) as write, engine_of(args, waiting, output) as (engine, params):
        try:
            with progress(args, output) as bar:
                task = bar.add_task("answering", total=len(requests), completed=len(done))
                for request in waiting:
                    write(answer(request, engine, params, args, output, counts))
                    bar.advance(task)
        finally:  # interrupted or not
            words = [f"{counts['answered']} answered", f"{counts['failed']} failed"]
            words += [f"{len(done)} were there already"] if done else []
            left = len(waiting) - counts["answered"] - counts["failed"]
            words += [f"{left} left"] if left else []
            seconds = time.perf_counter() - started
            output.note(", ".join(words) + f" · {counts['tokens']} tokens in {seconds:.1f} s")
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
            found, error = report(result, engine), result.error
            counts["tokens"] += result.usage.completion_tokens
        except (TridecodeError, MemoryError, RuntimeError) as failure:  # RuntimeError: torch's, out of memory too
            error = explain(failure)
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
            raise PromptError(f'expected an object like {{"prompt": "..."}}, got {shown(found)}')
        if not isinstance(found.get("id", ""), (str, int, float)):
            raise PromptError(f"id must be a string or a number, got {shown(found['id'])}")
        request.id = found.get("id")
        for name in found:
            if name not in FIELDS:
                near = difflib.get_close_matches(name, FIELDS, n=1)
                meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
                raise PromptError(f"unknown field {shown(name)}; {meant}")
        request.prompt = prompt_of(found, args)
        request.fields = {name: sampling_field(name, found[name]) for name in SAMPLING if name in found}
        SamplingParams(**request.fields)
    except (TridecodeError, ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
        request.error = explain(error).removeprefix(f"line {index + 1}: ")
    return request


def prompt_of(found: dict, args) -> Prompt:
    if ("prompt" in found) == ("messages" in found):
        raise PromptError("expected one of prompt and messages, got " + ("both" if "prompt" in found else "neither"))
    if "messages" in found:
        return with_system(check_messages(found["messages"], "messages"), args, "messages")
    text = found["prompt"]
    if not isinstance(text, str) or not (text if args.raw else text.strip()):
        raise PromptError(f"prompt must be a text that is not empty, got {shown(text)}")
    return text if args.raw else with_system([{"role": "user", "content": text}], args, "prompt")


def sampling_field(name: str, value):
    """A sampling option as SamplingParams takes it: JSON has only strings as keys."""
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
            raise ParameterError(f'logit_bias must be an object like {{"42": -1.5}}, got {shown(value)}')
        return {int(key): bias for key, bias in value.items()}
    lists = {"stop": (str, list), "stop_token_ids": list}
    if not isinstance(value, lists.get(name, object)):
        raise ParameterError(f"{name} must be a list, got {shown(value)}")
    if name == "ignore_eos" and not isinstance(value, bool):
        raise ParameterError(f"ignore_eos must be true or false, got {shown(value)}")
    return value


def resume(path: str, requests: list[Request], output: Output) -> set[int]:
    """Indices that the file of results answers. Failed lines and one that was cut off are taken out of the file.

    A file that holds anything else is refused and stays as it is.
    """
    file = Path(path)
    if not file.is_file():
        return set()
    with naming(path):
        *lines, rest = file.read_bytes().split(b"\n")
    other = "delete it, or give --output another name"
    if not (rest.startswith(BEGINS) or BEGINS.startswith(rest)):
        raise PromptError(f"{path}: its last line is no result of this command; {other}")
    keys = {request.index: request.key for request in requests}
    kept, done = [], set()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            index, key, failed = int(entry["index"]), entry["input"], "error" in entry
        except (ValueError, TypeError, KeyError, RecursionError):
            raise PromptError(f"{path}: line {number} is no result of this command; {other}") from None
        if failed:
            continue
        if keys.get(index) != key:
            raise PromptError(f"{path}: line {number} answers a line that is not in the input; {other}")
        kept.append(line)
        done.add(index)
    if rest or len(kept) < len(lines):
        with text_sink(path, output) as write:
            for line in kept:
                write(line.decode() + "\n")
    return done


@contextmanager
def append(path: str | None, output: Output):
    """Yields the function that writes a line, at once: what is answered stays answered."""
    if path is None:
        yield output.text
        return
    with naming(path):
        file = open(path, "a", encoding="utf-8", newline="\n")

    def write(line: str) -> None:
        with naming(path):
            file.write(line)
            file.flush()

    try:
        yield write
    finally:
        with suppress(OSError):  # all of it was flushed, or has failed already
            file.close()


def progress(args, output: Output) -> Progress:
    """A bar on stderr; none where it would stand between the lines of stdout."""
    columns = TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    shows = output.errors.is_terminal and not (output.tty and args.output is None)
    return Progress(
        *columns, console=output.errors, transient=True, disable=not shows, redirect_stdout=False, redirect_stderr=False
    )
