"""GPTQ, v1 and v2: 4 or 8 bits.

It stores words [in_features * bits / 32, out_features] and the group of each column.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...kernels.linear.packed import QuantizedWeight
from .patterns import Names
from .scheme import Quantization, Rule, Scheme, Stored, column_order, unpack_words, untrusted

OVERRIDES = ("bits", "group_size", "desc_act", "sym")


@dataclass(frozen=True)
class GptqScheme(Scheme):
    """Codes are stored transposed, with one row of words for several columns of the weight.

    Args:
        subtracted: number that the checkpoint subtracts from each zero point: 1 in v1, 0 in v2.
    """

    subtracted: int = 0

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors that store a weight [n, k]: qweight, qzeros, scales and g_idx."""
        per_word = 32 // self.bits
        return {
            "qweight": Stored((-(-k // per_word), n), ("I32",), per=0),
            "qzeros": Stored((self.groups(k), -(-n // per_word)), ("I32",), per=0),
            "scales": Stored((self.groups(k), n), ("F16", "BF16", "F32"), per=0),
            "g_idx": Stored((k,), ("I32",), per=0),
        }

    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] that the tensors store. Raises ValueError if g_idx contradicts the scheme."""
        codes, group = unpack_words(tensors["qweight"], self.bits, 0)[:k].T, self.group or k
        zero = unpack_words(tensors["qzeros"], self.bits, 1)[:, :n].T.to(torch.int16)
        zero = ((zero + self.subtracted) % 2**self.bits).to(torch.uint8)
        if (order := column_order(tensors["g_idx"], group)) is not None:
            if not self.ordered:
                raise ValueError("its columns are not in the order of their groups, though desc_act is false")
            codes = codes[:, order]
        return QuantizedWeight(codes, tensors["scales"].T, 1, group, self.bits, zero, order)


def parse(read) -> Quantization:
    """Return the rules of quantization_config. Raises CheckpointError."""
    version = read.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    base = _scheme(read, GptqScheme(0, group=128, zeros=True, subtracted=int(version == "gptq")))
    names = read.names("modules_to_not_convert")
    if not read.flag("lm_head", False):
        names = ["lm_head", *names]
    excluded: Rule = Names(frozenset(names), "inside"), None
    return Quantization("gptq", (excluded, *_dynamic(read, base), (_quantized(read), base)))


def _quantized(read) -> str | Names:
    """Return the pattern of the modules that are quantized: those of modules_in_block_to_quantize, or all."""
    listed = read.get("modules_in_block_to_quantize", [])
    parts = [part if isinstance(part, list) else [part] for part in listed] if isinstance(listed, list) else [[None]]
    names: list[Any] = [name for part in parts for name in part]
    if not all(isinstance(name, str) for name in names):
        raise read.fail("modules_in_block_to_quantize", "a list of lists of names")
    return Names(frozenset(names), "end") if names else ""


def _dynamic(read, base: GptqScheme) -> Iterator[Rule]:
    """Yield GPTQModel's rules for single modules. The first whose pattern matches decides.

    "-:PATTERN" excludes modules from quantization. "+:PATTERN" and "PATTERN" override keys of quantization_config.
    """
    rules = read.under("dynamic")
    for key in rules.values:
        pattern = untrusted(read, "dynamic", key.removeprefix("-:").removeprefix("+:"))
        if key.startswith("-:"):
            yield pattern, None
            continue
        own = rules.under(key)
        for name in own.values:
            if name not in OVERRIDES:
                raise own.fail(name, f"absent, because rules can override only {', '.join(OVERRIDES)}")
        yield pattern, _scheme(own, base)


def _scheme(read, base: GptqScheme) -> GptqScheme:
    """Return the scheme that an object with the keys OVERRIDES describes. `base` has the values of absent keys."""
    bits = read.get("bits", base.bits)
    if type(bits) is not int or bits not in (4, 8):
        raise read.fail("bits", "4 or 8 with quant_method gptq")
    group = read.get("group_size", base.group or -1)
    if type(group) is not int or group not in (-1, 32, 64, 128):
        raise read.fail("group_size", "32, 64, 128 or -1")
    read.flag("sym", True)  # Zero points are stored in either case.
    return replace(base, bits=bits, group=max(group, 0), ordered=read.flag("desc_act", base.ordered))
