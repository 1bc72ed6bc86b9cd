"""AWQ, version gemm: 4 bits, [in_features, out_features / 8] words with their eight columns in an order of its own."""

import re

import torch

from ...kernels.linear.packed import Codes
from .scheme import Quantization, Reading, Scheme, Stored, unpacked

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the columns 0 to 7 in a word


def parse(read) -> Quantization:
    read.choice("version", ("gemm", "GEMM"), "gemm")
    if read.get("bits", read.get("w_bit", 4)) != 4:
        raise read.fail("bits", "4 with quant_method awq")
    group = read.get("group_size", read.get("q_group_size", 128))
    if type(group) is not int or group not in (-1, 32, 64, 128):
        raise read.fail("group_size", "32, 64, 128 or -1")
    zeros = read.flag("zero_point", True)
    scheme = Scheme(4, False, max(group, 0), 1, zeros, False, Reading(_tensors, _codes))
    skipped = [(re.escape(name), None) for name in ("lm_head", *read.names("modules_to_not_convert"))]
    return Quantization("awq", (*skipped, ("", scheme)))


def _tensors(scheme: Scheme, n: int, k: int) -> dict[str, Stored]:
    found = {
        "qweight": Stored((k, -(-n // 8)), ("I32",), per=0),
        "scales": Stored((scheme.groups(k), n), ("F16", "BF16", "F32"), per=0),
    }
    if scheme.zeros:
        found["qzeros"] = Stored((scheme.groups(k), -(-n // 8)), ("I32",), per=0)
    return found


def _codes(scheme: Scheme, tensors, n: int, k: int) -> Codes:
    zero = _columns(tensors["qzeros"]).T.contiguous() if scheme.zeros else None
    return Codes(_columns(tensors["qweight"]).T, tensors["scales"].T, 1, scheme.group or k, 4, zero)


def _columns(words: torch.Tensor) -> torch.Tensor:
    found = unpacked(words, 4, 1)
    return found.view(len(found), -1, 8)[:, :, PLACES].flatten(1)
