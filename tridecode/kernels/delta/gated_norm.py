"""gated_norm: the norm and the gate of the outputs of gated delta net layers in prompt passes."""

import triton
import triton.language as tl

from ..chunks import chunk_of, listed
from ..common import options
from ..op import Op
from .arguments import DeltaHeads
from .gates import gated_norm as gated_norm_of
from .gates import norm_and_gate

BLOCK_H = 16  # heads of a row that are computed at once


@triton.jit
def _gated_norm_kernel(
    chunks_ptr, o_ptr, z_ptr, norm_ptr, out_ptr, stride_z, eps, HEADS: tl.constexpr, V: tl.constexpr,
    SIGMOID: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Normalize each head of a row and multiply it by its gate. Rows outside all chunks are not written.

    Grid: (rows, cdiv(HEADS, BLOCK_H)).

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        o_ptr: [rows, HEADS * V].
        z_ptr: [rows, HEADS * V], rows stride_z apart.
        norm_ptr: [V] fp32.
        out_ptr: [rows, HEADS * V] (output).
    """
    row = tl.program_id(0)
    in_chunk, _, _ = chunk_of(chunks_ptr, row)
    if not in_chunk:
        return
    row = row.to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    offs_v = tl.arange(0, V)[None, :]
    offs = heads * V + offs_v
    mask = (heads < HEADS) & (offs_v >= 0)
    o = tl.load(o_ptr + row * (HEADS * V) + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * stride_z + offs, mask=mask, other=0.0).to(tl.float32)
    o = norm_and_gate(o, tl.sum(o * o, 1)[:, None], z, tl.load(norm_ptr + offs_v), eps, V, SIGMOID)
    tl.store(out_ptr + row * (HEADS * V) + offs, o.to(out_ptr.dtype.element_ty), mask=mask)


def gated_norm(chunks, o, qkvz, out, norm, heads: DeltaHeads):
    """Write the norm of o times its weight and the gate of z to the chunks' rows of out.

    Args:
        o: [rows, heads.value_size].
        qkvz: [rows, channels + heads.value_size]; z is its last part.
        out: [rows, heads.value_size] (output).
        norm: [value_dim] fp32.
    """
    z = qkvz[:, heads.channels :]
    _gated_norm_kernel[(len(out), -(-heads.value // BLOCK_H))](
        chunks, o, z, norm, out, z.stride(0), heads.eps, heads.value, heads.value_dim, heads.sigmoid, BLOCK_H,
        **options(4),
    )  # fmt: skip


def gated_norm_ref(chunks, o, qkvz, out, norm, heads: DeltaHeads):
    """Compute `gated_norm` in torch."""
    for chunk in listed(chunks):
        z = qkvz[chunk.rows, heads.channels :]
        x, z = (part.float().unflatten(1, (heads.value, -1)) for part in (o[chunk.rows], z))
        out[chunk.rows] = gated_norm_of(x, z, norm, heads).flatten(1).to(out.dtype)


def gated_norm_bytes(chunks, o, qkvz, out, norm, heads) -> int:
    """Return the bytes that a launch moves."""
    return o.nbytes + 2 * out.nbytes


GATED_NORM = Op(gated_norm, gated_norm_ref, gated_norm_bytes, (_gated_norm_kernel,), outputs=("out",))
