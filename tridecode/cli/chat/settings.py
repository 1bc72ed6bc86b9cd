"""Parsing of the values of /set."""

import json
import re
from dataclasses import fields, replace

from ...errors import ParameterError
from ...sampling import SamplingParams
from ..terminal import did_you_mean

# Settings of the chat that are not sampling options.
CHOICES: dict[str, tuple[str, ...]] = {"overflow": ("error", "drop-oldest", "stop"), "stats": ("full", "short", "off")}
# A chat does not show log-probabilities.
NAMES = tuple(field.name for field in fields(SamplingParams) if field.name != "logprobs")
_WORDS = {"none": None, "null": None, "on": True, "true": True, "off": False, "false": False}
_LIST = re.compile(r"""\[\s*["']""")  # A text that begins like a list of strings.


def as_typed(name: str, value) -> str:
    """Return the value of an option as text that /set accepts."""
    if name == "json_schema" and value is not None:
        value = json.loads(value)  # The file contains the value as JSON text.
    return json.dumps(value, ensure_ascii=False) if value is not None else "none"


def full_name(name: str) -> str:
    """Return the name of an option from a typed form such as --top-k or TOP-K."""
    return name.lower().lstrip("-").replace("-", "_")


def known(name: str) -> str:
    """Return the full name of the sampling option `name`. Raises ParameterError."""
    option = full_name(name)
    if option not in NAMES:
        fix = did_you_mean(option, (*NAMES, *CHOICES)) or "/set shows all"
        raise ParameterError(f"there is no option {name}; {fix}")
    return option


def changed(params: SamplingParams, defaults: SamplingParams, option: str, text: str) -> SamplingParams:
    """Return `params` with an option set to the value typed as `text`. Raises ParameterError."""
    if text == "default":
        return replace(params, **{option: getattr(defaults, option)})
    try:
        return replace(params, **{option: _value(option, text)})
    except (TypeError, ValueError, AttributeError) as error:  # A value has a wrong type, such as a list.
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(f"{option} cannot be {text[:80]!r}") from None


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
    if name == "stop" and value is text and _LIST.match(text):  # The text is an incomplete list. [END] is a string.
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
