"""The launches of a greedy step, by role: their kernels, and the bytes that each must move; and those of a prompt."""

import torch

from ...config import ModelConfig
from ...kernels.add_norm import add_norm_bytes
from ...kernels.attention import attention_bytes
from ...kernels.embed import embed_bytes
from ...kernels.gate_up import gate_up_bytes
from ...kernels.greedy import greedy_bytes
from ...kernels.matvec import matvec_bytes
from ...kernels.rope_write import rope_write_bytes
from ...kernels.silu_mul import silu_mul_bytes

LAYER = ("qkv", "attention", "o_proj", "gate_up", "down")
KERNELS = {
    "embed": "_embed_kernel",
    "qkv": "_matvec_kernel",
    "attention": "_attention_kernel",
    "o_proj": "_matvec_kernel",
    "gate_up": "_gate_up_kernel",
    "down": "_matvec_kernel",
    "lm_head": "_matvec_kernel",
    "greedy": "_greedy_kernel",
}


def step_ops(num_layers: int) -> list[str]:
    """The roles of a step's launches in their order, as decode.step launches them."""
    return ["embed", *LAYER * num_layers, "lm_head", "greedy"]


def launch_bytes(config: ModelConfig, dtype: torch.dtype, act_dtype: torch.dtype, positions: float) -> dict[str, float]:
    """Role -> bytes a launch, at `positions` attended to; of attention the mean over layers, for windows differ."""
    c, hidden, inter = config, config.hidden_size, config.intermediate_size
    seen = sum(min(positions, c.window(i) or positions) for i in range(c.num_layers)) / c.num_layers
    return {
        "embed": embed_bytes(hidden, dtype, act_dtype),
        "qkv": matvec_bytes(c.q_size + 2 * c.kv_size, hidden, dtype, act_dtype),
        "attention": attention_bytes(seen, c.num_kv_heads, c.head_dim, dtype),
        "o_proj": matvec_bytes(hidden, c.q_size, dtype, act_dtype),
        "gate_up": gate_up_bytes(inter, hidden, dtype, act_dtype),
        "down": matvec_bytes(hidden, inter, dtype, act_dtype),
        "lm_head": matvec_bytes(c.vocab_size, hidden, dtype, act_dtype),
        "greedy": greedy_bytes(c.vocab_size),
    }


def prefill_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> dict[str, int]:
    """Kernel -> bytes a launch, of this engine's kernels in a prompt of `tokens`."""
    c = config
    return {
        "_add_norm_kernel": add_norm_bytes(tokens, c.hidden_size, dtype),
        "_rope_write_kernel": rope_write_bytes(tokens, c.num_heads, c.num_kv_heads, c.head_dim, dtype),
        "_silu_mul_kernel": silu_mul_bytes(tokens, c.intermediate_size, dtype),
    }


def add_bytes(kernels: list[dict], moved: dict[str, float], bandwidth: float) -> None:
    """To each role in `moved` its bytes a launch, and the part of `bandwidth` (bytes per second) at which its cost
    moved them."""
    for role in kernels:
        if role["op"] in moved:
            role["bytes"] = round(moved[role["op"]])
            seconds = role["mean_us"] / 1e6
            role["pct_bandwidth"] = 100 * moved[role["op"]] / seconds / bandwidth if seconds else None
