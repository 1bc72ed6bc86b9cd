"""`tridecode generate`: one prompt, one answer or several."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ...engine import Engine, Prompt, Request
from ...errors import GenerationError
from ...results import OutputChunk, Result
from ...sampling import STRUCTURE_CHARACTERS, random_seed
from ..explain import explain, option
from ..graph_stats import show_graph_stats
from ..inputs import clean, read_file
from ..loading import load_engine
from ..outputs import STDOUT, text_sink
from ..signals import suspendable
from ..terminal import Output, both, cut_words, speed_line
from ..waiting import Waiting
from ..wrapping import Wrapped
from .batch import batch
from .prompts import encoded, read_prompt, report, reuse
from .remote import LOCAL, generate_remotely

MAX_STRUCTURE_BYTES = 4 * STRUCTURE_CHARACTERS  # Maximum bytes of a schema or a grammar.


def generate(args, output: Output) -> int:
    """Run `tridecode generate`. Return the exit code."""
    check_options(args)
    output.quiet = args.quiet
    if args.system is not None:
        args.system = clean(args.system, "--system", output)
    for name in ("json_schema", "grammar"):
        file = getattr(args, name)
        if file is not None and not (name == "json_schema" and file.lstrip().startswith("{")):
            setattr(args, name, read_file(file, output, MAX_STRUCTURE_BYTES))
            args.origins[name] = f"{file}, which {args.origins[name]} names" if name in args.origins else file
    if args.jsonl is not None:
        return batch(args, output)
    prompt = read_prompt(args, output)
    if args.url is not None:
        return generate_remotely(args, prompt, output, seeded, write_text)
    # The file is opened first. So a wrong name fails before the model is loaded.
    with text_sink(args.output, output) as write:
        engine, params = load_engine(args, output)
        prompt = encoded(prompt, args, engine)
        failed = 0
        for i, (seed, request) in enumerate(submitted(engine, prompt, seeded(params, args.n), **reuse(args))):
            if args.n > 1 and not args.json:
                output.note(f"answer {i + 1:,} of {args.n:,}, seed {seed}")
            waiting = Waiting(output, engine.scheduler.reading)
            last: OutputChunk | Result
            if args.json:
                with waiting:
                    last = request.result()
                write(json.dumps(report(last, engine, params.max_tokens)) + "\n")
            else:
                shows = output.tty and args.output is None
                last = write_text(request, Wrapped(output.console, write) if shows else write, waiting)
                if last.finish_reason != "error":
                    output.note(
                        speed_line(last.usage, last.timings) + cut_words(last, params.max_tokens, engine.capacity)
                    )
            if last.finish_reason == "error":
                failed += 1
                if failed == args.n:
                    raise GenerationError(last.error)  # There is no answer. An existing file stays unchanged.
                output.error(explain(GenerationError(last.error)))
        if args.graph_stats:
            show_graph_stats(engine, output)
    return int(failed > 0)


def check_options(args) -> None:
    """Exit with the error of a wrong option if options contradict each other."""
    if args.output in STDOUT:  # These values of the option have the same effect as its absence.
        args.output = None
    if args.question is not None:
        if any(getattr(args, name) is not None for name in ("prompt", "prompt_ids", "messages", "jsonl")):
            args.refuse(f"there are two prompts, one is {args.question!r}; put a prompt of several words in quotes")
        args.prompt = args.question
    if args.logprobs is not None and not args.json and args.jsonl is None:
        args.refuse("--logprobs needs --json")
    if args.max_queue is not None and args.jsonl is None:
        args.refuse("--max-queue needs --jsonl")
    if args.max_queue == 0:
        args.refuse("--max-queue must be at least 1 for --jsonl")
    if args.system is not None and (args.raw or args.prompt_ids is not None):
        args.refuse(f"--system needs a chat; leave out {'--raw' if args.raw else '--prompt-ids'}")
    if args.url is not None and (name := next((each for each in LOCAL if getattr(args, each)), None)):
        args.refuse(f"{option(name)} needs an engine in this process; leave out it or --url")
    if args.url is None and args.api_key_file is not None and "api_key_file" not in args.origins:
        args.refuse("--api-key-file needs --url")
    source = args.messages if args.jsonl is None else args.jsonl
    if source is not None and args.output is not None and os.path.realpath(source) == os.path.realpath(args.output):
        args.refuse(f"--output would overwrite the input {source}; give it another name")


def seeded(params, n: int) -> Iterator:
    """Return the parameters of `n` answers, with the seeds seed, seed + 1, ... All are checked first."""
    if n == 1:
        return iter([params])
    first = random_seed(n) if params.seed is None else params.seed
    replace(params, seed=first + n - 1)
    return (replace(params, seed=first + i) for i in range(n))


def submitted(engine: Engine, prompt: Prompt, several: Iterable, **options) -> Iterator[tuple[int | None, Request]]:
    """Yield (seed, request) for each answer in order. The number of running requests is the number of slots."""
    running: deque[tuple[int | None, Request]] = deque()
    for params in several:
        running.append((params.seed, engine.submit(prompt, params, **options)))
        if len(running) == engine.slots:
            yield running.popleft()
    yield from running


def write_text(request: Request, write: Callable[[str], None], waiting: Waiting) -> OutputChunk:
    """Write the text as it arrives. Returns the last chunk. An incomplete line is always ended."""
    wrote = False
    resume = write.continue_line if isinstance(write, Wrapped) else lambda: None
    try:
        with waiting, suspendable(waiting.pause, both(resume, waiting.resume)):
            for chunk in request:
                waiting.end()
                write(chunk.text)
                wrote = wrote or bool(chunk.text)
        wrote = wrote or chunk.finish_reason != "error"  # An answer may be empty.
    finally:
        if wrote:
            write("\n")
    return chunk
