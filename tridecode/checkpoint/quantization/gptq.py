"""GPTQ, v1 and v2: 4 or 8 bits, [in_features * bits / 32, out_features] words, with the group of each column (g_idx).

v1 stores zero points less one.
"""

import re

import torch

from ...kernels.linear.packed import Codes
from .scheme import Quantization, Reading, Scheme, Stored, sorted_columns, unpacked


def parse(read) -> Quantization:
    bits = read.get("bits")
    if type(bits) is not int or bits not in (4, 8):
        raise read.fail("bits", "4 or 8 with quant_method gptq")
    group = read.get("group_size", 128)
    if type(group) is not int or group not in (-1, 32, 64, 128):
        raise read.fail("group_size", "32, 64, 128 or -1")
    if read.get("dynamic") not in (None, {}):
        raise read.fail("dynamic", "absent: rules for single modules are not supported")
    version = read.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    reading = Reading(_tensors, _codes_v1 if version == "gptq" else _codes_v2)
    scheme = Scheme(bits, False, max(group, 0), 1, True, read.flag("desc_act", False), reading)
    names = read.names("modules_to_not_convert")
    if not read.flag("lm_head", False):
        names = ["lm_head", *names]
    return Quantization("gptq", (*((re.escape(name), None) for name in names), ("", scheme)))


def _tensors(scheme: Scheme, n: int, k: int) -> dict[str, Stored]:
    words = 32 // scheme.bits
    return {
        "qweight": Stored((-(-k // words), n), ("I32",), per=0),
        "qzeros": Stored((scheme.groups(k), -(-n // words)), ("I32",), per=0),
        "scales": Stored((scheme.groups(k), n), ("F16", "BF16", "F32"), per=0),
        "g_idx": Stored((k,), ("I32",), per=0),
    }


def _codes_v1(scheme: Scheme, tensors, n: int, k: int) -> Codes:
    return _codes(scheme, tensors, n, k, less=1)


def _codes_v2(scheme: Scheme, tensors, n: int, k: int) -> Codes:
    return _codes(scheme, tensors, n, k, less=0)


def _codes(scheme: Scheme, tensors, n: int, k: int, less: int) -> Codes:
    values, group = unpacked(tensors["qweight"], scheme.bits, 0)[:k].T, scheme.group or k
    zero = unpacked(tensors["qzeros"], scheme.bits, 1)[:, :n].T.to(torch.int16)
    zero = ((zero + less) % 2**scheme.bits).to(torch.uint8)
    if (order := sorted_columns(tensors["g_idx"], group)) is not None:
        if not scheme.ordered:
            raise ValueError("its columns are not in the order of their groups, though desc_act is false")
        values = values[:, order]
    return Codes(values, tensors["scales"].T, 1, group, scheme.bits, zero, order)
