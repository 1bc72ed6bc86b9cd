"""compressed-tensors: weights in its formats float-quantized (e4m3) and pack-quantized (4 or 8 bits).

If a checkpoint also declares quantized activations, they stay in 16 bits, because the memory traffic of the weights
limits the speed of a pass.
"""

from dataclasses import dataclass

import torch

from ...kernels.linear.packed import QuantizedWeight
from .patterns import Names, Pattern
from .scheme import Quantization, Rule, Scheme, Stored, column_order, unpack_words, untrusted

FLOATS = ("BF16", "F16", "F32")
UNUSED = ("input_scale", "input_zero_point", "output_scale")
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class FloatScheme(Scheme):
    """The format float-quantized: codes are stored as they are."""

    unused = UNUSED

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors that store a weight [n, k]: weight and weight_scale."""
        if self.rows == 0:
            scale = Stored((1,), FLOATS, per=0)
        else:
            scale = Stored((self.blocks(n), self.groups(k)), FLOATS, per=self.rows)
        return {"weight": Stored((n, k), ("F8_E4M3",)), "weight_scale": scale}

    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] that the tensors store."""
        scale = tensors["weight_scale"].reshape(-1, self.groups(k))
        return QuantizedWeight(tensors["weight"], scale, self.rows or n, self.group or k, 8)


@dataclass(frozen=True)
class IntegerScheme(Scheme):
    """The format pack-quantized: words hold neighboring columns."""

    unused = UNUSED

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors that store a weight [n, k]. Zero points and the groups of columns are optional."""
        per_word = 32 // self.bits
        tensors = {
            "weight_packed": Stored((n, -(-k // per_word)), ("I32",)),
            "weight_scale": Stored((n, self.groups(k)) if self.rows else (1,), FLOATS, per=1 if self.rows else 0),
            "weight_shape": Stored((2,), ("I64", "I32"), per=0),
        }
        if self.zeros:
            tensors["weight_zero_point"] = Stored((-(-n // per_word), self.groups(k)), ("I32",), per=per_word)
        if self.ordered:
            tensors["weight_g_idx"] = Stored((k,), ("I32",), per=0)
        return tensors

    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] that the tensors store. Raises ValueError if the groups have different sizes."""
        codes = unpack_words(tensors["weight_packed"], self.bits, 1)[:, :k]
        group, zero, order = self.group or k, None, None
        if self.zeros:
            zero = unpack_words(tensors["weight_zero_point"], self.bits, 0)[:n]
        if self.ordered and (order := column_order(tensors["weight_g_idx"], group)) is not None:
            codes = codes[:, order]
        scale = tensors["weight_scale"].reshape(-1, self.groups(k))
        return QuantizedWeight(codes, scale, self.rows or n, group, self.bits, zero, order)


FORMATS = {"float-quantized": FloatScheme, "pack-quantized": IntegerScheme}  # Values of the key `format`.


def parse(read) -> Quantization:
    """Return the rules of quantization_config. Raises CheckpointError."""
    groups = read.get("config_groups", {})
    if not isinstance(groups, dict) or not (groups or read.get("kv_cache_scheme")):
        raise read.fail("config_groups", "an object with at least one group")
    if read.get("transform_config"):
        raise read.fail("transform_config", "empty, since transforms of weights and activations are not supported")
    rules: list[Rule] = []
    for name in groups:
        group = read.under("config_groups").under(name)
        scheme = _scheme(group if group.get("format") else read, group.under("weights"))
        rules += _rules(group, "targets", scheme)
    # As in the library, exact names come before expressions, and these before the class Linear.
    rules.sort(key=lambda rule: (Names, Pattern, str).index(type(rule[0])))
    return Quantization("compressed-tensors", (*_rules(read, "ignore", None), *rules))


def _rules(read, key: str, scheme: Scheme | None) -> list[Rule]:
    """Return the rules for a list of modules."""
    names = read.names(key)
    expressions = [untrusted(read, key, name[3:]) for name in names if name.startswith("re:")]
    patterns: list[str | Names | Pattern] = [Names(frozenset(names), "whole"), *expressions]
    return [(pattern, scheme) for pattern in ([""] if "Linear" in names else patterns)]


def _scheme(owner, weights) -> Scheme:
    """Return the scheme of a group. owner: reader of the object with the key `format`. weights: reader of `weights`."""
    format_name = owner.choice("format", tuple(FORMATS), None)
    number_type = weights.choice("type", ("float", "int"), "int")
    bits, symmetric = weights.integer("num_bits", 1, 32, 8), weights.flag("symmetric", True)
    floating = format_name == "float-quantized"
    if floating and (number_type != "float" or bits != 8 or not symmetric):
        raise weights.fail("num_bits", "8, with type float and symmetric true, in format float-quantized")
    if not floating and (number_type != "int" or bits not in (4, 8)):
        raise weights.fail("num_bits", "4 or 8, with type int, in format pack-quantized")
    size = weights.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", STRATEGIES if floating else STRATEGIES[:3], implied)
    rows, columns = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy, (1, size))
    if strategy == "block":
        block = weights.get("block_structure")
        if block not in ([128, 128], "128x128"):
            raise weights.fail("block_structure", "[128, 128]")
        rows, columns = 128, 128
    elif strategy == "group" and (type(columns) is not int or columns not in (32, 64, 128)):
        raise weights.fail("group_size", "32, 64 or 128")
    ordered = weights.get("actorder") in ("group", "dynamic", True)
    if ordered and (strategy != "group" or floating):
        raise weights.fail("actorder", "null or weight, unless the strategy is group")
    return FORMATS[format_name](bits, floating, columns, rows, not symmetric, ordered)
