"""prompt_attention: causal attention of chunks of prompts, rows of one slot or of many, over K/V in their pages."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .common import interpreted, options
from .op import Op
from .splits import EMPTY, LOG2E

MAX_CHUNKS = 64  # of a pass: no more slots have prompts
SLOT, FIRST, COUNT, START = range(4)  # fields of a chunk: its slot, first row of the pass, rows, position of the first
_SLOT, _FIRST, _COUNT, _START = (tl.constexpr(i) for i in range(4))


@triton.jit
def _turns(
    acc,
    l,
    m,
    q,
    k_desc,
    v_desc,
    table_ptr,
    first,
    end,
    positions,
    layer_row,
    rows_of_page,
    BLOCK_T: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Attend to the positions [first, end), whole pages; MASKED where a row may not see all of them."""
    for t in tl.range(first, end, BLOCK_T, num_stages=STAGES):
        row = tl.load(table_ptr + t // BLOCK_T) * rows_of_page + layer_row
        s = tl.dot(q, k_desc.load([row, 0]).to(TYPE).T, input_precision="ieee")
        if MASKED:
            offs_t = (t + tl.arange(0, BLOCK_T))[None, :]
            seen = offs_t <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (offs_t > positions[:, None] - WINDOW)
            s = tl.where(seen, s, EMPTY)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)  # of a row that has seen nothing yet, EMPTY - EMPTY is 0
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = v_desc.load([row, 0])
        if MASKED:  # what lies behind the last row's position may be anything, NaN too
            v = tl.where((t + tl.arange(0, BLOCK_T) < end)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype).to(TYPE), v.to(TYPE), acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, l, m


@triton.jit
def _prompt_attention_kernel(
    meta_ptr,
    page_table_ptr,
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    scale,
    stride_table,
    layer_row,
    rows_of_page,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Each row attends to the positions of its slot up to its own.

    meta: [MAX_CHUNKS, 4] int32: of each chunk its slot, its first row, how many rows (0: no chunk), and the position of
    the first; page_table: [slots, max_pages] int32; q: [rows, HEADS, D]; K, V: descriptors of the whole pool as
    [pages * rows_of_page, D], a tile being the BLOCK_T positions of a page, the layer's and head's beginning at layer_row
    within it; out: [rows, HEADS, D] (output). Grid (blocks of rows, HEADS): blocks never straddle chunks, and those
    beyond the last leave. Nothing of lengths, places or pages is an argument, so one launch serves all.
    """
    head = tl.program_id(1)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most to do come first
    offs_c = tl.arange(0, MAX_CHUNKS)
    counts = tl.load(meta_ptr + offs_c * 4 + _COUNT)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    if block >= tl.sum(blocks, 0):
        return
    chunk = tl.sum((ends <= block).to(tl.int32), 0)
    within = block - (tl.sum(tl.where(offs_c == chunk, ends - blocks, 0), 0))
    meta_ptr += chunk * 4
    slot, first_row = tl.load(meta_ptr + _SLOT), tl.load(meta_ptr + _FIRST)
    count, start = tl.load(meta_ptr + _COUNT), tl.load(meta_ptr + _START)
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else q_ptr.dtype.element_ty
    offs_m = within * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    places = ((first_row + offs_m).to(tl.int64) * HEADS + head)[:, None] * D + offs_d[None, :]
    mask = (offs_m < count)[:, None] & (offs_d < D)[None, :]
    q = tl.load(q_ptr + places, mask=mask, other=0.0)
    q = (q.to(tl.float32) * (scale * LOG2E)).to(q_ptr.dtype.element_ty).to(TYPE)
    positions = start + tl.minimum(offs_m, count - 1)
    lowest, highest = start + within * BLOCK_M, start + tl.minimum(within * BLOCK_M + BLOCK_M, count) - 1
    table_ptr = page_table_ptr + slot * stride_table
    layer_row += head // (HEADS // KV_HEADS) * BLOCK_T
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_T * BLOCK_T
    else:  # whole pages that all rows see
        whole = (lowest + 1) // BLOCK_T * BLOCK_T
        acc, l, m = _turns(
            acc, l, m, q, k_desc, v_desc, table_ptr, 0, whole, positions, layer_row, rows_of_page, BLOCK_T, 0, False,
            STAGES, TYPE,
        )  # fmt: skip
        begin = whole
    acc, l, m = _turns(
        acc, l, m, q, k_desc, v_desc, table_ptr, begin, highest + 1, positions, layer_row, rows_of_page, BLOCK_T,
        WINDOW, True, STAGES, TYPE,
    )  # fmt: skip
    tl.store(out_ptr + places, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def prompt_attention(meta, page_table, q, pool, layer, out, window, scale, *, shape):
    """Attention of the chunks in meta; pool: the K/V cache's, [pages, layers, 2, kv_heads, page, D]. window: 0, or the
    positions attended to."""
    rows, heads, D = q.shape
    _, layers, _, kv_heads, page, _ = pool.shape
    flat = pool.view(-1, D)
    block = [page, triton.next_power_of_2(D)]
    descriptor = TensorDescriptor.from_tensor(flat, block)
    of_layer, rows_of_page = 2 * kv_heads * page, layers * 2 * kv_heads * page
    values = TensorDescriptor.from_tensor(flat[kv_heads * page :], block)
    blocks = triton.cdiv(rows, shape.block_m) + min(rows, MAX_CHUNKS) - 1
    _prompt_attention_kernel[(blocks, heads)](
        meta,
        page_table,
        q,
        descriptor,
        values,
        out,
        scale,
        page_table.stride(0),
        layer * of_layer,
        rows_of_page,
        heads,
        kv_heads,
        D,
        triton.next_power_of_2(D),
        shape.block_m,
        page,
        MAX_CHUNKS,
        window,
        shape.stages,
        interpreted(),
        **options(shape.num_warps),
    )


def prompt_attention_ref(meta, page_table, q, pool, layer, out, window, scale):
    heads, D = q.shape[1:]
    _, _, _, kv_heads, page, _ = pool.shape
    for slot, first, count, start in meta.tolist():
        if not count:
            continue
        end = start + count
        pages = pool[page_table[slot, : -(-end // page)].long(), layer]
        keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end].float()
        queries = q[first : first + count].float().view(count, kv_heads, -1, D).permute(1, 2, 0, 3)
        scores = queries @ keys[:, None].transpose(2, 3) * scale
        behind = torch.arange(start, end, device=q.device)[:, None] - torch.arange(end, device=q.device)[None, :]
        hidden = (behind < 0) | ((behind >= window) if window else False)
        attended = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ values[:, None]
        out[first : first + count] = attended.permute(2, 0, 1, 3).reshape(count, heads, D).to(out.dtype)


def prompt_attention_bytes(meta, page_table, q, pool, layer, out, window, scale) -> int:
    """q and the output, and K and V of each slot once."""
    ends = sum(start + count for _, _, count, start in meta.tolist() if count)
    return q.nbytes + out.nbytes + 2 * ends * pool.shape[3] * pool.shape[5] * pool.itemsize


PROMPT_ATTENTION = Op(
    prompt_attention, prompt_attention_ref, prompt_attention_bytes, (_prompt_attention_kernel,), outputs=("out",)
)
