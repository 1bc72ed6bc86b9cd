"""delta_conv: convolution and gates of the rows of prompts, before the scan."""

import torch
import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT, CHUNK_FIRST
from ..common import next_power_of_2, options
from ..op import Op
from .arguments import RING, DeltaHeads, DeltaWeights, RecordLayer
from .gates import L2_EPS, l2_norm, log_decay, silu
from .gates import rates as row_rates
from .prompt_tables import (
    BLOCK,
    RECORD_SOURCE,
    RECORD_TARGET,
    RECORDS_WIDTH,
    PromptTables,
    chunk_fields,
    load_field,
    read_tables,
    snapshot_record,
)

BLOCK_H = 16  # heads of a row that are computed at once
POSITIONS = tl.constexpr(RING)


@triton.jit
def _heads(
    qkvz_ptr, mixed_ptr, conv_ptr, window_ptr, row, position, start, end, source, target, snapshot, stride_qkvz,
    FIRST: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Compute the convolution of a row's HEADS heads of D channels from channel FIRST on, and store windows.

    The inputs at the last WIDTH positions before `end` are stored in the window of `target`: a decode pass may repeat
    the last position. Those at the last WIDTH - 1 positions before the end of the row's block are also stored in the
    window of `snapshot`, unless it is -1.
    """
    block_end = (position // BLOCK + 1) * BLOCK
    for first in tl.static_range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)[:, None]
        offs_c = FIRST + heads * D + tl.arange(0, D)[None, :]
        mask = (heads < HEADS) & (offs_c >= 0)
        acc = tl.zeros([BLOCK_H, D], tl.float32)
        for tap in tl.static_range(WIDTH):
            at = position - (WIDTH - 1) + tap
            ats = at + offs_c * 0
            new_ptrs = qkvz_ptr + (row - (WIDTH - 1) + tap) * stride_qkvz + offs_c
            new = tl.load(new_ptrs, mask=mask & (ats >= start), other=0.0).to(window_ptr.dtype.element_ty)
            entry = (at & (POSITIONS - 1)) * C + offs_c
            old_ptrs = window_ptr + source * (POSITIONS * C) + entry
            old = tl.load(old_ptrs, mask=mask & (ats >= 0) & (ats < start), other=0.0)
            x = tl.where(ats >= start, new, old)
            acc += x.to(tl.float32) * tl.load(conv_ptr + tap * C + offs_c, mask=mask, other=0.0).to(tl.float32)
            # The row stores its own input. The first row also stores those before the chunk.
            owns = at == position
            owns |= position == start
            if owns:
                if at >= tl.maximum(end - WIDTH, 0):
                    tl.store(window_ptr + target * (POSITIONS * C) + entry, x, mask=mask)
                if (snapshot >= 0) & (at >= block_end - (WIDTH - 1)):
                    tl.store(window_ptr + snapshot * (POSITIONS * C) + entry, x, mask=mask)
        y = silu(acc)
        if NORM:
            y *= tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
        tl.store(mixed_ptr + row * C + offs_c, y.to(mixed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _delta_conv_kernel(
    chunks_ptr, records_ptr, snapshots_ptr, qkvz_ptr, b_ptr, a_ptr, mixed_ptr, rates_ptr, stride_qkvz,
    conv_ptr, a_log_ptr, dt_bias_ptr, window_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_RATES: tl.constexpr,
):  # fmt: skip
    """Compute convolution, l2 norm and gates of one row, and store the windows of records.

    Grid: (rows,). Rows outside all chunks are not written. Reads each input WIDTH times, mostly from caches, and moves
    2 * C * itemsize bytes a row.

    Args:
        chunks_ptr, records_ptr, snapshots_ptr: see PromptTables.
        qkvz_ptr: [rows, ...], q, k and v before the convolution.
        b_ptr, a_ptr: [rows, VALUE_HEADS].
        mixed_ptr: [rows, C] (output): q and k of length 1, and v.
        rates_ptr: [rows, 2, VALUE_HEADS] fp32 (output): g and beta.
        conv_ptr: [WIDTH, C], the transposed weight.
        a_log_ptr, dt_bias_ptr: [VALUE_HEADS] fp32.
        window_ptr: [records, RING, C] (in and out).
    """
    C: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    row = tl.program_id(0)
    firsts, counts = load_field(chunks_ptr, CHUNK_FIRST), load_field(chunks_ptr, CHUNK_COUNT)
    inside = (row >= firsts) & (row < firsts + counts)
    chunk = tl.max(tl.where(inside, tl.arange(0, inside.shape[0]), -1), 0)
    if chunk < 0:
        return
    slot, first, start, end = chunk_fields(chunks_ptr, chunk)
    position = start + row - first
    records_ptr += chunk * RECORDS_WIDTH
    source, target = (
        tl.load(records_ptr + RECORD_SOURCE).to(tl.int64),
        tl.load(records_ptr + RECORD_TARGET).to(tl.int64),
    )
    block_end = (position // BLOCK + 1) * BLOCK
    snapshot = tl.where(block_end <= end, snapshot_record(snapshots_ptr, slot, block_end), -1).to(tl.int64)
    row = row.to(tl.int64)
    _heads(
        qkvz_ptr, mixed_ptr, conv_ptr, window_ptr, row, position, start, end, source, target, snapshot, stride_qkvz, 0,
        2 * KEY_HEADS, K, C, WIDTH, BLOCK_H, True,
    )  # fmt: skip
    _heads(
        qkvz_ptr, mixed_ptr, conv_ptr, window_ptr, row, position, start, end, source, target, snapshot, stride_qkvz,
        2 * KEY_HEADS * K, VALUE_HEADS, V, C, WIDTH, BLOCK_H, False,
    )  # fmt: skip
    heads = tl.arange(0, BLOCK_RATES)
    mask = heads < VALUE_HEADS
    b = tl.load(b_ptr + row * VALUE_HEADS + heads, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + row * VALUE_HEADS + heads, mask=mask, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + heads, mask=mask, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=mask, other=0.0)
    rates_ptr += row * (2 * VALUE_HEADS) + heads
    tl.store(rates_ptr, log_decay(a, a_log, dt_bias), mask=mask)
    tl.store(rates_ptr + VALUE_HEADS, tl.sigmoid(b), mask=mask)


def delta_conv(
    tables: PromptTables, qkvz, b, a, mixed, rates, weights: DeltaWeights, records: RecordLayer, heads: DeltaHeads
):
    """Compute what the scan reads, for the rows of chunks, and store the windows of their records and snapshots.

    Args:
        qkvz: [rows, channels + heads.value_size].
        b, a: [rows, value heads], projections of the rows.
        mixed: [rows, channels] (output): q and k of length 1, and v.
        rates: [rows, 2, value heads] fp32 (output): g and beta.
        records: window is an input and an output.
    """
    _delta_conv_kernel[(len(qkvz),)](
        *tables,
        qkvz,
        b,
        a,
        mixed,
        rates,
        qkvz.stride(0),
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        records.window,
        heads.key,
        heads.value,
        heads.key_dim,
        heads.value_dim,
        weights.width,
        BLOCK_H,
        next_power_of_2(heads.value),
        **options(8),
    )


def delta_conv_ref(
    tables: PromptTables, qkvz, b, a, mixed, rates, weights: DeltaWeights, records: RecordLayer, heads: DeltaHeads
):
    """Compute `delta_conv` in torch."""
    past = weights.width - 1
    for chunk, source, target, snapshots in read_tables(tables):
        before = [records.window[source, at % RING] if at >= 0 else records.window.new_zeros(heads.channels)
                  for at in range(chunk.start - past, chunk.start)]  # fmt: skip
        inputs = qkvz[chunk.rows, : heads.channels].to(records.window.dtype)
        inputs = torch.cat([torch.stack(before), inputs])  # from position start - past on
        taps = weights.conv.float()
        y = torch.nn.functional.conv1d(inputs.float().T[None], taps, groups=heads.channels)[0].T
        y = torch.nn.functional.silu(y)
        qk, v = y.split((2 * heads.key_size, heads.value_size), 1)
        qk = l2_norm(qk.unflatten(1, (-1, heads.key_dim))).flatten(1)
        mixed[chunk.rows] = torch.cat([qk, v], 1).to(mixed.dtype)
        beta, g = row_rates(b[chunk.rows], a[chunk.rows], weights)
        rates[chunk.rows, 0], rates[chunk.rows, 1] = g, beta
        ends = (chunk.end, target, weights.width), *((end, record, past) for end, record in snapshots)
        for end, record, count in ends:
            for at in range(max(end - count, 0), end):
                records.window[record, at % RING] = inputs[at - chunk.start + past]


def delta_conv_bytes(tables, qkvz, b, a, mixed, rates, weights, records, heads) -> int:
    """Return the bytes that a launch moves."""
    return 2 * mixed.nbytes + b.nbytes + a.nbytes + rates.nbytes


DELTA_CONV = Op(delta_conv, delta_conv_ref, delta_conv_bytes, (_delta_conv_kernel,), outputs=("mixed", "rates"))
