"""Prompts from the options of `generate`, and results as JSON."""

from dataclasses import asdict
from functools import partial

from ...engine import Engine, Prompt
from ...errors import GenerationError, PromptError
from ...results import Result
from ...text.tokenizer import Tokenizer
from ..chat import session
from ..explain import explain
from ..inputs import chat_of, clean, parse_json, read_file, read_stdin, with_stdin
from ..loading import tokenizer_of
from ..terminal import Output, cut_by


def read_prompt(args, output: Output) -> Prompt:
    """Return the prompt. It is read before the model is loaded, so that a missing prompt is reported at once."""
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


def read_messages(args, output: Output) -> Prompt:
    """Return the chat in a file: messages, or a saved session, whose last message is answered again."""
    path = args.messages
    value = parse_json(read_file(path, output), path, output)
    if session.is_session(value):
        try:
            saved = session.parse(value)
            if not saved.turns:
                raise ValueError("it has no turns")
            value = saved.messages()[:-1]
        except ValueError as error:
            raise PromptError(f"{path}: not a session that can be answered ({error})") from None
        output.note(f"{path}: a saved session; its last message is answered again")
    elif isinstance(value, dict) and "messages" in value:
        value = value["messages"]
    return with_system(chat_of(value, path), args, path)


def with_system(messages: list[dict], args, place: str) -> list[dict]:
    """Return the messages, preceded by --system if it is set.

    Raises PromptError if they already have a system message.
    """
    if args.system is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise PromptError(f"{place}: it has a system message of its own; leave out --system, or that message")
    return [{"role": "system", "content": args.system}, *messages]


def encoded(prompt: Prompt, args, engine: Engine) -> Prompt:
    """Return a text as token ids in which control tokens are recognized, if --allow-special is set."""
    if args.allow_special and isinstance(prompt, str):
        return tokenizer_of(engine).encode(prompt, allow_special=True, context=engine.capacity)
    return prompt


def reuse(args) -> dict:
    """Return arguments for Engine.submit. If --no-reuse-prefix is set, they disable the prefix cache."""
    return {"reuse_prefix": False} if args.no_reuse_prefix else {}


def report(result: Result, engine: Engine, max_tokens: int | None) -> dict:
    """Return a Result for JSON. `cut_by` is the limit that ended the text: max_tokens, context, or None.

    It is written as ASCII, so that no program reads a Unicode line separator as the end of a line.
    """
    value: dict = {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "cut_by": cut_by(result.usage, max_tokens, engine.capacity) if result.finish_reason == "length" else None,
        "usage": asdict(result.usage) | {"tokens_per_pass": round(result.usage.tokens_per_pass, 3)},
        "timings": asdict(result.timings),
        "seed": result.seed,
    }
    if result.logprobs is not None:
        entry = partial(logprob_entry, tokenizer_of(engine))
        value["logprobs"] = [
            entry(token, each.logprob) | {"top": [entry(*top) for top in each.top]}
            for token, each in zip(result.token_ids, result.logprobs)
        ]
    if result.error is not None:
        value["error"] = explain(GenerationError(result.error))
    return value


def logprob_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    """Return the JSON entry of a token: its id, its text, and its log-probability. The text has its leading space."""
    # The token follows another token, so that its leading space stays.
    detokenizer = tokenizer.detokenizer((token,), skip_special=False)
    detokenizer.flush()
    return {"token_id": token, "text": detokenizer.push(token) + detokenizer.flush(), "logprob": logprob}
