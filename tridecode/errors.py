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


def not_finite(step: int, position: int, dtype) -> str:
    """What is said of a step whose logits held NaN or Inf, in a model of the torch dtype `dtype`."""
    fix = "the checkpoint may be damaged: download it again"
    if str(dtype) == "torch.float16":
        fix = "float16 overflows in some models: choose dtype bfloat16 or float32"
    return f"step {step} (position {position}) gave NaN or Inf logits and drew nothing; {fix}"
