"""write_kv: writes K and V of the rows of a pass to the cache.

It precedes attention in which rows attend to each other.
"""

import triton
import triton.language as tl

from ..common import (
    META_WIDTH,
    POSITION,
    RUN,
    SLOT,
    STATUS,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    options,
    running,
)
from ..op import Op
from .arguments import Heads, KVLayer, Rope
from .new_token import load_key, store_token
from .pages import Cache, cell_of, head_of
from .rope import Rotary, rms_rope, rotated, rotation


@triton.jit
def _write_kv_kernel(
    meta_ptr, qkv_ptr, stride_qkv,
    table_ptr, stride_table,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write K and V of each row's token to the cache. K is rotated, after normalizing it if QK_NORM.

    A program writes one K/V head of a row. Grid: (KV_HEADS, rows). Moves (8 + 2 * itemsize) * D bytes per row and head.
    Every row of a tile contains the key, as in attention, so that both kernels compute the same bits.

    Args:
        k_ptr, v_ptr: K and V of the layer (outputs), which must not be fp8.
        Others: see _attention_kernel.
    """
    cache = Cache(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh)
    rotary = Rotary(cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps)
    head, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    position = tl.where(status == RUN, tl.load(meta_ptr + POSITION), 0)  # The position of an idle row may be invalid.
    page = tl.load(table_ptr + tl.load(meta_ptr + SLOT) * stride_table + position // PAGE).to(tl.int64)
    offs_g, offs_d = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    factors = rotation(rotary, k_norm_ptr, position, offs_d, D, ROTARY, QK_NORM)
    if PDL:
        gdc_wait()
    if status != RUN:
        return
    new_ptr = qkv_ptr + row * stride_qkv + (HEADS * (Q_COLUMNS // D) + head) * D
    k, partner = load_key(new_ptr, offs_g, (offs_g >= 0)[:, None] & mask_d[None, :], D, BLOCK_D, ROTARY)
    v = tl.load(new_ptr + KV_HEADS * D + offs_d, mask=mask_d, other=0.0)
    k = rms_rope(k, partner, factors, eps, D, QK_NORM)
    cache = head_of(cache, head)
    store_token(cache, page, cell_of(cache, page, position, PAGE, D), position, k, v, True, PAGE, D, False)


def write_kv(meta, qkv, kv: KVLayer, rope: Rope, heads: Heads, *, config, pdl=False):
    """Write K and V of each row's position to the cache.

    Args:
        qkv: [rows, heads * query_columns + 2 kv_heads * head_dim].
        config: Launch config of the attention that follows.
    """
    _write_kv_kernel[(heads.kv, len(meta))](
        meta,
        qkv,
        qkv.stride(0),
        *kv.kernel_arguments(),
        *rope.kernel_arguments(),
        kv.page,
        heads.query,
        heads.kv,
        heads.dim,
        next_power_of_2(heads.dim),
        max(next_power_of_2(heads.group), 8),
        rope.k_norm is not None,
        rope.rotary,
        heads.query_columns,
        pdl,
        **options(config.num_warps, pdl),
    )


def write_kv_ref(meta, qkv, kv: KVLayer, rope: Rope, heads: Heads):
    """Compute `write_kv` in torch."""
    for row in running(meta, len(meta)):
        slot, position = meta[row, [SLOT.value, POSITION.value]].tolist()
        _, _, k, v = heads.split(qkv[row].float())
        cell = kv.table[slot, position // kv.page].long(), slice(None), position % kv.page
        kv.k[cell] = rotated(k, rope.k_norm, rope.cos[position], rope.sin[position], rope.eps).to(kv.k.dtype)
        kv.v[cell] = v.to(kv.v.dtype)


def write_kv_bytes(meta, qkv, kv: KVLayer, rope: Rope, heads: Heads) -> int:
    """Return the bytes that a launch moves."""
    return len(running(meta, len(meta))) * 2 * heads.kv * heads.dim * (qkv.itemsize + kv.k.itemsize)


WRITE_KV = Op(write_kv, write_kv_ref, write_kv_bytes, (_write_kv_kernel,))
