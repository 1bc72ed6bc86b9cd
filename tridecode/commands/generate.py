"""`tridecode generate`: one prompt, one answer or several."""

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial

from ..engine import Engine, Prompt
from ..errors import GenerationError, ParameterError, PromptError
from ..results import Result
from ..tokenizer import Tokenizer
from . import session
from .inputs import check_messages, clean, parse_json, read_file, read_stdin, stdin_is_file
from .loading import load_engine
from .main import explain
from .outputs import STDOUT, text_sink
from .terminal import Output, speed_line

STDIN = re.compile(r"(?m)^-$|(?<!\S)-\Z")  # in --prompt; a hyphen in the middle of a line is only that
LAST_SEED = 2**64 - 1


def generate(args, output: Output) -> int:
    check_options(args)
    if args.system is not None:
        args.system = clean(args.system, "--system", output)
    if args.jsonl is not None:
        from .batch import batch  # here, because it uses the functions below

        return batch(args, output)
    prompt = read_prompt(args, output)
    with text_sink(args.output, output) as write:  # opened before the model, so that a wrong name costs no time
        engine, params = load_engine(args, output)
        prompt = encoded(prompt, args, engine)
        failed = 0
        for i, each in enumerate(seeded(params, args.n)):
            if args.n > 1 and not args.json:
                output.note(f"answer {i + 1:,} of {args.n:,}, seed {each.seed}")
            if args.json:
                last = engine.generate(prompt, each, **reuse(args))
                write(json.dumps(report(last, engine)) + "\n")
            else:
                last = stream_text(engine, prompt, each, write, **reuse(args))
                if last.finish_reason != "error":
                    output.note(speed_line(last.usage, last.timings))
            if last.finish_reason == "error":
                failed += 1
                if failed == args.n:
                    raise GenerationError(last.error)  # no answer at all: a file stays what it was
                output.error(explain(GenerationError(last.error)))
    return int(failed > 0)


def check_options(args) -> None:
    """End as for a wrong option where options contradict each other."""
    if args.output in STDOUT:  # as by default
        args.output = None
    if args.allow_special and not args.raw:
        args.refuse("--allow-special needs --raw: in a chat only the template writes control tokens")
    if args.logprobs is not None and not args.json and args.jsonl is None:
        args.refuse("--logprobs needs --json")
    if args.n > 1 and args.jsonl is not None:
        args.refuse("--n does not go with --jsonl; repeat the line, with other seeds")
    if args.raw and args.messages is not None:
        args.refuse("--raw takes text, --messages is a chat; leave out one of them")
    if args.system is not None and (args.raw or args.prompt_ids is not None):
        args.refuse(f"--system needs a chat; leave out {'--raw' if args.raw else '--prompt-ids'}")
    source = args.messages if args.jsonl is None else args.jsonl
    if source is not None and args.output is not None and os.path.realpath(source) == os.path.realpath(args.output):
        args.refuse(f"--output would overwrite the input {source}; give it another name")


def encoded(prompt: Prompt, args, engine: Engine) -> Prompt:
    """With --allow-special, text as token ids, its control tokens among them."""
    if args.allow_special and isinstance(prompt, str):
        return engine.tokenizer.encode(prompt, allow_special=True, context=engine.capacity)
    return prompt


def reuse(args) -> dict:
    return {"reuse_prefix": False} if args.no_reuse_prefix else {}


def seeded(params, n: int) -> Iterator:
    """The parameters of each of `n` answers: seeds seed, seed + 1, ... All are checked before the first is used."""
    if n == 1:
        return iter([params])
    if n > LAST_SEED - 2**62:
        raise ParameterError(f"n must be at most {LAST_SEED - 2**62:,}, got {n:,}")
    first = secrets.randbits(62) if params.seed is None else params.seed
    replace(params, seed=first + n - 1)
    return (replace(params, seed=first + i) for i in range(n))


def report(result: Result, engine: Engine) -> dict:
    """A Result as JSON has it: ASCII only once dumped, so no separator that some reader takes for a line's end."""
    found = {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "timings": asdict(result.timings),
        "seed": result.seed,
    }
    if result.logprobs is not None:
        entry = partial(logprob_entry, engine.tokenizer)
        found["logprobs"] = [
            entry(token, each.logprob) | {"top": [entry(*top) for top in each.top]}
            for token, each in zip(result.token_ids, result.logprobs)
        ]
    if result.error is not None:
        found["error"] = explain(GenerationError(result.error))
    return found


def logprob_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    detokenizer = tokenizer.detokenizer((token,), skip_special=False)  # after another token: its space stays
    detokenizer.flush()
    return {"token_id": token, "text": detokenizer.push(token) + detokenizer.flush(), "logprob": logprob}


def stream_text(engine: Engine, prompt: Prompt, params, write: Callable[[str], None], **options):
    """Write the text as it comes; returns the last piece. Whatever happens, a line that was begun is ended."""
    wrote = False
    try:
        for piece in engine.stream(prompt, params, **options):
            write(piece.text)
            wrote = wrote or bool(piece.text)
        wrote = wrote or piece.finish_reason != "error"  # an answer may be empty
    finally:
        if wrote:
            write("\n")
    return piece


def read_prompt(args, output: Output) -> Prompt:
    """Before the model is loaded, so that a missing prompt costs no time."""
    if args.prompt_ids is not None:
        return args.prompt_ids
    if args.messages is not None:
        return read_messages(args, output)
    if args.prompt is None:
        text = read_stdin(output).removesuffix("\n")
    else:
        text = with_stdin(clean(args.prompt, "--prompt", output), output)
    if not (text if args.raw else text.strip()):
        raise PromptError(
            "the prompt is empty; give --prompt TEXT, --prompt-ids IDS, --messages FILE, or text on stdin"
        )
    return text if args.raw else with_system([{"role": "user", "content": text}], args, "the prompt")


def with_stdin(text: str, output: Output) -> str:
    """The text of --prompt with stdin where a - stands for it, else after it, if stdin is a pipe or a file."""
    if STDIN.search(text):
        given = read_stdin(output).removesuffix("\n")
        if not given:
            output.note("stdin, which the - in --prompt stands for, is empty")
        return STDIN.sub(lambda _: given, text)
    if not stdin_is_file():
        return text
    given = read_stdin(output, way_out="; </dev/null leaves it out of the prompt").removesuffix("\n")
    before = text.removesuffix("\n")
    return f"{before}\n{given}" if before and given else given or text


def read_messages(args, output: Output) -> Prompt:
    """The chat in a file: messages, or a saved session, whose last question is asked anew."""
    path = args.messages
    found = parse_json(read_file(path, output), path, output)
    if session.is_session(found):
        try:
            saved = session.parse(found)
            if not saved.turns:
                raise ValueError("it has no turns")
            found = saved.messages()[:-1]
        except ValueError as error:
            raise PromptError(f"{path}: not a session that can be answered ({error})") from None
        output.note(f"{path}: a saved session; its last message is answered anew")
    elif isinstance(found, dict) and "messages" in found:
        found = found["messages"]
    return with_system(check_messages(found, path), args, path)


def with_system(messages: list[dict], args, where: str) -> list[dict]:
    if args.system is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise PromptError(f"{where}: it has a system message of its own; leave out --system, or that message")
    return [{"role": "system", "content": args.system}, *messages]
