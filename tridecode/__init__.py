"""tridecode: a single-GPU, low-latency decode engine; the whole token step is one CUDA graph of Triton kernels."""

from .engine import Engine
from .sampling import SamplingParams
from .version import __version__

__all__ = ["Engine", "SamplingParams", "__version__"]
