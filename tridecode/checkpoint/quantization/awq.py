"""AWQ, version gemm: 4 bits. Words [in_features, out_features / 8] contain eight columns each, in a special order."""

from dataclasses import dataclass

import torch

from ...kernels.linear.packed import QuantizedWeight
from .patterns import Names
from .scheme import Quantization, Scheme, Stored, unpack_words

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # The place of each column in a word.


@dataclass(frozen=True)
class AwqScheme(Scheme):
    """Codes and zero points are stored transposed, with one row for each column of the weight."""

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors that store a weight [n, k]: qweight, scales and qzeros."""
        tensors = {
            "qweight": Stored((k, -(-n // 8)), ("I32",), per=0),
            "scales": Stored((self.groups(k), n), ("F16", "BF16", "F32"), per=0),
        }
        if self.zeros:
            tensors["qzeros"] = Stored((self.groups(k), -(-n // 8)), ("I32",), per=0)
        return tensors

    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] that the tensors store."""
        zero = _unpack(tensors["qzeros"]).T.contiguous() if self.zeros else None
        return QuantizedWeight(_unpack(tensors["qweight"]).T, tensors["scales"].T, 1, self.group or k, 4, zero)


def parse(read) -> Quantization:
    """Return the rules of quantization_config. Raises CheckpointError."""
    read.choice("version", ("gemm", "GEMM"), "gemm")
    if read.get("bits", read.get("w_bit", 4)) != 4:
        raise read.fail("bits", "4 with quant_method awq")
    group = read.get("group_size", read.get("q_group_size", 128))
    if type(group) is not int or group not in (-1, 32, 64, 128):
        raise read.fail("group_size", "32, 64, 128 or -1")
    scheme = AwqScheme(4, group=max(group, 0), zeros=read.flag("zero_point", True))
    skipped = Names(frozenset(("lm_head", *read.names("modules_to_not_convert"))), "inside")
    return Quantization("awq", ((skipped, None), ("", scheme)))


def _unpack(words: torch.Tensor) -> torch.Tensor:
    codes = unpack_words(words, 4, 1)
    return codes.view(len(codes), -1, 8)[:, :, PLACES].flatten(1)
