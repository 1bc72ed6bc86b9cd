"""Operations of the prompt pass that torch runs itself: matrix products, and attention as another backend."""

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

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


def linear(x: torch.Tensor, weights: Linear, out: torch.Tensor) -> None:
    """out [rows, out_features] = x [rows, in_features] @ weight.T + bias."""
    if weights.bias is None:
        torch.mm(x, weights.weight.T, out=out)
    else:
        torch.addmm(weights.bias, x, weights.weight.T, out=out)


def linear_bytes(x: torch.Tensor, weights: Linear, out: torch.Tensor) -> int:
    return x.nbytes + weights.weight.nbytes + out.nbytes


LINEAR = Op(linear, linear, linear_bytes, outputs=("out",))


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
