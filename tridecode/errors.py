"""Errors that a user can cause. Each has a one-line message with the problem, the expected value and a fix."""

import json


def counted(n: int, word: str) -> str:
    """Return a number with a noun: 1 token, 2 tokens, 1,000 tokens, 3 passes."""
    return f"{n:,} {word}{'' if n == 1 else 'es' if word.endswith(('s', 'ch')) else 's'}"


class TridecodeError(Exception):
    """Base class of all expected errors.

    The command line prints the message without a traceback, and its exit code is not 0.
    """

    def __reduce__(self):
        # By default, pickle would call the class with the message as its only argument.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[TridecodeError], args: tuple, attributes: dict) -> TridecodeError:
    """Return an error with these attributes, without a call of its `__init__`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class CheckpointError(TridecodeError):
    """A checkpoint, its configuration or its tokenizer cannot be used."""


class DeviceError(TridecodeError):
    """The requested device or backend is absent or has too little memory."""


class PromptError(TridecodeError, ValueError):
    """A prompt, token id or chat message cannot be used."""


class TooLong(PromptError):
    """A prompt does not fit in the context.

    Attributes:
        tokens: number of tokens of the prompt.
        is_lower_bound: whether `tokens` is only a lower bound.
    """

    def __init__(self, tokens: int, context: int, is_lower_bound: bool = False, fix: str = ""):
        least = " or more" if is_lower_bound else ""
        super().__init__(f"the prompt has {counted(tokens, 'token')}{least}, the context holds {context:,}{fix}")
        self.tokens, self.is_lower_bound = tokens, is_lower_bound


class ParameterError(TridecodeError, ValueError):
    """A sampling or engine parameter has a wrong value, or contradicts another one.

    Attributes:
        argument: the name of the parameter in Python. None if the error concerns no parameter or several.
        code: "type", "range", "choice" or "conflict" (with another parameter, the model or the device). None for other
            errors.
    """

    def __init__(self, message: str, argument: str | None = None, code: str | None = None):
        super().__init__(message)
        self.argument, self.code = argument, code


def conflict(argument: str, rest: str) -> ParameterError:
    """Return the error for a parameter that contradicts another one, the model or the device.

    `rest` follows the argument's name in the message.
    """
    return ParameterError(f"{argument}{rest}", argument, "conflict")


class GenerationError(TridecodeError):
    """A generation failed because logits were NaN or Inf."""


class QueueFull(TridecodeError):
    """The queue has its maximum number of requests, so this request was rejected."""


class EngineClosed(GenerationError):
    """The engine was closed, or it belongs to another process."""

    def __init__(self, message: str = "this engine is closed; load another one"):
        super().__init__(message)


NO_CHAT = "pass plain text instead of a chat"  # The command line replaces this text by --raw.


def not_finite(step: int, position: int, dtype) -> str:
    """Return the message for a step whose logits were NaN or Inf, in a model of the torch dtype `dtype`."""
    fix = "the checkpoint may be damaged: download it again"
    if str(dtype) == "torch.float16":
        fix = 'float16 overflows in some models: choose dtype="bfloat16" or dtype="float32"'
    return f"step {step} (position {position}) computed NaN or Inf logits and sampled no token; {fix}"


def brief(error: object, longest: int = 200) -> str:
    """Return the error of another library as one line of at most `longest` characters."""
    text = " ".join(str(error)[: 4 * longest].split()).partition("; use sys.set_int_max_str_digits()")[0]
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def as_json(value) -> str:
    """Return a value as JSON for a message, cut to 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
