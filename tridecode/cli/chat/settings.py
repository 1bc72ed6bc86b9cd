"""The settings of /set: sampling options, and choices of the chat."""

import json
from collections.abc import Container
from contextlib import suppress
from dataclasses import replace

from ...arguments import Several
from ...errors import ParameterError, TridecodeError, brief
from ..options import NO_LIMIT, SAMPLING, SYNONYMS
from ..terminal import did_you_mean

# Settings of the chat that are not sampling options. They are attributes of talk.Chat.
CHOICES: dict[str, tuple[str, ...]] = {"overflow": ("error", "drop-oldest", "stop"), "stats": ("full", "short", "off")}
# A chat does not show log-probabilities.
NAMES = tuple(name for name in SAMPLING if name != "logprobs")
# Words that users of ollama and llama.cpp type after /set, and hints to the commands and options of this chat.
FOREIGN = {
    "system": "/system TEXT sets the system turn",
    "verbose": "/set stats full shows the speed of each answer, /stats the model",
    "quiet": "/set stats off hides the speed of each answer",
    "format": "/set json_schema SCHEMA, or --json-schema at the start, makes each answer JSON",
    "noformat": "/set json_schema none removes the form of the answers",
    "think": "/think on switches thinking on",
    "nothink": "/think off switches thinking off",
    "history": "Up shows earlier messages, /history the conversation",
    "model": "/model NAME switches the model",
    "max_seq_len": "the context is set at the start: tridecode chat --max-seq-len N",
}
COUNTING = "needs a server that counts tokens, as tridecode's and vLLM's do"


def names(chat) -> list[str]:
    """Return the names of the sampling options that the model of the chat supports."""
    return [name for name in NAMES if name in chat.model.options]


def choices(chat) -> dict[str, tuple[str, ...]]:
    """Return the values of each other setting."""
    return CHOICES if chat.model.counts else CHOICES | {"overflow": ("error",)}


def shown(chat, name: str) -> str:
    """Return the value of a setting as text that /set accepts."""
    if name in CHOICES:
        return getattr(chat, name)
    if chat.model.defaults is not None and name not in chat.overrides:
        return chat.model.defaults
    value = getattr(chat.params, name)
    if name == "json_schema" and value is not None:
        return value  # The parameter contains JSON text.
    return json.dumps(value, ensure_ascii=False) if value is not None else "none"


def change(chat, typed: str, text: str) -> str:
    """Set a setting, typed like top_k, --top-k or TOP-K, to the value in `text`, and return its name.

    The value `default` restores the model's default, or for a choice the value at the start of the chat.

    Raises:
        ParameterError: There is no such setting, or it cannot have this value.
    """
    name = typed.lower().lstrip("-").replace("-", "_")
    name = next((own for own, words in SYNONYMS.items() if f"--{name.replace('_', '-')}" in words), name)
    if name in FOREIGN:
        raise ParameterError(FOREIGN[name])
    if name not in (*NAMES, *CHOICES):
        fix = did_you_mean(name, (*NAMES, *CHOICES)) or "/set shows all"
        raise ParameterError(f"there is no option {typed}; {fix}")
    if not text:
        raise ParameterError(f"/set {name} needs a value; the current value is {shown(chat, name)}")
    if name in CHOICES:
        if text not in (*CHOICES[name], "default"):
            raise ParameterError(f"{name} must be one of {', '.join(CHOICES[name])} or default, got {text[:80]!r}")
        if text not in (*choices(chat)[name], "default"):
            raise ParameterError(f"{name} {text} {COUNTING}")
        setattr(chat, name, chat.initial_choices[name] if text == "default" else text)
    elif text == "default":
        chat.overrides.pop(name, None)
        chat.params = replace(chat.params, **{name: getattr(chat.model.default_params(), name)})
    else:
        chat.model.check(name)
        chat.params = replace(chat.params, **{name: parsed(name, text)})
        chat.overrides[name] = getattr(chat.params, name)
    return name


def changed(chat) -> dict:
    """Return the sampling options to save with the conversation, as JSON values."""
    values = {name: value for name, value in chat.overrides.items() if chat.configured.get(name) != value}
    return json.loads(json.dumps(values))


def restore(chat, typed: Container[str]) -> None:
    """Set the sampling options that were saved with the conversation, except those on the command line, and print them.

    Args:
        typed: The names of the options on the command line.
    """
    restored = []
    for name, value in chat.conversation.settings.items():
        if name in typed or name not in NAMES:
            continue
        try:
            change(chat, name, json.dumps(value))
            restored.append(f"{name} {brief(shown(chat, name), 40)}")
        except TridecodeError as error:
            chat.output.note(f"{name} of the session is not restored: {error}")
    if restored:
        chat.output.note(f"settings of the session: {', '.join(restored)}; /set NAME default removes one")


def parsed(name: str, text: str):
    """Return the value of a sampling option in a text: JSON, or the form of the command line. It is not checked."""
    if text.lower() in ("none", "null") or text == NO_LIMIT.get(name):
        return None
    option = SAMPLING[name]
    value = (option.constraint.item if option.repeated else option.constraint).read(text)
    json_types = (str, list) if option.repeated or isinstance(option.constraint, Several) else (str,)
    with suppress(ValueError, RecursionError):  # The text is not JSON, as in a regular expression.
        from_json = json.loads(text)
        if name == "logit_bias" and isinstance(from_json, dict):  # The keys of a JSON object are strings.
            return {int(key) if key.isdecimal() else key: bias for key, bias in from_json.items()}
        value = from_json if isinstance(from_json, json_types) else value
    return [value] if option.repeated and not isinstance(value, list) else value
