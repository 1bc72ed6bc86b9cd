"""`tridecode generate`: one prompt, one answer or several; its input and output files."""

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from ..engine import Engine, Prompt
from ..errors import GenerationError, PromptError
from ..results import Result
from ..tokenizer import Tokenizer
from .loading import load_engine
from .terminal import Output, speed_line

STDIN = re.compile(r"(?m)^-$|(?<!\S)-\Z")  # in --prompt; a hyphen in the middle of a line is only that
MESSAGES = 'expected a list like [{"role": "user", "content": "..."}]'


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
                output.note(f"answer {i + 1} of {args.n}, seed {each.seed}")
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
                output.error(last.error)
    return int(failed > 0)


def check_options(args) -> None:
    """End as for a wrong option where options contradict each other."""
    if args.output == "-":  # stdout, as by default
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
        return engine.tokenizer.encode(prompt, allow_special=True)
    return prompt


def reuse(args) -> dict:
    return {"reuse_prefix": False} if args.no_reuse_prefix else {}


def seeded(params, n: int) -> list:
    """The parameters of each of `n` answers: seeds seed, seed + 1, ... All are checked before the first is used."""
    if n == 1:
        return [params]
    first = secrets.randbits(62) if params.seed is None else params.seed
    return [replace(params, seed=first + i) for i in range(n)]


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
        found["error"] = result.error
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
        text = read_file(args.messages, output)
        found = parse_json(text, args.messages, output)
        if isinstance(found, dict) and "messages" in found:
            found = found["messages"]
        return with_system(check_messages(found, args.messages), args, args.messages)
    if args.prompt is None:
        text = read_stdin(output).removesuffix("\n")
    else:
        text = clean(args.prompt, "--prompt", output)
        if STDIN.search(text):
            given = read_stdin(output).removesuffix("\n")
            if not given:
                output.note("stdin, which the - in --prompt stands for, is empty")
            text = STDIN.sub(lambda _: given, text)
    if not (text if args.raw else text.strip()):
        raise PromptError(
            "the prompt is empty; give --prompt TEXT, --prompt-ids IDS, --messages FILE, or text on stdin"
        )
    return text if args.raw else with_system([{"role": "user", "content": text}], args, "the prompt")


def with_system(messages: list[dict], args, where: str) -> list[dict]:
    if args.system is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise PromptError(f"{where}: it has a system message of its own; leave out --system, or that message")
    return [{"role": "system", "content": args.system}, *messages]


def check_messages(found, where: str) -> list[dict]:
    """`found` if it is a chat; PromptError names the place of what is wrong."""
    if not isinstance(found, list) or not found:
        raise PromptError(f"{where}: {MESSAGES}, got {shown(found)}")
    for i, message in enumerate(found, 1):
        if not isinstance(message, dict):
            raise PromptError(f"{where}: message {i}: expected an object with role and content, got {shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = shown(message[key]) if key in message else "none"
                raise PromptError(f"{where}: message {i}: {key} must be a string, got {got}")
    return found


def shown(value) -> str:
    """A value in a message, not the whole of it."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "..."


def parse_json(text: str, where: str, output: Output):
    """The JSON value of `text`, its lone surrogates replaced as in `clean`."""
    try:
        value = json.loads(text)
        again = json.dumps(value, ensure_ascii=False)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise PromptError(f"{where}: not JSON ({error.msg}, {line}column {error.colno}); correct it") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
        raise PromptError(f"{where}: not JSON that can be read ({error}); correct it") from None
    return json.loads(clean(again, where, output))


def clean(text: str, name: str, output: Output) -> str:
    """`text` as valid Unicode: halves of surrogate pairs, as undecodable bytes arrive, become U+FFFD with a note."""
    data = text.encode("utf-16", "surrogatepass")
    try:
        return data.decode("utf-16")
    except UnicodeDecodeError:
        output.note(f"{name}: what is not valid UTF-8 or Unicode was replaced by U+FFFD")
        return data.decode("utf-16", "replace")


def read_stdin(output: Output) -> str:
    if sys.stdin.isatty():
        output.note("reading from the terminal; Ctrl-D on an empty line ends it")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that `clean` sees what could not be decoded
    return clean(sys.stdin.read().removeprefix("\ufeff"), "stdin", output)


def read_file(path: str, output: Output) -> str:
    """The text of a file; - is stdin."""
    if path == "-":
        return read_stdin(output)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror}; give a file that can be read, or - for stdin") from None
    return clean(data.decode("utf-8-sig", "surrogateescape"), path, output)


@contextmanager
def text_sink(path: str | None, output: Output) -> Iterator[Callable[[str], None]]:
    """Yields the function that writes: to stdout, or to a file that takes the name `path` once everything is in it.

    Until then, and if something fails, a file of that name stays what it was. What is no regular file (/dev/null, a
    pipe) is written directly.
    """
    if path is None:
        yield output.text
        return
    target = Path(os.path.realpath(path))
    direct = target.exists() and not target.is_file()
    place = target if direct else target.with_name(f".tridecode-{secrets.token_hex(6)}.tmp")
    with naming(path):
        if target.is_file():
            open(target, "a").close()  # may it be written at all?
        file = open(place, "w" if direct else "x", encoding="utf-8", newline="\n")

    def write(text: str) -> None:
        with naming(path):
            file.write(text)

    try:
        yield write
        with naming(path):
            file.flush()
            if not direct:
                os.fsync(file.fileno())
            file.close()
            if not direct:
                if target.is_file():
                    place.chmod(target.stat().st_mode & 0o7777)
                place.replace(target)
    except BaseException:
        with suppress(OSError):  # a second complaint about a full disk
            file.close()
        if not direct:
            place.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: str):
    """Within, an error of the file system names `path` and not a temporary file, or nothing."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"--output cannot be written ({error.strerror})", path) from None
