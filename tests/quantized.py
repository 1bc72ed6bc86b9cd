"""Quantized checkpoints written by hand, number by number, as the documentation of each method describes them.

    truth = write_quantized(path, "gptq", group=64, ordered=True)  # module -> the weight in fp32

This file shares no code with the code that reads checkpoints.
"""

import json

import numpy as np
import torch
from checkpoints import write_tiny
from safetensors.torch import load_file, save_file

WIDTHS = dict(hidden_size=192, intermediate_size=320, head_dim=64, num_attention_heads=6, num_key_value_heads=2)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # Column of each nibble of a word.


def write_quantized(
    path, method, skip=("lm_head",), family="qwen3", sizes=WIDTHS, **options
) -> dict[str, torch.Tensor]:
    """Write a tiny checkpoint. `method` quantizes its linears, except modules with a word of `skip` in their names."""
    write_tiny(path, family, **sizes)
    rng = np.random.default_rng(0)
    tensors, truth = load_file(path / "model.safetensors"), {}
    linears = ("_proj.weight", "lm_head.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
    for name in [n for n in tensors if n.endswith(linears)]:
        module = name.removesuffix(".weight")
        if any(word in module for word in skip):
            continue
        weight = tensors.pop(name).numpy()
        found, truth[module] = WRITERS[method](weight, rng, **options)
        tensors |= {f"{module}.{part}": torch.as_tensor(value).contiguous() for part, value in found.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config=CONFIGS[method](skip=list(skip), **options))
    return truth


def change_config(path, **changes) -> None:
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | changes))


def integers(weight, rng, bits, group, zeros):
    """Return codes [n, k], scales and zero points [n, k / group], and the weight that they represent.

    zeros: whether the zero points are random; otherwise each is half the range of the codes.
    """
    n, k = weight.shape
    group = group if group > 0 else k
    scale = (np.abs(weight.reshape(n, -1, group)).max(2) / 2 ** (bits - 1)).astype(np.float16)
    half = 2 ** (bits - 1)
    zero = rng.integers(half - 3, half + 4, scale.shape) if zeros else np.full(scale.shape, half)
    wide = lambda blocks: np.repeat(blocks, group, 1)  # noqa: E731
    codes = np.clip(np.rint(weight / wide(scale).astype(np.float32)) + wide(zero), 0, 2**bits - 1).astype(np.int64)
    truth = (codes - wide(zero)).astype(np.float32) * wide(scale).astype(np.float32)
    return codes, scale, zero, torch.from_numpy(truth)


def words_along_rows(codes, bits, order=None):
    """Return words, int32 [n, ceil(k * bits / 32)]. A word has neighboring columns, or those of `order`."""
    n, k = codes.shape
    per = 32 // bits
    found = np.zeros((n, -(-k // per)), np.uint32)
    for column in range(k):
        place = column % per if order is None else order.index(column % per)
        found[:, column // per] |= (codes[:, column].astype(np.uint32)) << np.uint32(bits * place)
    return found.view(np.int32)


def awq(weight, rng, group=64, zeros=True):
    codes, scale, zero, truth = integers(weight, rng, 4, group, zeros)
    found = {"qweight": words_along_rows(codes.T, 4, AWQ_ORDER), "scales": scale.T}
    if zeros:
        found["qzeros"] = words_along_rows(zero.T, 4, AWQ_ORDER)
    return found, truth


def awq_config(skip, group=64, zeros=True):
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zeros, "version": "gemm",
        "modules_to_not_convert": skip,
    }  # fmt: skip


def gptq(weight, rng, bits=4, group=64, ordered=False, version=1):
    n, k = weight.shape
    size = group if group > 0 else k
    g_idx = np.arange(k) // size
    # The order is the same for linears with the same input, because GPTQ orders columns by their activations.
    if ordered:
        g_idx = np.random.default_rng(k).permutation(g_idx)
    order = np.argsort(g_idx, kind="stable")
    codes, scale, zero, truth = integers(weight[:, order], rng, bits, group, zeros=True)
    back = np.argsort(order)
    found = {
        "qweight": words_along_rows(codes[:, back], bits).T,  # Shape [k, n]. A word contains consecutive rows.
        "qzeros": words_along_rows((zero.T - (version == 1)) % 2**bits, bits),
        "scales": scale.T,
        "g_idx": g_idx.astype(np.int32),
    }
    return found, truth[:, back]


def gptq_config(skip, bits=4, group=64, ordered=False, version=1):
    version_name = "gptq" if version == 1 else "gptq_v2"
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered,
        "checkpoint_format": version_name,
    }  # fmt: skip


def packed(weight, rng, bits=4, group=64, zeros=False, ordered=False):
    n, k = weight.shape
    size = group if group > 0 else k
    g_idx = np.random.default_rng(k).permutation(np.arange(k) // size) if ordered else np.arange(k) // size
    order = np.argsort(g_idx, kind="stable")
    codes, scale, zero, truth = integers(weight[:, order], rng, bits, group, zeros)
    back = np.argsort(order)
    found = {
        "weight_packed": words_along_rows(codes[:, back], bits),
        "weight_scale": scale,
        "weight_shape": np.array([n, k]),
    }
    if zeros:
        found["weight_zero_point"] = words_along_rows(zero.T, bits).T
    if ordered:
        found["weight_g_idx"] = g_idx.astype(np.int32)
    return found, truth[:, back]


def compressed_config(skip, format_name, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    names = [f"re:.*{word}.*" for word in skip]
    return {
        "quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group},
        "ignore": names,
    }  # fmt: skip


def packed_config(skip, bits=4, group=64, zeros=False, ordered=False):
    strategy = "group" if group > 0 else "channel"
    return compressed_config(
        skip, "pack-quantized", num_bits=bits, type="int", symmetric=not zeros, strategy=strategy,
        group_size=group if group > 0 else None, actorder="group" if ordered else None,
    )  # fmt: skip


def e4m3(weight, rng, shared="channel"):
    n, k = weight.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[shared]
    scale, truth = np.zeros((-(-n // rows), -(-k // columns)), np.float32), torch.empty(n, k)
    values = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale[i, j] = np.abs(weight[part]).max() / 448
            values[part] = (torch.from_numpy(weight[part]) / scale[i, j]).to(torch.float8_e4m3fn)
            truth[part] = values[part].float() * scale[i, j]
    return values, scale, truth


def float_quantized(weight, rng, shared="channel"):
    values, scale, truth = e4m3(weight, rng, shared)
    scale = scale.reshape(-1) if shared == "tensor" else scale
    return {"weight": values, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}, truth


def float_config(skip, shared="channel"):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": shared}
    if shared == "block":
        weights["block_structure"] = [128, 128]
    return compressed_config(skip, "float-quantized", **weights)


def fp8(weight, rng):
    values, scale, truth = e4m3(weight, rng, "block")
    return {"weight": values, "weight_scale_inv": scale}, truth


def fp8_config(skip):
    return {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": skip,
    }  # fmt: skip


WRITERS = {"awq": awq, "gptq": gptq, "pack-quantized": packed, "float-quantized": float_quantized, "fp8": fp8}
CONFIGS = {
    "awq": awq_config, "gptq": gptq_config, "pack-quantized": packed_config, "float-quantized": float_config,
    "fp8": fp8_config,
}  # fmt: skip
