"""transformers' own fp8: e4m3 in blocks of 128 x 128, with weight_scale_inv, the factor, beside."""

import re

from ...kernels.linear.packed import Codes
from .scheme import Quantization, Reading, Scheme, Stored

BLOCK = 128


def parse(read) -> Quantization:
    if read.get("weight_block_size") != [BLOCK, BLOCK]:
        raise read.fail("weight_block_size", f"[{BLOCK}, {BLOCK}]")
    if read.get("fmt", "e4m3") != "e4m3":
        raise read.fail("fmt", '"e4m3"')
    scheme = Scheme(8, True, BLOCK, BLOCK, False, False, Reading(_tensors, _codes, ("input_scale", "activation_scale")))
    names = read.names("modules_to_not_convert")
    skipped = [(rf"(^|\.){re.escape(name)}($|\.)", None) for name in ("lm_head", *names)]
    return Quantization("fp8", (*skipped, ("", scheme)))


def _tensors(scheme: Scheme, n: int, k: int) -> dict[str, Stored]:
    scale = Stored((scheme.blocks(n), scheme.groups(k)), ("F32", "BF16", "F16"), per=BLOCK)
    return {"weight": Stored((n, k), ("F8_E4M3",)), "weight_scale_inv": scale}


def _codes(scheme: Scheme, tensors, n: int, k: int) -> Codes:
    return Codes(tensors["weight"], tensors["weight_scale_inv"], BLOCK, BLOCK, 8)
