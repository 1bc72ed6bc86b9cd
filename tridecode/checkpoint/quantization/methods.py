"""quantization_config of a config.json: the quant_method's own file reads the rest."""

from . import awq, compressed_tensors, fp8, gptq
from .scheme import Quantization

METHODS = {
    "awq": awq.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "gptq": gptq.parse,
}


def parse(read) -> Quantization:
    """read: a config reader of quantization_config. Raises CheckpointError, which names the key."""
    return METHODS[read.choice("quant_method", tuple(METHODS), None)](read)
