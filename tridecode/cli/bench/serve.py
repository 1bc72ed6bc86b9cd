"""bench serve: latency and throughput of a server under load, with the metrics of vLLM's serving benchmark."""

import asyncio
import gc
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from ...errors import GenerationError, ParameterError, PromptError, as_json
from ...version import __version__
from ..api_key import api_key
from ..inputs import parse_object, prompt_field, read_file
from ..progress import progress
from ..signals import ending_task
from ..terminal import counted, echo_disabled
from .mix import mix
from .rows import Row, column

if TYPE_CHECKING:
    from .client import Answer, Client  # httpx is optional.

NUM_PROMPTS = 100
TOKEN_IDS = 1000, 4000  # Range of ordinary tokens in the vocabularies of public models. It contains no control tokens.
WORDS = (  # Each word is one token in most vocabularies.
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city"
).split()
LARGEST = 256_000_000  # Maximum size of the file of --jsonl in bytes.
PRECONNECTED = 256  # Number of connections that are created before the first request if --max-concurrency is not set.
REASONS = 10  # Maximum number of different failure reasons that are printed.
TIMES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(kw_only=True)
class ServeRow(Row):
    """The figures of a load on a server. Fields have the names of vLLM's serving benchmark."""

    bench = "serve"
    header = "serve"
    date: str
    model_id: str
    num_prompts: int = column("requests")
    completed: int = column(label="Successful requests:")
    failed: int = column("failed", label="Failed requests:")
    max_concurrency: int | None = column("at most", label="Maximum request concurrency:")
    request_rate: float | str = column("per second", 2, label="Request rate configured (RPS):")
    duration: float = column(kept=6, label="Benchmark duration (s):")
    total_input_tokens: int = column(label="Total input tokens:")
    total_output_tokens: int = column(label="Total generated tokens:")
    request_throughput: float = column("requests/s", 2, kept=4, label="Request throughput (req/s):")
    output_throughput: float = column("output tok/s", kept=3, compared=True, label="Output token throughput (tok/s):")
    total_token_throughput: float = column("all tok/s", kept=3, label="Total Token throughput (tok/s):")
    mean_ttft_ms: float | None = column("TTFT ms", 2, compared=True)
    p99_ttft_ms: float | None = column("p99", 2, default=None)
    mean_tpot_ms: float | None = column("TPOT ms", 2, compared=True)
    mean_itl_ms: float | None = column("ITL ms", 2)
    p99_itl_ms: float | None = column("p99 ITL", 2, default=None)
    mean_e2el_ms: float | None = column("E2EL ms")
    times: dict[str, float | None]  # JSON field name -> time in ms.
    seed: int

    @property
    def name(self) -> str:
        """The model's name on the server."""
        return self.model_id

    def as_dict(self):
        """Return the row as a dict, with one entry for each item of `times`."""
        row = super().as_dict()
        times = row.pop("times")
        return {name: value for name, value in row.items() if name not in times} | times

    @classmethod
    def read(cls, values):
        """Return the row of a recorded dict. Entries that end in _ms are times."""
        times = {name: value for name, value in values.items() if name.endswith("_ms")}
        return cls.from_times(times, **{name: value for name, value in values.items() if name not in times})

    @classmethod
    def from_times(cls, times: dict[str, float | None], **figures) -> "ServeRow":
        """Build a row. A time (in ms) whose name is a field of the row is also stored in that field."""
        shown: dict = {each.name: times.get(each.name) for each in fields(cls) if each.name.endswith("_ms")}
        return cls(times=times, **figures, **shown)

    def block(self, width: int) -> str:
        """Return the lines that vLLM's benchmark prints, for a terminal of `width` columns (at least 40 are used)."""
        width = min(max(width, 40), 50)

        def line(label: str, value: float | None) -> str:
            shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value
            return f"{label:<{width - 10}} {shown}"

        lines = [" Serving Benchmark Result ".center(width, "=")]
        labels = {each.name: label for each in fields(self) if (label := each.metadata.get("label"))}
        # A limit that is not set has no line.
        lines += [line(labels[name], value) for name in labels if (value := getattr(self, name)) not in (None, "inf")]
        for name, (short, title) in TIMES.items():
            lines.append(title.center(width, "-"))
            for key, value in self.times.items():
                if key.endswith(f"_{name}_ms") and not key.startswith("std"):
                    lines.append(line(f"{key.split('_')[0].capitalize()} {short} (ms):", value))
        return "\n".join([*lines, "=" * width, ""])


