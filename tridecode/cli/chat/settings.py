"""/set: a sampling option from what was typed."""

import json
import re
from dataclasses import fields, replace

from ...errors import ParameterError
from ...sampling import SamplingParams
from ..terminal import did_you_mean

# Settings of the chat itself, beside the sampling options.
CHOICES: dict[str, tuple[str, ...]] = {"overflow": ("error", "drop-oldest", "stop"), "stats": ("full", "short", "off")}
NAMES = tuple(field.name for field in fields(SamplingParams) if field.name != "logprobs")  # which a chat shows nowhere
_WORDS = {"none": None, "null": None, "on": True, "true": True, "off": False, "false": False}
_LIST = re.compile(r"""\[\s*["']""")  # the beginning of a list of texts


def as_typed(name: str, value) -> str:
    """The value of an option as /set takes it."""
    if name == "json_schema" and value is not None:
        value = json.loads(value)  # kept as JSON text
    return json.dumps(value, ensure_ascii=False) if value is not None else "none"


def full_name(name: str) -> str:
    """An option's name however it was typed."""
    return name.lower().lstrip("-").replace("-", "_")


def known(name: str) -> str:
    """The full name of the sampling option `name`. Raises ParameterError."""
    found = full_name(name)
    if found not in NAMES:
        fix = did_you_mean(found, (*NAMES, *CHOICES)) or "/set shows all"
        raise ParameterError(f"there is no option {name}; {fix}")
    return found


def changed(params: SamplingParams, defaults: SamplingParams, found: str, text: str) -> SamplingParams:
    """`params` with the option of the full name `found` set to what `text` says. Raises ParameterError."""
    if text == "default":
        return replace(params, **{found: getattr(defaults, found)})
    try:
        return replace(params, **{found: _value(found, text)})
    except (TypeError, ValueError, AttributeError) as error:  # a list where a number should be, and the like
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"{found} cannot be {text[:80]!r}") from None


def _value(name: str, text: str):
    if name in ("stop", "stop_token_ids", "logit_bias") and text.lower() in ("none", "off"):
        return {} if name == "logit_bias" else ()
    read = f"[{text}]" if name == "stop_token_ids" and not text.startswith("[") else text
    try:
        value = _WORDS[text.lower()] if text.lower() in _WORDS and name != "stop" else json.loads(read)
    except (ValueError, RecursionError):
        value = text
    if name == "stop_token_ids" and not isinstance(value, list):
        raise ParameterError(f"stop_token_ids must be token ids like 1, 2, got {text[:80]!r}")
    if name == "stop" and value is text and _LIST.match(text):  # [END] is a text, but this hardly
        raise ParameterError(f'stop must be a text, or a whole JSON list like ["a", "b"], got {text[:80]!r}')
    if name == "stop" and not isinstance(value, (str, list)):
        value = text
    if name == "ignore_eos" and not isinstance(value, bool):
        raise ParameterError(f"ignore_eos must be on or off, got {text[:80]!r}")
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
            raise ParameterError(f'logit_bias must be like {{"13": -5}}, token ids and numbers, got {text[:80]!r}')
        value = {int(key): bias for key, bias in value.items()}
    return value
