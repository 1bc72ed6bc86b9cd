"""The linears of public models, as cases for the choice of kernels, and devices."""

import torch

from tridecode.kernels.device import Device
from tridecode.kernels.linear.packed import Packed
from tridecode.kernels.linear.project import Case
from tridecode.tuning.configs import AttentionCase

BF16 = torch.bfloat16
H200 = Device("NVIDIA H200", 90, 132, 232448, 233472, 65536)
# Columns: hidden size, intermediate size, heads, K/V heads, head size, vocabulary.
MODELS = {
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64, 151936),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, 151936),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64, 128256),
    "qwen3-1.7b": (2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 32, 8, 128, 151936),
    "llama-3.2-3b": (3072, 8192, 24, 8, 128, 128256),
    "qwen2.5-7b": (3584, 18944, 28, 4, 128, 152064),
    "mistral-7b": (4096, 14336, 32, 8, 128, 32768),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128, 128256),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936),
    "qwen3-14b": (5120, 17408, 40, 8, 128, 151936),
}
WEIGHT_TYPES = ("bfloat16", "fp8", "int8", "int4")


def device(capability: int, multiprocessors: int = 132) -> Device:
    """Return a GPU that no table names, or a CPU if `capability` is 0."""
    if capability == 0:
        return Device()
    return H200._replace(name="NVIDIA Test 1 (80GB)", capability=capability, multiprocessors=multiprocessors)


def packed(scheme: str, k: int, **fields) -> Packed:
    """Return the packed tensor of `--quantize`.

    In fp8 there is a scale for each row, else for each group of the largest size that divides a row.
    """
    if scheme == "fp8":
        return Packed(**dict(number_type="e4m3", bits=8, k=k, group=k) | fields)
    group = next(group for group in (128, 64, 32) if k % group == 0)
    return Packed(**dict(number_type=scheme, bits=int(scheme[3:]), k=k, group=group) | fields)


def case(n: int, k: int, weight_type: str, epilogue: str, **fields) -> Case:
    """Return a case. weight_type: the dtype of a dense weight, or a scheme of `--quantize`."""
    return Case(
        n, k, getattr(torch, weight_type) if "float" in weight_type else packed(weight_type, k, **fields), epilogue
    )


def cases_of(model: str, weight_type: str = "bfloat16") -> dict[str, Case]:
    """Map the roles of a model's linears to their cases. With quantized weights the LM head is fp8."""
    hidden, inter, heads, kv_heads, dim, vocab = MODELS[model]
    return {
        "qkv": case((heads + 2 * kv_heads) * dim, hidden, weight_type, "normed"),
        "o_proj": case(hidden, heads * dim, weight_type, "residual"),
        "gate_up": case(2 * inter, hidden, weight_type, "gated"),
        "down": case(hidden, inter, weight_type, "residual"),
        "lm_head": case(vocab, hidden, weight_type if "float" in weight_type else "fp8", "normed"),
    }


def attention_of(model: str, dtype: torch.dtype = BF16, fp8: bool = False) -> AttentionCase:
    _, _, heads, kv_heads, dim, _ = MODELS[model]
    return AttentionCase(heads, kv_heads, dim, dtype, fp8)
