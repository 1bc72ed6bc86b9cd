"""TensorInfo: the place of a tensor in the files of a checkpoint."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

# Keys are the dtype names of safetensors.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
DTYPE_BYTES |= {"I8": 1, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header.

    Args:
        file: the file.
        dtype: name of the dtype in safetensors.
        shape: shape of the tensor.
        begin: byte of the file at which the tensor begins.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]
