"""tridecode: a low-latency decode engine for one GPU. It computes each token with one CUDA graph of Triton kernels."""

from .version import __version__

TYPE_CHECKING = False  # Type checkers know this name. An import of `typing` would take a third of the time of `--help`.
if TYPE_CHECKING:
    from .engine import Engine
    from .sampling import SamplingParams
    from .serve.request import Request

__all__ = ["Engine", "Request", "SamplingParams", "__version__"]


def __getattr__(name: str):
    """Import a public name at its first use, because torch takes seconds to import and `--help` does not need it."""
    if name == "Engine":
        from .engine import Engine

        return Engine
    if name == "SamplingParams":
        from .sampling import SamplingParams

        return SamplingParams
    if name == "Request":
        from .serve.request import Request

        return Request
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
