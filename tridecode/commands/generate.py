"""`tridecode generate`: one prompt, one answer."""

import json
import sys
from dataclasses import asdict

from ..engine import Engine, Prompt
from ..errors import PromptError
from .loading import load_engine
from .terminal import Output, speed_line


def generate(args, output: Output) -> int:
    prompt = read_prompt(args, output)
    engine, params = load_engine(args, output)
    if args.json:
        result = engine.generate(prompt, params)
        report = {
            "token_ids": result.token_ids,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "usage": asdict(result.usage),
            "timings": asdict(result.timings),
            "seed": result.seed,
        }
        if result.error is not None:
            report["error"] = result.error
        # ASCII only: no separator that some reader takes for a line's end.
        print(json.dumps(report))
        last = result
    else:
        last = stream_text(engine, prompt, params, output)
        output.note(speed_line(last.usage, last.timings))
    if last.finish_reason == "error":
        output.error(last.error)
        return 1
    return 0


def stream_text(engine: Engine, prompt: Prompt, params, output: Output):
    """Write the text as it comes; returns the last piece. Whatever happens, the line is ended."""
    wrote = False
    try:
        for piece in engine.stream(prompt, params):
            output.text(piece.text)
            wrote = True
    finally:
        if wrote:
            output.text("\n")
    return piece


def read_prompt(args, output: Output) -> Prompt:
    """Before the model is loaded, so that a missing prompt costs no time."""
    if args.prompt_ids is not None:
        return args.prompt_ids
    text = args.prompt
    if text is None:
        if sys.stdin.isatty():
            output.note("reading the prompt from the terminal; Ctrl-D on an empty line ends it")
        text = sys.stdin.read().removesuffix("\n")
    if not (text if args.raw else text.strip()):
        raise PromptError("the prompt is empty; give --prompt TEXT, --prompt-ids IDS, or text on stdin")
    return text if args.raw else [{"role": "user", "content": text}]
