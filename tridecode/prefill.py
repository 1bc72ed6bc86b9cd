"""The prompt pass: torch matmuls in chunks, leaving K/V where the token step reads them.

It stops one token short: the prompt's last token goes through the token step itself, which also draws the first token.
So there is one LM head, one sampler, and nothing here but K/V. What lies between the matmuls is a Triton kernel on a
GPU, where a short prompt would otherwise wait for launches, and the kernel's torch reference on a CPU.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from .kernels.add_norm import add_norm, add_norm_ref
from .kernels.rope_write import rope_write, rope_write_ref
from .kernels.silu_mul import silu_mul, silu_mul_ref
from .model import DecodeModel

CHUNK = 2048
MASK_LIMIT = 2**21  # entries of an attention mask on the CPU
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # the others hold all scores in memory


@torch.inference_mode()
def prefill(model: DecodeModel, token_ids: list[int], start: int, chunk: int = CHUNK, slot: int = 0) -> None:
    """Write K/V of token_ids at positions start, start + 1, ...; earlier positions must be filled already.

    Memory beside the cache is bounded by the chunk: activations of `chunk` rows, whatever the prompt's length.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64).to(model.device)
    for at in range(0, len(token_ids), chunk):
        if model.device.type == "cpu":
            _prefill_chunk(model, ids[at : at + chunk], start + at, slot, add_norm_ref, rope_write_ref, silu_mul_ref)
        else:
            with torch.cuda.device(model.device), sdpa_kernel(FUSED):
                _prefill_chunk(model, ids[at : at + chunk], start + at, slot, add_norm, rope_write, silu_mul)


def warm_up(model: DecodeModel) -> None:
    """Compile the kernels of a prompt on a GPU, and import what a continued one needs, before a turn waits for them."""
    import torch.nn.attention.bias  # noqa: F401

    prefill(model, [0, 0][: model.kv.capacity], 0)


def _prefill_chunk(m: DecodeModel, ids: torch.Tensor, start: int, slot: int, add_norm, rope_write, silu_mul) -> None:
    """One pass over rows [start, start + n); the residual stream is fp32 [n, hidden], matmuls in the weights' dtype."""
    n, config, eps = ids.numel(), m.config, m.config.rms_norm_eps
    end, page = start + n, int(slot)  # one page a slot: a slot's positions are one slice
    hidden = m.weights.embed[ids].float()
    x = torch.empty_like(hidden, dtype=m.weights.dtype)
    q = x.new_empty(n, config.num_heads, config.head_dim)
    act = x.new_empty(n, config.intermediate_size)
    delta = None
    for i, layer in enumerate(m.weights.layers):
        k, v = m.kv.k[i][page], m.kv.v[i][page]
        add_norm(hidden, delta, layer.input_norm, x, eps)
        qkv = linear(x, layer.qkv.weight, layer.qkv.bias)
        new_k, new_v = k[:, start:end], v[:, start:end]
        rope_write(qkv, layer.q_norm, layer.k_norm, m.cos[start:end], m.sin[start:end], q, new_k, new_v, eps)
        if i + 1 == config.num_layers:
            return  # nothing reads the last layer's output here
        attended = _attend(q.transpose(0, 1), k[:, :end], v[:, :end], config.window(i), m.scale)
        add_norm(hidden, linear(attended, layer.o_proj.weight), layer.post_norm, x, eps)
        silu_mul(linear(x, layer.gate_up.weight), act)
        delta = linear(act, layer.down.weight)


def _attend(q, k, v, window: int, scale: float) -> torch.Tensor:
    """Causal attention of the last rows: q [heads, n, d], k and v [kv_heads, end, d]; returns [n, heads * d]."""
    n, end = q.shape[1], k.shape[1]
    if window:
        first = max(end - n - window + 1, 0)
        k, v = k[:, first:], v[:, first:]
        end -= first
    q, k, v = q[None], k[None], v[None]
    if q.device.type == "cpu":
        return _attend_masked(q, k, v, window, scale)
    if q.dtype == torch.float32:  # no fused backend groups heads in fp32
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if window:
        behind = torch.arange(end - n, end, device=q.device)[:, None] - torch.arange(end, device=q.device)[None, :]
        mask = (behind >= 0) & (behind < window)
        # With a mask no fused backend groups heads; expanding keeps the memory-efficient one.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        causal = {"is_causal": True}
        if n != end:
            from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, a second of every start

            causal = {"attn_mask": causal_lower_right(n, end)}
        out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=k.shape[1] != q.shape[1], **causal)
    return out[0].transpose(0, 1).reshape(n, -1)


def _attend_masked(q, k, v, window: int, scale: float) -> torch.Tensor:
    """The same on the CPU, as many rows at a time as keep the mask below MASK_LIMIT entries."""
    n, end = q.shape[2], k.shape[2]
    keys, parts = torch.arange(end, dtype=torch.int32), []
    for rows in torch.arange(end - n, end, dtype=torch.int32).split(max(MASK_LIMIT // end, 1)):
        behind = rows[:, None] - keys
        mask = (behind >= 0) & (behind < window) if window else behind >= 0
        part = q[:, :, rows[0] - (end - n) : rows[-1] + 1 - (end - n)]
        grouped = k.shape[1] != q.shape[1]
        parts.append(scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return torch.cat(parts, 2)[0].transpose(0, 1).reshape(n, -1)
