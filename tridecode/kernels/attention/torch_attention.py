"""Prompt attention by torch: the backends of scaled_dot_product_attention, and the batch-invariant form."""

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...layout import Chunk
from ..chunks import listed
from ..op import Op
from .arguments import Heads, KVLayer, Scratch
from .fp8_kv import load_cells
from .gather_kv import gather_kv
from .prompt_attention import prompt_attention_bytes

# Torch's other backends store all scores. cuDNN is used only if the user selects it, because it plans again for each
# length.
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
}


def torch_attention(backend: str, chunks: Sequence[Chunk]) -> Op:
    """Return an op that computes prompt attention with one of torch's BACKENDS. They need the lengths on the host.

    A graph cannot capture it.

    Args:
        chunks: The chunks in the device's table at the time of the launch.
    """

    def attend_chunks(table, q, out, kv: KVLayer, scratch: Scratch, heads: Heads):
        with sdpa_kernel(BACKENDS[backend], set_priority=True):
            for chunk in chunks:
                keys, values = q.new_empty(2, heads.kv, chunk.end, heads.dim)
                gather_kv(kv.table[chunk.slot], kv.k, kv.v, chunk.end, keys, values)
                attend(q[chunk.rows], keys, values, out[chunk.rows], heads.window, heads.scale)

    return Op(attend_chunks, attend_chunks, prompt_attention_bytes, outputs=("out",))


def block_attention(chunks, q, out, kv: KVLayer, scratch: Scratch, heads: Heads):
    """Compute prompt_attention by products whose sizes depend only on a row's position.

    The products cover whole pages, and all rows of a page together, even if a chunk contains only some of them.
    Therefore the bits of the result do not depend on the division of a prompt into chunks. Each chunk begins at the
    start of a page, and q has all rows of its last page.
    """
    page, window = kv.page, heads.window
    for chunk in listed(chunks):
        for first in range(chunk.start, chunk.end, page):
            end, row = min(first + page, chunk.end), chunk.first + first - chunk.start
            pages = kv.table[chunk.slot, : first // page + 1].long()
            keys, values = (load_cells(cache, (pages,)).transpose(0, 1).flatten(1, 2).float() for cache in (kv.k, kv.v))
            keys[:, end:], values[:, end:] = 0, 0  # These positions are not written yet, so their values are arbitrary.
            rows = q[row : row + page].float().view(page, heads.kv, -1, heads.dim).permute(1, 2, 0, 3).flatten(1, 2)
            distance = torch.arange(first, first + page)[:, None] - torch.arange(first + page)
            seen = (distance >= 0) & (distance < window) if window else distance >= 0
            scores = (rows @ keys.transpose(1, 2) * heads.scale).view(heads.kv, -1, page, first + page)
            weights = torch.softmax(scores.masked_fill(~seen.to(q.device), float("-inf")), -1).flatten(1, 2)
            attended = (weights @ values).view(heads.query, page, heads.dim)[:, : end - first]
            out[row : row + end - first] = attended.transpose(0, 1).flatten(1).to(out.dtype)


BLOCK_ATTENTION = Op(block_attention, block_attention, prompt_attention_bytes, outputs=("out",))


def attend(q, keys, values, out, window: int, scale: float) -> None:
    """Compute causal attention of the last rows over keys and values.

    Args:
        q: [n, heads, d].
        keys, values: [kv_heads, end, d].
        out: [n, heads * d] (output).
        window: Number of positions attended to. 0 attends to all.
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
        # In fp32 or with a mask, no fused backend supports grouped heads. With expanded heads, torch uses the
        # memory-efficient backend.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    mask: torch.Tensor | None = None
    if window:
        distance = torch.arange(end - n, end, device=q.device)[:, None] - torch.arange(end, device=q.device)[None, :]
        mask = (distance >= 0) & (distance < window)
    elif n != end:
        # This import loads torch's compiler, which takes a second.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(n, end)
    attended = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
    heads_first.copy_(attended[0])
