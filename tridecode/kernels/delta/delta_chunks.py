"""delta_chunks: what the scan of a prompt needs from each block of SCAN positions, without the state before it.

Within a block, let G be the running sum of g, and D[i, j] = exp(G[i] - G[j]) for i >= j, else 0. The updates u of a
block follow from the state S before it:

    T = (1 + strictly lower part of (diag(beta) K K^T * D)) ^ -1
    u = T diag(beta) V - (T diag(beta exp(G)) K) S = v_new - w S

Source: "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, 2024), and the WY form of "Parallelizing Linear Transformers
with the Delta Rule over Sequence Length" (Yang et al., 2024).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common import interpreted, options
from ..op import Op
from .arguments import DeltaHeads
from .gates import key_head_of
from .prompt_tables import BLOCK, PromptTables, blocks_of, chunk_fields, pick, read_tables

SUB = tl.constexpr(16)  # rows of the diagonal blocks that are inverted row by row
SUBS = tl.constexpr(4)


@dataclass(frozen=True)
class DeltaChunksConfig:
    """Launch config of delta_chunks and of delta_scan.

    Attributes:
        programs: Number of programs that share the work items.
        block_v: Columns of the state that a program of delta_scan has. delta_chunks does not read it.
    """

    programs: int
    num_warps: int = 4
    block_v: int = 32


@triton.jit
def dot(x, y, PRECISE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return x @ y in fp32. Operands of 32 bits are rounded to TF32, unless PRECISE: then to three TF32 parts."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(x, y, input_precision="tf32x3" if PRECISE else "tf32")


@triton.jit
def block_rows(chunks_ptr, chunk, block):
    """Return the rows of a block in the pass, int64 [BLOCK], and whether they belong to the chunk."""
    slot, first, start, end = chunk_fields(chunks_ptr, chunk)
    positions = block * BLOCK + tl.arange(0, BLOCK)
    inside = (positions >= start) & (positions < end)
    return tl.where(inside, first + positions - start, 0).to(tl.int64), inside


@triton.jit
def load_tile(ptr, rows, inside, first, STRIDE: tl.constexpr, D: tl.constexpr):
    """Load D columns from `first` on of rows [BLOCK] of a tensor [..., STRIDE]. Rows outside are 0."""
    offs_d = tl.arange(0, D)[None, :]
    return tl.load(ptr + rows[:, None] * STRIDE + first + offs_d, mask=inside[:, None] & (offs_d >= 0), other=0.0)


@triton.jit
def store_tile(ptr, rows, inside, first, x, STRIDE: tl.constexpr, D: tl.constexpr):
    """Store a tile at the place from which load_tile loads it."""
    offs_d = tl.arange(0, D)[None, :]
    ptrs = ptr + rows[:, None] * STRIDE + first + offs_d
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=inside[:, None] & (offs_d >= 0))


@triton.jit
def _inverse(lower, INTERPRETED: tl.constexpr):
    """Return the inverse of 1 + lower, [BLOCK, BLOCK], for a strictly lower triangular matrix.

    The diagonal blocks of SUB rows are inverted together, row by row, in fp32. With D, their inverse, and M = D times
    the rest of the matrix, whose fourth power is 0, the inverse is X = D - M X, from X = D in three iterations.
    """
    offs, subs, columns = tl.arange(0, BLOCK), tl.arange(0, SUBS), tl.arange(0, SUB)
    on_diagonal = (offs[:, None, None] // SUB == subs[None, :, None]) & (columns[None, None, :] >= 0)
    whole = tl.reshape(lower, [BLOCK, SUBS, SUB])
    diagonal = tl.reshape(tl.sum(tl.where(on_diagonal, whole, 0.0), 1), [SUBS, SUB, SUB])
    inverse = tl.where(columns[None, :, None] == columns[None, None, :], 1.0, diagonal * 0.0)
    for i in range(1, SUB):
        own = columns[None, :, None] == i
        row = tl.sum(tl.where(own, diagonal, 0.0), 1)
        row = tl.sum(row[:, :, None] * inverse, 1)
        inverse -= tl.where(own, row[:, None, :], 0.0)
    inverse = tl.reshape(inverse, [BLOCK, 1, SUB])
    d = tl.reshape(tl.where(on_diagonal, inverse, 0.0), [BLOCK, BLOCK])
    rest = tl.where(offs[:, None] // SUB == offs[None, :] // SUB, 0.0, lower)
    m = dot(d, rest, True, INTERPRETED)
    x = d
    for _ in tl.range(SUBS - 1, num_stages=1, loop_unroll_factor=1):  # a loop needs far fewer registers
        x = d - dot(m, x, True, INTERPRETED)
    return x


@triton.jit
def _delta_chunks_kernel(
    chunks_ptr, mixed_ptr, rates_ptr, u_ptr, w_ptr, p_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute u (for S = 0), w and p of each block and V head.

    Grid: (PROGRAMS,). The programs share the work items. A work item is one V head of a block.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        mixed_ptr: [rows, C].
        rates_ptr: [rows, 2, VALUE_HEADS] fp32.
        u_ptr: [rows, VALUE_HEADS * V] (output).
        w_ptr: [rows, VALUE_HEADS * K] (output).
        p_ptr: [rows, VALUE_HEADS * BLOCK] (output): diag(exp(G)) Q K^T diag(exp(-G)) / sqrt(K), its lower part.
    """
    C: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    blocks = blocks_of(chunks_ptr)
    ends = tl.cumsum(blocks, 0)
    offs = tl.arange(0, BLOCK)
    for item in tl.range(tl.program_id(0), tl.sum(blocks, 0) * VALUE_HEADS, PROGRAMS, num_stages=1):
        unit, head = item // VALUE_HEADS, item % VALUE_HEADS
        chunk = tl.sum((ends <= unit).to(tl.int32), 0)
        _, _, start, _ = chunk_fields(chunks_ptr, chunk)
        block = start // BLOCK + unit - (pick(ends, chunk) - pick(blocks, chunk))
        rows, inside = block_rows(chunks_ptr, chunk, block)
        g = tl.load(rates_ptr + rows * (2 * VALUE_HEADS) + head, mask=inside, other=0.0)
        beta = tl.load(rates_ptr + rows * (2 * VALUE_HEADS) + VALUE_HEADS + head, mask=inside, other=0.0)
        key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
        q = load_tile(mixed_ptr, rows, inside, key_head * K, C, K)
        k = load_tile(mixed_ptr, rows, inside, (KEY_HEADS + key_head) * K, C, K)
        total = tl.cumsum(g, 0)
        behind = offs[:, None] - offs[None, :]
        decay = tl.exp(tl.where(behind >= 0, total[:, None] - total[None, :], float("-inf")))
        keys = tl.trans(k)
        p = dot(q, keys, PRECISE, INTERPRETED) * decay * K**-0.5
        store_tile(p_ptr, rows, inside, head * BLOCK, p, VALUE_HEADS * BLOCK, BLOCK)
        lower = tl.where(behind > 0, dot(k, keys, PRECISE, INTERPRETED) * decay * beta[:, None], 0.0)
        t = _inverse(lower, INTERPRETED)
        v = load_tile(mixed_ptr, rows, inside, 2 * KEY_HEADS * K + head * V, C, V).to(tl.float32)
        u = dot(t, v * beta[:, None], PRECISE, INTERPRETED)
        store_tile(u_ptr, rows, inside, head * V, u, VALUE_HEADS * V, V)
        k = load_tile(mixed_ptr, rows, inside, (KEY_HEADS + key_head) * K, C, K)  # again, to save registers
        w = dot(t, k.to(tl.float32) * (beta * tl.exp(total))[:, None], PRECISE, INTERPRETED)
        store_tile(w_ptr, rows, inside, head * K, w, VALUE_HEADS * K, K)


