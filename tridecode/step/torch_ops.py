"""Operations of the prompt pass that torch runs itself: matrix products, and attention as another backend."""

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..kernels.dequantise import dequantise
from ..kernels.gather_kv import gather_kv
from ..kernels.op import Op
from ..kernels.prompt_attention import prompt_attention_bytes
from ..layout import Chunk
from ..model.weights import Linear

# The others hold all scores in memory. cuDNN is asked for by name: it plans anew for each length.
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
}


def linear(x: torch.Tensor, weights: Linear, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """out [rows, out_features] = x [rows, in_features] @ weight.T + bias.

    scratch: flat, of x's dtype. A weight in fewer bits is dequantised there, as many rows as it holds at a time.
    """
    if weights.packed is None:
        _product(x, weights.weight, weights.bias, out)
        return
    K = weights.in_features
    step = scratch.numel() // K
    for first in range(0, weights.out_features, step):
        end = min(first + step, weights.out_features)
        rows = scratch[: (end - first) * K].view(-1, K)
        dequantise(weights, first, end, rows)
        _product(x, rows, weights.bias if weights.bias is None else weights.bias[first:end], out[:, first:end])


def linear_ref(x: torch.Tensor, weights: Linear, out: torch.Tensor, scratch: torch.Tensor) -> None:
    weight = weights.weight if weights.packed is None else weights.matrix().to(x.dtype)
    _product(x, weight, weights.bias, out)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def linear_bytes(x: torch.Tensor, weights: Linear, out: torch.Tensor, scratch: torch.Tensor) -> int:
    """A weight in fewer bits is written and read again in x's dtype."""
    again = 0 if weights.packed is None else 2 * weights.out_features * weights.in_features * x.itemsize
    return x.nbytes + weights.nbytes + again + out.nbytes


LINEAR = Op(linear, linear_ref, linear_bytes, outputs=("out",))


def torch_attention(backend: str, chunks: Sequence[Chunk]) -> Op:
    """prompt_attention by one of torch's BACKENDS, which wants to know the lengths on the host: those of `chunks`, a
    list that says what the table on the device does when the operation is launched. No graph can hold it."""

    def attend_chunks(table, page_table, q, k_cache, v_cache, partial, lse, counter, out, window, scale):
        _, heads, D = q.shape
        with sdpa_kernel(BACKENDS[backend], set_priority=True):
            for chunk in chunks:
                keys, values = q.new_empty(2, k_cache.shape[1], chunk.end, D)
                gather_kv(page_table[chunk.slot], k_cache, v_cache, chunk.end, keys, values)
                attend(q[chunk.rows], keys, values, out[chunk.rows], window, scale)

    return Op(attend_chunks, attend_chunks, prompt_attention_bytes, outputs=("out",))


def attend(q, keys, values, out, window: int, scale: float) -> None:
    """Causal attention of the last rows: q [n, heads, d]; keys, values [kv_heads, end, d]; out [n, heads * d].

    window: 0, or the positions attended to.
    """
    n, end = q.shape[0], keys.shape[1]
    if window:
        first = max(end - n - window + 1, 0)
        keys, values = keys[:, first:], values[:, first:]
        end -= first
    q, k, v = q.transpose(0, 1)[None], keys[None], values[None]
    heads_first = out.view(n, q.shape[1], -1).transpose(0, 1)
    grouped = k.shape[1] != q.shape[1]
    if grouped and (q.dtype == torch.float32 or window):
        # In fp32 no fused backend groups heads, nor with a mask; expanding keeps the memory-efficient one.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    if window:
        behind = torch.arange(end - n, end, device=q.device)[:, None] - torch.arange(end, device=q.device)[None, :]
        causal = {"attn_mask": (behind >= 0) & (behind < window)}
    elif n != end:
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler, a second of every start

        causal = {"attn_mask": causal_lower_right(n, end)}
    else:
        causal = {"is_causal": True}
    heads_first.copy_(scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **causal)[0])
