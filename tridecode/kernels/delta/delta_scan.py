"""delta_scan: carries the state of gated delta net layers through the blocks of prompts, and computes their outputs."""

import torch
import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT
from ..common import interpreted, options
from ..op import Op
from .arguments import DeltaHeads, RecordLayer
from .delta_chunks import BLOCK, DeltaChunksConfig, block_of, block_rows, decays, dot, load_tile, store_tile
from .gates import key_head_of, rounded, rounded_ref
from .prompt_tables import (
    RECORD_SOURCE,
    RECORD_TARGET,
    RECORDS_WIDTH,
    PromptTables,
    chunk_fields,
    load_field,
    read_tables,
    snapshot_record,
)


@triton.jit
def _store_state(
    state_ptr, covered_ptr, record, head, first_v, state, position, VALUE_HEADS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store columns first_v and following of the state of a head after `position` positions in a record.

    state: [BLOCK_V, K], the transposed columns.
    """
    unit = record * VALUE_HEADS + head
    offs = tl.arange(0, K)[None, :] * V + first_v + tl.arange(0, BLOCK_V)[:, None]
    tl.store(state_ptr + unit * (K * V) + offs, state.to(state_ptr.dtype.element_ty))
    if first_v == 0:
        tl.store(covered_ptr + unit, position)


@triton.jit
def _delta_scan_kernel(
    chunks_ptr, records_ptr, snapshots_ptr, mixed_ptr, rates_ptr, u_ptr, w_ptr, p_ptr, state_ptr, covered_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a V head of each chunk, block by block, and its states after the chunk and at snapshots.

    Grid: (PROGRAMS,). The programs share the work items. A work item is BLOCK_V columns of a V head of a chunk. Its
    state stays in registers. For each block, with u and w as in delta_chunks:

        u -= w S
        o = diag(exp(G)) Q S / sqrt(K) + P u
        S = exp(G[last]) S + K^T diag(exp(G[last] - G)) u

    The kernel computes the transposes of u, o and S. Then each product has BLOCK_V rows, so that Triton does not use
    wgmma, with which Triton 3.6 computes wrong numbers or reads out of bounds here.

    Args:
        chunks_ptr, records_ptr, snapshots_ptr: see PromptTables.
        mixed_ptr: [rows, C].
        rates_ptr: [rows, 2, VALUE_HEADS] fp32.
        u_ptr: [rows, VALUE_HEADS * V], u of delta_chunks (input) and the outputs o (output).
        w_ptr, p_ptr: see _delta_chunks_kernel.
        state_ptr: [records, VALUE_HEADS, K, V] fp32 or fp16 (in and out).
        covered_ptr: [records, VALUE_HEADS] int32 (output).
    """
    C: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    PARTS: tl.constexpr = V // BLOCK_V
    chunks = tl.sum((load_field(chunks_ptr, CHUNK_COUNT) > 0).to(tl.int32), 0)
    for item in tl.range(tl.program_id(0), chunks * (VALUE_HEADS * PARTS), PROGRAMS, num_stages=1):
        first_v = item % PARTS * BLOCK_V
        head, chunk = item // PARTS % VALUE_HEADS, item // (PARTS * VALUE_HEADS)
        slot, first, start, end = chunk_fields(chunks_ptr, chunk)
        source = tl.load(records_ptr + chunk * RECORDS_WIDTH + RECORD_SOURCE).to(tl.int64)
        target = tl.load(records_ptr + chunk * RECORDS_WIDTH + RECORD_TARGET).to(tl.int64)
        offs = tl.arange(0, K)[None, :] * V + first_v + tl.arange(0, BLOCK_V)[:, None]
        old_ptrs = state_ptr + (source * VALUE_HEADS + head) * (K * V) + offs
        state = tl.load(old_ptrs, mask=start + offs * 0 > 0, other=0.0).to(tl.float32)  # it is empty at position 0
        for number in tl.range(tl.cdiv(end, BLOCK) - start // BLOCK, num_stages=1):
            block = start // BLOCK + number
            rows, inside = block_rows(chunks_ptr, chunk, block)
            g = tl.load(rates_ptr + rows * (2 * VALUE_HEADS) + head, mask=inside, other=0.0)
            total, last = tl.cumsum(g, 0), tl.sum(g, 0)
            w = load_tile(w_ptr, rows, inside, head * K, VALUE_HEADS * K, K)
            key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
            q = load_tile(mixed_ptr, rows, inside, key_head * K, C, K)
            k = load_tile(mixed_ptr, rows, inside, (KEY_HEADS + key_head) * K, C, K)
            u = load_tile(u_ptr, rows, inside, head * V + first_v, VALUE_HEADS * V, BLOCK_V)
            p = load_tile(p_ptr, rows, inside, head * BLOCK, VALUE_HEADS * BLOCK, BLOCK)
            operand = state.to(w.dtype)
            u = tl.trans(u).to(tl.float32) - dot(operand, tl.trans(w), PRECISE, INTERPRETED)
            o = dot(operand, tl.trans(q), PRECISE, INTERPRETED) * (tl.exp(total) * K**-0.5)[None, :]
            o += dot(u.to(p.dtype), tl.trans(p), PRECISE, INTERPRETED)
            store_tile(u_ptr, rows, inside, head * V + first_v, tl.trans(o), VALUE_HEADS * V, BLOCK_V)
            u = (u * tl.exp(last - total)[None, :]).to(k.dtype)
            state = rounded(state * tl.exp(last) + dot(u, k, PRECISE, INTERPRETED), state_ptr)
            position = (block + 1) * BLOCK
            if position <= end:
                record = snapshot_record(snapshots_ptr, slot, position).to(tl.int64)
                if record >= 0:
                    _store_state(
                        state_ptr, covered_ptr, record, head, first_v, state, position, VALUE_HEADS, K, V, BLOCK_V
                    )  # fmt: skip
        _store_state(state_ptr, covered_ptr, target, head, first_v, state, end, VALUE_HEADS, K, V, BLOCK_V)


def delta_scan(
    tables: PromptTables, mixed, rates, u, w, p, records: RecordLayer, heads: DeltaHeads, *, config: DeltaChunksConfig
):
    """Compute the outputs of the chunks' rows, in place of u, and the states of their records and snapshots.

    Args:
        mixed, rates, w, p: see delta_chunks.
        u: [rows, heads.value_size] (in and out): the result of delta_chunks, then the outputs before norm and gate.
        records: state and covered are inputs and outputs.
    """
    _delta_scan_kernel[(config.programs,)](
        *tables,
        mixed,
        rates,
        u,
        w,
        p,
        records.state,
        records.covered,
        heads.key,
        heads.value,
        heads.tiled,
        heads.key_dim,
        heads.value_dim,
        min(config.block_v, heads.value_dim),
        config.programs,
        mixed.dtype == torch.float32,
        interpreted(),
        **options(config.num_warps),
    )


def delta_scan_ref(tables: PromptTables, mixed, rates, u, w, p, records: RecordLayer, heads: DeltaHeads):
    """Compute `delta_scan` in torch."""
    for read in read_tables(tables):
        state = records.state[read.source].float() * (read.chunk.start > 0)
        if read.chunk.start == 0:
            state = torch.zeros_like(state)
        kept = dict(read.snapshots)
        for start, end in read.blocks():
            rows, first = read.rows(start, end), start % BLOCK.value
            q, k, _ = block_of(mixed[rows], heads)
            total, _ = decays(rates[rows, 0].float())
            new, old, inner = (x[rows].float().unflatten(1, (heads.value, -1)).transpose(0, 1) for x in (u, w, p))
            inner = inner[:, :, first : first + end - start]
            new = new - old @ state
            factor = total.T[..., None]
            out = (q @ state) * factor.exp() * heads.key_dim**-0.5 + inner @ new
            u[rows] = out.transpose(0, 1).flatten(1).to(u.dtype)
            last = factor[:, -1:]
            state = rounded_ref(state * last.exp() + k.mT @ (new * (last - factor).exp()), records.state.dtype)
            if end in kept:
                records.state[kept[end]], records.covered[kept[end]] = state.to(records.state.dtype), end
        records.state[read.target], records.covered[read.target] = state.to(records.state.dtype), read.chunk.end


def delta_scan_bytes(tables, mixed, rates, u, w, p, records, heads) -> int:
    """Return the bytes that the kernel moves: the data of the rows, and one state in and out for each chunk."""
    chunks = len(read_tables(tables))
    return mixed.nbytes + 2 * u.nbytes + w.nbytes + p.nbytes + 2 * chunks * records.state[0].nbytes


DELTA_SCAN = Op(delta_scan, delta_scan_ref, delta_scan_bytes, (_delta_scan_kernel,))
