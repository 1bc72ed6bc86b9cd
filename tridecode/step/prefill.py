"""The prompt pass: its operations, in order, over chunks of a prompt; K/V are left where the token step reads them.

It stops one token short: the prompt's last token goes through the token step itself, which also draws the first token.
So there is one LM head, one sampler, and nothing here but K/V. Products and attention are torch's; what lies between
them is a Triton kernel on a GPU, where a short prompt would otherwise wait for launches, and its reference on a CPU.
"""

from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.add_norm import ADD_NORM
from ..kernels.gather_kv import GATHER_KV
from ..kernels.rope_write import ROPE_WRITE
from ..kernels.silu_mul import SILU_MUL
from .run import Run, launch, refer
from .state import DecodeModel
from .torch_ops import ATTEND, LINEAR

CHUNK = 2048
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # the others hold all scores in memory


@torch.inference_mode()
def prefill(model: DecodeModel, start: int, end: int, slot: int = 0, chunk: int = CHUNK) -> None:
    """Write K/V of a slot's tokens at positions start to end - 1; earlier ones must be filled already.

    Memory beside the cache is bounded by the chunk and one layer's K/V: activations of `chunk` rows, whatever the
    prompt's length.
    """
    cuda = model.device.type == "cuda"
    with torch.cuda.device(model.device) if cuda else nullcontext(), sdpa_kernel(FUSED) if cuda else nullcontext():
        for first in range(start, end, chunk):
            prompt_pass(launch if cuda else refer, model, first, min(first + chunk, end), slot)


def warm_up(model: DecodeModel) -> None:
    """Compile the kernels of a prompt on a GPU, and import what a continued one needs, before a turn waits for them."""
    import torch.nn.attention.bias  # noqa: F401

    prefill(model, 0, min(3, model.kv.capacity), chunk=2)


def prompt_pass(run: Run, m: DecodeModel, start: int, end: int, slot: int = 0) -> None:
    """One chunk, a slot's tokens at positions [start, end). The residual stream is fp32, products in the weights'
    dtype."""
    n, c, kv, eps = end - start, m.config, m.kv, m.config.rms_norm_eps
    table, cos, sin = kv.page_table[slot], m.cos[start:end], m.sin[start:end]
    hidden = m.weights.embed[m.workspace.tokens[slot, start:end]].float()
    x, delta = (hidden.new_empty(n, c.hidden_size, dtype=m.weights.dtype) for _ in range(2))
    qkv = x.new_empty(n, c.q_size + 2 * c.kv_size)
    q, attended = x.new_empty(n, c.num_heads, c.head_dim), x.new_empty(n, c.q_size)
    keys, values = x.new_empty(2, c.num_kv_heads, end, c.head_dim)
    gate_up, act = x.new_empty(n, 2 * c.intermediate_size), x.new_empty(n, c.intermediate_size)
    for i, layer in enumerate(m.weights.layers):
        run("input_norm", ADD_NORM, hidden, delta if i else None, layer.input_norm, x, eps)
        run("qkv", LINEAR, x, layer.qkv, qkv)
        run(
            "rope", ROPE_WRITE, table, qkv, layer.q_norm, layer.k_norm, cos, sin, start, q, kv.k[i], kv.v[i], keys,
            values, eps,
        )  # fmt: skip
        if i + 1 == c.num_layers:
            return  # nothing reads the last layer's output here
        if start:
            run("gather", GATHER_KV, table, kv.k[i], kv.v[i], start, keys, values)
        run("attention", ATTEND, q, keys, values, attended, c.window(i), m.scale)
        run("o_proj", LINEAR, attended, layer.o_proj, delta)
        run("post_norm", ADD_NORM, hidden, delta, layer.post_norm, x, eps)
        run("gate_up", LINEAR, x, layer.gate_up, gate_up)
        run("silu_mul", SILU_MUL, gate_up, act)
        run("down", LINEAR, act, layer.down, delta)
