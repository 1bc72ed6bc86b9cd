"""Every error that a user can cause: one clear line that names the thing, what was expected and the fix."""


class TridecodeError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and exits non-zero, no traceback."""


class CheckpointError(TridecodeError):
    """A checkpoint, its configuration or its tokenizer cannot be used."""


class DeviceError(TridecodeError):
    """The device or backend asked for is absent or has too little memory."""


class PromptError(TridecodeError, ValueError):
    """A prompt, token id or chat message cannot be used."""


class ParameterError(TridecodeError, ValueError):
    """A sampling or engine parameter is out of its range."""


class GenerationError(TridecodeError):
    """A generation had to end: the logits of a step held NaN or Inf."""


def shown(value: object, longest: int = 80) -> str:
    """A name or value that a message quotes, as Python writes it: cut where it is long, for a file may hold any."""
    text = repr(value[: longest + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def brief(error: object, longest: int = 200) -> str:
    """Another library's words for a message: one line, cut where it is long."""
    text = " ".join(str(error)[: 4 * longest].split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
