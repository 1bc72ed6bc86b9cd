"""The prompt pass: torch matmuls in chunks, leaving K/V where the token step reads them.

It stops one token short: the prompt's last token goes through the token step itself, which also draws the first token.
So there is one LM head, one sampler, and nothing here but K/V.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from .kernels.attention import rms_norm, rotate
from .model import DecodeModel
from .weights import LayerWeights

CHUNK = 2048
MASK_LIMIT = 2**21  # entries of an attention mask on the CPU


@torch.inference_mode()
def prefill(model: DecodeModel, token_ids: list[int], start: int, chunk: int = CHUNK, slot: int = 0) -> None:
    """Write K/V of token_ids at positions start, start + 1, ...; earlier positions must be filled already.

    Memory beside the cache is bounded by the chunk: activations of `chunk` rows, whatever the prompt's length.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64).to(model.device)
    for at in range(0, len(token_ids), chunk):
        _prefill_chunk(model, ids[at : at + chunk], start + at, slot)


def _prefill_chunk(m: DecodeModel, ids: torch.Tensor, start: int, slot: int) -> None:
    """One pass over rows [start, start + n); the residual stream is fp32 [n, hidden], matmuls in the weights' dtype."""
    end = start + ids.numel()
    eps, dtype = m.config.rms_norm_eps, m.weights.dtype
    cos, sin = m.cos[start:end, None], m.sin[start:end, None]
    page = int(slot)  # one page a slot: a slot's positions are one slice
    hidden = m.weights.embed[ids].float()
    for i, layer in enumerate(m.weights.layers):
        x = rms_norm(hidden, layer.input_norm, eps).to(dtype)
        qkv = linear(x, layer.qkv.weight, layer.qkv.bias).view(ids.numel(), -1, m.config.head_dim)
        q, k, v = qkv.split((m.config.num_heads, m.config.num_kv_heads, m.config.num_kv_heads), dim=1)
        k_cache, v_cache = m.kv.k[i][page], m.kv.v[i][page]
        k_cache[:, start:end] = _rotated(k, layer.k_norm, cos, sin, eps, dtype).transpose(0, 1)
        v_cache[:, start:end] = v.transpose(0, 1)
        if i + 1 == m.config.num_layers:
            return  # nothing reads the last layer's output here
        q = _rotated(q, layer.q_norm, cos, sin, eps, dtype).transpose(0, 1)
        attended = _attend(q, k_cache[:, :end], v_cache[:, :end], m.config.window(i), m.scale)
        hidden += linear(attended, layer.o_proj.weight)
        hidden += _mlp(rms_norm(hidden, layer.post_norm, eps).to(dtype), layer)


def _rotated(x, norm, cos, sin, eps, dtype):
    """q or k [n, heads, head_dim], normalised where the family does, then rotated; fp32 inside."""
    x = x.float()
    return rotate(x if norm is None else rms_norm(x, norm, eps), cos, sin).to(dtype)


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
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=causal_lower_right(n, end), scale=scale, enable_gqa=k.shape[1] != q.shape[1]
            )
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


def _mlp(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    gate, up = linear(x, layer.gate_up.weight).chunk(2, dim=-1)
    return linear(silu(gate) * up, layer.down.weight)
