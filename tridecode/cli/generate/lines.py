"""The lines of a batch: what each of them asks for, checked as far as it can be without the model."""

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...arguments import check_messages
from ...engine import Prompt
from ...errors import ParameterError, PromptError, TridecodeError, as_json
from ...sampling import SamplingParams
from ..inputs import DIGITS, parse_json
from ..options import SAMPLING
from ..terminal import Output, did_you_mean, one_line
from .prompts import with_system

PROMPTS = ("prompt", "messages", "prompt_ids")
FIELDS = (*PROMPTS, "id", *SAMPLING)


@dataclass
class Request:
    """A line of the input. key: of its text, so that an answer is never taken for that to another prompt."""

    index: int
    key: int
    prompt: Prompt = ""
    fields: dict = field(default_factory=dict)
    id: object = None
    error: str | None = None

    def entry(self, **values) -> str:
        known = {"index": self.index, "input": f"{self.key:016x}"} | ({} if self.id is None else {"id": self.id})
        return json.dumps(known | values) + "\n"


class Lines:
    """The lines of `text` that are not empty. Each is a Request only while somebody wants it."""

    def __init__(self, text: str):
        self._text = text
        self.keys = array("Q", (key_of(line) if line.strip() else 0 for line in split(text)))

    def __len__(self) -> int:
        return len(self.keys) - self.keys.count(0)

    def answered(self, index: int, key: str) -> bool:
        """Whether the hexadecimal `key` is that of line `index`."""
        return index < len(self.keys) and self.keys[index] == int(key, 16) > 0

    def requests(self, done: set[int], args, output: Output) -> Iterator[Request]:
        """Those of the lines whose indices are not in `done`."""
        for index, (key, line) in enumerate(zip(self.keys, split(self._text))):
            if key and index not in done:
                yield read_request(index, key, line, args, output)


def split(text: str) -> Iterator[str]:
    """text.split("\\n"), a line at a time: a file may be large."""
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end]
        start = end + 1
    yield text[start:]


def key_of(line: str) -> int:
    return int.from_bytes(hashlib.sha256(line.strip().encode()).digest()[:8])


def read_request(index: int, key: int, line: str, args, output: Output) -> Request:
    """The request of a line; what is wrong with it becomes its error."""
    request = Request(index, key)
    try:
        found = parse_json(line, f"line {index + 1}", output)
        if not isinstance(found, dict):
            raise PromptError(f'expected an object like {{"prompt": "..."}}, got {as_json(found)}')
        if type(found.get("id", "")) not in (str, int):  # no bool, and a fraction may come back written otherwise
            raise PromptError(f"id must be a string or an integer, got {as_json(found['id'])}")
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
    given = [name for name in PROMPTS if name in found]
    if len(given) != 1:
        raise PromptError(f"expected one of prompt, messages and prompt_ids, got {' and '.join(given) or 'none'}")
    if "messages" in found:
        return with_system(check_messages(found["messages"], "messages"), args, "messages")
    if "prompt_ids" in found:
        return checked_ids(found["prompt_ids"], args)
    text = found["prompt"]
    if not isinstance(text, str) or not (text if args.raw else text.strip()):
        raise PromptError(f"prompt must be a text that is not empty, got {as_json(text)}")
    return text if args.raw else with_system([{"role": "user", "content": text}], args, "prompt")


def checked_ids(ids, args) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise PromptError(f"prompt_ids must be a list of token ids like [1, 2, 3], got {as_json(ids)}")
    if args.system is not None:
        raise PromptError("prompt_ids: --system needs a chat; leave out one of them")
    return ids


def sampling_field(name: str, value):
    """A sampling option as SamplingParams takes it: JSON has only strings as keys."""
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
            raise ParameterError(f'logit_bias must be an object like {{"42": -1.5}}, got {as_json(value)}')
        if (longest := max(map(len, value), default=0)) > DIGITS:
            raise ParameterError(f"logit_bias: a key of {longest:,} digits is no token id")
        return {int(key): bias for key, bias in value.items()}
    if name == "stop" and not isinstance(value, (str, list)):
        raise ParameterError(f"stop must be a text or a list of texts, got {as_json(value)}")
    if name == "stop_token_ids" and not isinstance(value, list):
        raise ParameterError(f"stop_token_ids must be a list, got {as_json(value)}")
    if name == "ignore_eos" and not isinstance(value, bool):
        raise ParameterError(f"ignore_eos must be true or false, got {as_json(value)}")
    return value
