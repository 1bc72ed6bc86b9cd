"""Block-wise fp8 of transformers: e4m3 codes in blocks of 128 x 128. weight_scale_inv contains their scales."""

import re
from dataclasses import dataclass

import torch

from ...kernels.linear.packed import QuantizedWeight
from .patterns import Names
from .scheme import Quantization, Rule, Scheme, Stored, untrusted

BLOCK = 128


@dataclass(frozen=True)
class Fp8Scheme(Scheme):
    """Codes and scales are stored as they are."""

    unused = ("input_scale", "activation_scale")

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors that store a weight [n, k]: weight and weight_scale_inv."""
        scale = Stored((self.blocks(n), self.groups(k)), ("F32", "BF16", "F16"), per=BLOCK)
        return {"weight": Stored((n, k), ("F8_E4M3",)), "weight_scale_inv": scale}

    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] that the tensors store."""
        return QuantizedWeight(tensors["weight"], tensors["weight_scale_inv"], BLOCK, BLOCK, 8)


def parse(read) -> Quantization:
    """Return the rules of quantization_config. Raises CheckpointError."""
    if read.get("weight_block_size") != [BLOCK, BLOCK]:
        raise read.fail("weight_block_size", f"[{BLOCK}, {BLOCK}]")
    if read.get("fmt", "e4m3") != "e4m3":
        raise read.fail("fmt", '"e4m3"')
    scheme = Fp8Scheme(8, floating=True, group=BLOCK, rows=BLOCK)
    listed = [(key, name) for key in ("modules_to_not_convert", "ignored_layers") for name in read.names(key)]
    skipped: list[Rule] = [(Names(frozenset(("lm_head", *(name for _, name in listed))), "path"), None)]
    for key, name in listed:
        # As in transformers, an expression matches from the start of the module's name to a dot or to its end.
        if re.search(r"[^\w.-]", name):
            skipped.append((untrusted(read, key, rf"(?:{name})(?:\.|$)"), None))
    return Quantization("fp8", (*skipped, ("", scheme)))
