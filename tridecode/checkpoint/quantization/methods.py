"""The methods of quantization: quant_method in config.json -> function that reads the rest of quantization_config."""

from . import awq, compressed_tensors, fp8, gptq
from .scheme import Quantization

METHODS = {
    "awq": awq.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "gptq": gptq.parse,
}


def parse(read) -> Quantization:
    """Return the rules of quantization_config, which `read` reads. Raises CheckpointError, which names the key."""
    return METHODS[read.choice("quant_method", tuple(METHODS), None)](read)