class Load:
    """Requests for a server, and the answers received so far.

    Attributes:
        model: name of the model on the server
        prompts: fields of each request that differ between requests
        times: [len(prompts)]: earliest start of each request, in seconds after the start of the run
        answers: the answers of requests that have ended, in the order in which they ended
        duration: seconds from the first request to the last answer
    """

    def __init__(self, args, lines: list[dict] | None, seed: int):
        """Create random prompts, or take those in `lines`. `seed` determines prompts and start times."""
        self._args, rng = args, np.random.default_rng(seed)
        count = args.num_prompts or (NUM_PROMPTS if lines is None else len(lines))
        self._warm_up = [random_prompt(args, rng) for _ in range(args.warm_up)]  # The server may cache these prompts.
        self.prompts = [random_prompt(args, rng) for _ in range(count)] if lines is None else lines[:count]
        self.times = arrivals(count, args.request_rate, args.burstiness, rng)
        self._common = {"temperature": args.temperature, "max_tokens": args.output_tokens, "stream": True}
        self._common["stream_options"] = {"include_usage": True}
        if args.ignore_eos or (lines is None and not args.no_ignore_eos):
            self._common["ignore_eos"] = True
        self.model, self.duration = args.model or "", 0.0
        self.answers: list[Answer] = []
        self._running: set[Answer] = set()
        self._started = math.inf

    async def run(self, client: "Client", ended: Callable[[], None]) -> None:
        """Send the warm-up requests, then the measured ones.

        Args:
            client: client of the server
            ended: called without arguments when a measured request ends

        Raises:
            GenerationError: the server lists no model, or all warm-up requests failed
        """
        self.model = self.model or await client.first_model()
        warm_up, bodies = (
            [json.dumps({"model": self.model} | self._common | prompt).encode() for prompt in prompts]
            for prompts in (self._warm_up, self.prompts)
        )
        warm = await self._send(client, warm_up, np.zeros(len(warm_up)), lambda answer: None)
        if warm and all(answer.error for answer in warm):
            raise GenerationError(f"the warm-up failed: {warm[0].error}")

        def end(answer) -> None:
            self.answers.append(answer)
            ended()

        client.prepare(min(len(bodies), self._args.max_concurrency or PRECONNECTED))
        gc.collect()
        gc.freeze()  # A garbage collection during the requests then skips the objects that already exist.
        self._started = time.perf_counter()
        try:
            await self._send(client, bodies, self.times, end)
        finally:
            self.duration = time.perf_counter() - self._started
            gc.unfreeze()

    async def _send(self, client: "Client", bodies: list[bytes], times: np.ndarray, end) -> list["Answer"]:
        gate = asyncio.Semaphore(self._args.max_concurrency) if self._args.max_concurrency else nullcontext()
        started = time.perf_counter()

        async def send(body: bytes, at: float):
            await asyncio.sleep(started + at - time.perf_counter())
            async with gate:
                answer = await client.ask(self._args.endpoint, body, self._running)
            end(answer)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(body, at)) for body, at in zip(bodies, times)]
        return [task.result() for task in tasks]

    def rate(self) -> float:
        """Return tokens per second so far. The thread of the progress bar calls this.

        An answer that is still running counts one token per event, because its usage is not known yet.
        """
        tokens = sum(answer.output_tokens for answer in self.answers[:])
        tokens += sum(len(answer.gaps) for answer in self._running.copy())
        return tokens / max(time.perf_counter() - self._started, 1e-3)


def serve(args, output) -> list[Row]:
    """Measure a server and return one row, or the rows of --mix.

    After an interrupt, print the figures so far; they are not written to a file.
    """
    if args.mix:
        return mix(args, output)
    try:
        from .client import Client
    except ModuleNotFoundError as error:
        raise ParameterError(f'bench serve needs {error.name}; pip install "tridecode[serve]"') from None
    # By default each run has a different seed. So no server has the prompts in its cache.
    seed = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    key = api_key(args.api_key_file, output)
    load = Load(args, jsonl_prompts(args, output) if args.jsonl is not None else None, seed)
    bar = progress("serving", output, load.rate)
    task = bar.add_task("serving", total=len(load.prompts))

    async def run() -> None:
        async with Client(args.url, key, args.timeout) as client:
            with bar, echo_disabled(not bar.disable, bar.stop, bar.start), ending_task():
                await load.run(client, lambda: bar.advance(task))

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())
    except KeyboardInterrupt:
        if any(answer.error is None for answer in load.answers):
            print_failures(load.answers, output)
            output.text(row_of(args, seed, load).block(output.console.width))
            done = f"{len(load.answers):,} of {counted(len(load.prompts), 'request')} had ended"
            output.note(f"interrupted: partial figures, {done}")
        raise
    print_failures(load.answers, output)
    if all(answer.error for answer in load.answers):
        raise GenerationError(f"bench serve: all of {counted(len(load.answers), 'request')} failed")
    return [row_of(args, seed, load)]


def loop_factory():
    """Return uvloop's event loop factory if uvloop is installed, else None.

    uvloop uses less CPU time than asyncio's loop.
    """
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


# ---- requests


def arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Return the start times [count] of requests in seconds, ascending from 0.

    The gaps are gamma distributed with mean 1 / rate.
    """
    if rate == math.inf:
        return np.zeros(count)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return np.concatenate(([0.0], np.cumsum(gaps)))


def random_prompt(args, rng: np.random.Generator) -> dict:
    """Return the fields of a request with a random prompt."""
    if args.endpoint == "completions":
        return {"prompt": rng.integers(*TOKEN_IDS, args.input_tokens).tolist()}
    return chat(" ".join(rng.choice(WORDS, args.input_tokens)))


def chat(text: str) -> dict:
    """Return the body of a chat request with one user message."""
    return {"messages": [{"role": "user", "content": text}]}


def jsonl_prompts(args, output) -> list[dict]:
    """Return the fields of a request for each nonempty line of --jsonl. Raises PromptError that names the line."""
    lines = []
    for number, line in enumerate(read_file(args.jsonl, output, LARGEST).split("\n"), 1):
        if line.strip():
            place = f"{args.jsonl}: line {number:,}"
            lines.append(prompt_of(parse_object(line, place, output), args.endpoint, place))
    if not lines:
        raise PromptError(f'{args.jsonl}: contains no prompts; expected lines like {{"prompt": "..."}}')
    if args.num_prompts and args.num_prompts > len(lines):
        raise PromptError(f"{args.jsonl}: {counted(len(lines), 'prompt')}, fewer than --num-prompts {args.num_prompts}")
    return lines


def prompt_of(line: dict, endpoint: str, place: str) -> dict:
    """Return the fields of a request for a parsed line of --jsonl.

    Args:
        line: the parsed line
        endpoint: "chat" or "completions"
        place: file and line, for errors

    Raises:
        PromptError: the line is invalid
    """
    kind = prompt_field(line, place, ["max_tokens"])
    if kind == ("messages" if endpoint == "completions" else "prompt_ids"):
        other = "chat" if endpoint == "completions" else "completions"
        raise PromptError(f"{place}: {kind} need --endpoint {other}")
    max_tokens = line.get("max_tokens", 1)
    if type(max_tokens) is not int or max_tokens < 1:
        raise PromptError(f"{place}: max_tokens must be a positive integer, got {as_json(max_tokens)}")
    others = {name: value for name, value in line.items() if name != kind}
    if kind == "messages":
        return line
    return (chat(line[kind]) if endpoint == "chat" else {"prompt": line[kind]}) | others


# ---- results


def print_failures(answers: list, output) -> None:
    """Print each failure reason with its number of requests, the most frequent first."""
    reasons = Counter(answer.error for answer in answers if answer.error is not None).most_common()
    for reason, number in reasons[:REASONS]:
        output.error(f"{counted(number, 'request')} failed: {reason}")
    if others := reasons[REASONS:]:
        rest = counted(sum(number for _, number in others), "request")
        output.error(f"{rest} failed for {counted(len(others), 'other reason')}")


def row_of(args, seed: int, load: Load) -> ServeRow:
    """Return the row for the complete answers. Percentiles are interpolated linearly, as numpy does by default."""
    whole = [answer for answer in load.answers if answer.error is None]
    read, generated = (sum(getattr(answer, name) for answer in whole) for name in ("input_tokens", "output_tokens"))
    times = {
        "ttft": [answer.ttft for answer in whole],
        "tpot": [answer.tpot for answer in whole if answer.tpot is not None],
        "itl": [gap for answer in whole for gap in answer.gaps],
        "e2el": [answer.latency for answer in whole],
    }
    stats = {name: latency_stats(values, sorted(args.percentiles)) for name, values in times.items()}
    return ServeRow.from_times(
        {f"{key}_{name}_ms": value for name, figures in stats.items() for key, value in figures.items()},
        date=datetime.now().strftime("%Y%m%d-%H%M%S"),
        model_id=load.model,
        num_prompts=len(load.prompts),
        request_rate="inf" if args.request_rate == math.inf else args.request_rate,
        max_concurrency=args.max_concurrency,
        duration=load.duration,
        completed=len(whole),
        failed=len(load.answers) - len(whole),
        total_input_tokens=read,
        total_output_tokens=generated,
        request_throughput=len(whole) / load.duration,
        output_throughput=generated / load.duration,
        total_token_throughput=(read + generated) / load.duration,
        seed=seed,
        tridecode=__version__,
    )


def latency_stats(seconds: list[float], percentiles: list[float]) -> dict:
    """Return mean, median, standard deviation and percentiles in ms; None for each if `seconds` is empty.

    `seconds` is empty for the times between tokens if all answers have one token.
    """
    names = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    if not seconds:
        return dict.fromkeys(names)
    values = 1e3 * np.array(seconds)
    figures = [values.mean(), np.median(values), values.std(), *np.percentile(values, percentiles)]
    return {name: round(float(value), 4) for name, value in zip(names, figures)}
