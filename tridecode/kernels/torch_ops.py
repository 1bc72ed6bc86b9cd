"""Attention of the prompt pass by torch, as another backend."""

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..layout import Chunk
from .attention.fp8_kv import held
from .attention.gather_kv import gather_kv
from .attention.prompt_attention import prompt_attention_bytes
from .chunks import listed
from .op import Op

# The others hold all scores in memory. cuDNN is asked for by name: it plans anew for each length.
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
}


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


def block_attention(table, page_table, q, k_cache, v_cache, partial, lse, counter, out, window, scale):
    """prompt_attention by products whose shapes a row's position alone decides: the rows of a page together, whichever
    of them the chunks have, over whole pages. So its bits do not depend on how the prompt was cut. Chunks begin with a
    page, and a page's rows are all there."""
    _, heads, D = q.shape
    kv_heads, page = k_cache.shape[1:3]
    for chunk in listed(table):
        for first in range(chunk.start, chunk.end, page):
            end, row = min(first + page, chunk.end), chunk.first + first - chunk.start
            pages = page_table[chunk.slot, : first // page + 1].long()
            keys, values = (
                held(cache, (pages,)).transpose(0, 1).flatten(1, 2).float() for cache in (k_cache, v_cache)
            )
            keys[:, end:], values[:, end:] = 0, 0  # not written yet: it may be anything
            rows = q[row : row + page].float().view(page, kv_heads, -1, D).permute(1, 2, 0, 3).flatten(1, 2)
            behind = torch.arange(first, first + page)[:, None] - torch.arange(first + page)
            seen = (behind >= 0) & (behind < window) if window else behind >= 0
            scores = (rows @ keys.transpose(1, 2) * scale).view(kv_heads, -1, page, first + page)
            weights = torch.softmax(scores.masked_fill(~seen.to(q.device), float("-inf")), -1).flatten(1, 2)
            attended = (weights @ values).view(heads, page, D)[:, : end - first]
            out[row : row + end - first] = attended.transpose(0, 1).flatten(1).to(out.dtype)


BLOCK_ATTENTION = Op(block_attention, block_attention, prompt_attention_bytes, outputs=("out",))


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
