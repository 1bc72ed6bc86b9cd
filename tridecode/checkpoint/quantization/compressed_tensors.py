"""compressed-tensors: float-quantized (e4m3) and pack-quantized (4 or 8 bits) weights.

Activations may be declared as quantized too: they stay as they are, since in a token step it is memory that counts.
"""

import re

from ...arguments import shown
from ...kernels.linear.packed import Codes
from .scheme import Quantization, Reading, Scheme, Stored, sorted_columns, unpacked

FLOATS = ("BF16", "F16", "F32")
HARMLESS = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")
STRATEGIES = ("tensor", "channel", "group", "block")


def parse(read) -> Quantization:
    """From a config reader of quantization_config."""
    groups = read.get("config_groups", {})
    if not isinstance(groups, dict) or not groups:
        raise read.fail("config_groups", "an object with at least one group")
    ignored = tuple((_pattern(read, "ignore", name), None) for name in read.names("ignore"))
    rules = list(ignored)
    for name in groups:
        group = read.under("config_groups").under(name)
        scheme = _scheme(group if group.get("format") else read, group.under("weights"))
        rules += [(_pattern(group, "targets", t), scheme) for t in group.names("targets")]
    return Quantization("compressed-tensors", tuple(rules))


def _pattern(read, key: str, name: str) -> str:
    if name == "Linear":
        return ""
    pattern = f"^(?:{name[3:]})" if name.startswith("re:") else f"^{re.escape(name)}$"
    try:
        re.compile(pattern)
    except re.error:
        raise read.fail(key, f"names or regular expressions, but {shown(name)} is none; it is") from None
    return pattern


def _scheme(owner, weights) -> Scheme:
    form = owner.choice("format", tuple(READINGS), None)
    kind = weights.choice("type", ("float", "int"), "int")
    bits, symmetric = weights.integer("num_bits", 1, 32, 8), weights.flag("symmetric", True)
    floating = form == "float-quantized"
    if floating and (kind != "float" or bits != 8 or not symmetric):
        raise weights.fail("num_bits", "8, with type float and symmetric true, in format float-quantized")
    if not floating and (kind != "int" or bits not in (4, 8)):
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
    return Scheme(bits, floating, columns, rows, not symmetric, ordered, READINGS[form])


def _float_tensors(scheme: Scheme, n: int, k: int) -> dict[str, Stored]:
    if scheme.rows == 0:
        scale = Stored((1,), FLOATS, per=0)
    else:
        scale = Stored((scheme.blocks(n), scheme.groups(k)), FLOATS, per=scheme.rows)
    return {"weight": Stored((n, k), ("F8_E4M3",)), "weight_scale": scale}


def _float_codes(scheme: Scheme, tensors, n: int, k: int) -> Codes:
    scale = tensors["weight_scale"].reshape(-1, scheme.groups(k))
    return Codes(tensors["weight"], scale, scheme.rows or n, scheme.group or k, 8)


def _packed_tensors(scheme: Scheme, n: int, k: int) -> dict[str, Stored]:
    words = 32 // scheme.bits
    found = {
        "weight_packed": Stored((n, -(-k // words)), ("I32",)),
        "weight_scale": Stored((n, scheme.groups(k)) if scheme.rows else (1,), FLOATS, per=1 if scheme.rows else 0),
        "weight_shape": Stored((2,), ("I64", "I32"), per=0),
    }
    if scheme.zeros:
        found["weight_zero_point"] = Stored((-(-n // words), scheme.groups(k)), ("I32",), per=words)
    if scheme.ordered:
        found["weight_g_idx"] = Stored((k,), ("I32",), per=0)
    return found


def _packed_codes(scheme: Scheme, tensors, n: int, k: int) -> Codes:
    values = unpacked(tensors["weight_packed"], scheme.bits, 1)[:, :k]
    group, rows, zero, order = scheme.group or k, scheme.rows or n, None, None
    if scheme.zeros:
        zero = unpacked(tensors["weight_zero_point"], scheme.bits, 0)[:n]
    if scheme.ordered and (order := sorted_columns(tensors["weight_g_idx"], group)) is not None:
        values = values[:, order]
    return Codes(values, tensors["weight_scale"].reshape(-1, scheme.groups(k)), rows, group, scheme.bits, zero, order)


READINGS = {
    "float-quantized": Reading(_float_tensors, _float_codes, HARMLESS),
    "pack-quantized": Reading(_packed_tensors, _packed_codes, HARMLESS),
}
