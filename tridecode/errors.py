"""Every error that a user can cause: one clear line that names the thing, what was expected and the fix."""

import json


def counted(n: int, word: str) -> str:
    """1 token, 2 tokens, 1,000 tokens, 3 passes."""
    return f"{n:,} {word}{'' if n == 1 else 'es' if word.endswith(('s', 'ch')) else 's'}"


class TridecodeError(Exception):
    """Base of all errors raised on purpose; the command line prints its message and exits non-zero, no traceback."""


class CheckpointError(TridecodeError):
    """A checkpoint, its configuration or its tokenizer cannot be used."""


class DeviceError(TridecodeError):
    """The device or backend asked for is absent or has too little memory."""


class PromptError(TridecodeError, ValueError):
    """A prompt, token id or chat message cannot be used."""


class TooLong(PromptError):
    """A prompt that does not fit in the context. tokens: how many it has; or_more: that is the fewest it can have."""

    def __init__(self, tokens: int, context: int, or_more: bool = False, fix: str = ""):
        least = " or more" if or_more else ""
        super().__init__(f"the prompt has {counted(tokens, 'token')}{least}, the context holds {context:,}{fix}")
        self.tokens, self.or_more = tokens, or_more


class ParameterError(TridecodeError, ValueError):
    """A sampling or engine parameter has a wrong value, or contradicts another one.

    Attributes:
        argument: the name of the parameter in Python, None if the error is about none or about several.
        code: "type", "range", "choice" or "conflict" (with another parameter, the model or the device), None for
            other errors.
    """

    def __init__(self, message: str, argument: str | None = None, code: str | None = None):
        super().__init__(message)
        self.argument, self.code = argument, code


def conflict(argument: str, rest: str) -> ParameterError:
    """The error of a parameter that contradicts another one, the model or the device; rest: follows its name."""
    return ParameterError(f"{argument}{rest}", argument, "conflict")


class GenerationError(TridecodeError):
    """A generation had to end: the logits of a step held NaN or Inf."""


class QueueFull(TridecodeError):
    """As many requests wait for a slot as may; this one was not taken."""


class EngineClosed(GenerationError):
    """The engine was closed."""

    def __init__(self):
        super().__init__("this engine is closed; load another one")


NO_CHAT = "give plain text in place of a chat"  # a fix that the command line calls --raw


def not_finite(step: int, position: int, dtype) -> str:
    """What is said of a step whose logits held NaN or Inf, in a model of the torch dtype `dtype`."""
    fix = "the checkpoint may be damaged: download it again"
    if str(dtype) == "torch.float16":
        fix = 'float16 overflows in some models: choose dtype="bfloat16" or dtype="float32"'
    return f"step {step} (position {position}) gave NaN or Inf logits and drew nothing; {fix}"


def brief(error: object, longest: int = 200) -> str:
    """Another library's words for a message: one line, cut where it is long."""
    text = " ".join(str(error)[: 4 * longest].split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def as_json(value) -> str:
    """A value from JSON for a message: as it stands there, cut to 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