def delta_chunks(chunks, mixed, rates, u, w, p, heads: DeltaHeads, *, config: DeltaChunksConfig):
    """Compute u, w and p of the blocks of all chunks.

    Args:
        mixed: [rows, channels]: q and k of length 1, and v.
        rates: [rows, 2, value heads] fp32: g and beta.
        u: [rows, heads.value_size] (output).
        w: [rows, value heads * key_dim] (output).
        p: [rows, value heads * SCAN] (output).
    """
    _delta_chunks_kernel[(config.programs,)](
        chunks,
        mixed,
        rates,
        u,
        w,
        p,
        heads.key,
        heads.value,
        heads.tiled,
        heads.key_dim,
        heads.value_dim,
        config.programs,
        mixed.dtype == torch.float32,
        interpreted(),
        **options(config.num_warps),
    )


def delta_chunks_ref(chunks, mixed, rates, u, w, p, heads: DeltaHeads):
    """Compute `delta_chunks` in torch."""
    none = chunks.new_zeros(len(chunks), 3)
    for read in read_tables(PromptTables(chunks, none[:, :2], none)):
        for start, end in read.blocks():
            rows = read.rows(start, end)
            q, k, v = block_of(mixed[rows], heads)
            g, beta = rates[rows].float().unbind(1)
            total, decay = decays(g)
            lower = ((k @ k.mT) * decay * beta.T[..., None]).tril(-1)
            right = torch.cat([v, k * total.exp().T[..., None]], 2) * beta.T[..., None]
            solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
            new, old = solved.split((heads.value_dim, heads.key_dim), 2)
            u[rows], w[rows] = (x.transpose(0, 1).flatten(1).to(u.dtype) for x in (new, old))
            first, block = start % BLOCK.value, BLOCK.value
            products = q.new_zeros(len(g), heads.value, block)
            products[:, :, first : first + len(g)] = ((q @ k.mT) * decay * heads.key_dim**-0.5).transpose(0, 1)
            p[rows] = products.flatten(1).to(p.dtype)


def block_of(mixed: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of the rows of a block in fp32: [value heads, rows, key_dim or value_dim]."""
    q, k, v = mixed.float().split((heads.key_size, heads.key_size, heads.value_size), 1)
    q, k = (heads.of_values(x.unflatten(1, (heads.key, -1)), 1).transpose(0, 1) for x in (q, k))
    return q, k, v.unflatten(1, (heads.value, -1)).transpose(0, 1)


def decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the running sums of g [rows, value heads], and the decays between rows [value heads, rows, rows]."""
    total = g.cumsum(0)
    between = (total[:, None] - total[None]).permute(2, 0, 1)
    above = torch.ones(len(g), len(g), dtype=torch.bool, device=g.device).triu(1)
    return total, between.masked_fill(above, float("-inf")).exp()


def delta_chunks_bytes(chunks, mixed, rates, u, w, p, heads) -> int:
    """Return the bytes that a launch moves."""
    return mixed.nbytes + rates.nbytes + u.nbytes + w.nbytes + p.nbytes


DELTA_CHUNKS = Op(delta_chunks, delta_chunks_ref, delta_chunks_bytes, (_delta_chunks_kernel,), outputs=("u", "w", "p"))
