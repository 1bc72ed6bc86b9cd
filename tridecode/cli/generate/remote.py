"""`tridecode generate --url`: answers of a server with OpenAI's API."""

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import tee
from typing import Any

from ...results import OutputChunk
from ...sampling import SamplingParams
from ..chat.command import connect
from ..options import sampling_overrides
from ..outputs import text_sink
from ..terminal import Output, cut_by, cut_words, speed_line
from ..waiting import Waiting
from ..wrapping import Wrapped

# Options that need an engine in this process.
LOCAL = ("jsonl", "prompt_ids", "allow_special", "no_reuse_prefix")


def generate_remotely(args, prompt: Any, output: Output, several: Callable, write_text: Callable) -> int:
    """Write the answers of the server that --url selects. Return the exit code.

    Args:
        several: Returns the parameters of each of n answers.
        write_text: Writes chunks as they arrive, and returns the last one.

    Raises:
        TridecodeError: The server cannot be used, or an answer fails.
    """
    overrides = sampling_overrides(args)
    model = connect(args, output)
    sent = {*overrides, *(["seed"] if args.n > 1 else [])}
    try:
        with text_sink(args.output, output) as write:
            for i, params in enumerate(several(SamplingParams(**overrides), args.n)):
                if args.n > 1 and not args.json:
                    output.note(f"answer {i + 1:,} of {args.n:,}, seed {params.seed}")
                chunks, kept = tee(model.stream(prompt, params, sent, model.thinking("on", args.raw)))
                waiting = Waiting(output, lambda: None)
                if args.json:
                    write_text(chunks, lambda text: None, waiting)
                    write(json.dumps(report([*kept], params, model.capacity)) + "\n")
                else:
                    shows = output.tty and args.output is None
                    last = write_text(chunks, Wrapped(output.console, write) if shows else write, waiting)
                    cut = cut_words(last, params.max_tokens, model.capacity)
                    output.note(speed_line(last.usage, last.timings) + cut)
    finally:
        model.close()
    return 0


def report(chunks: list[OutputChunk], params: SamplingParams, capacity: int | None) -> dict[str, Any]:
    """Return an answer for JSON, with the keys of a local answer that a server reports."""
    last = chunks[-1]
    usage = last.usage and {name: value for name, value in asdict(last.usage).items() if value is not None}
    fields: dict[str, Any] = {"text": "".join(chunk.text for chunk in chunks), "finish_reason": last.finish_reason}
    cut = cut_by(last.usage, params.max_tokens, capacity) if last.finish_reason == "length" else None
    timings = last.timings and asdict(last.timings)
    return fields | {"cut_by": cut, "usage": usage, "timings": timings, "seed": params.seed}
