"""delta_conv: convolution and gates of the rows of prompts, before the scan."""

import torch
import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT, CHUNK_FIRST, chunk_of
from ..common import cdiv, next_power_of_2, options
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

BLOCK_H = 16  # heads of a program
ROWS = 4  # rows of a program
POSITIONS = tl.constexpr(RING)


@triton.jit
def _store_window(
    window_ptr, at, x, offs_c, mask, end, target, block_end, snapshot, C: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store the input x at the position `at` of a chunk in the windows that contain it.

    The inputs at the last WIDTH positions before `end` are stored in the window of `target`: a decode pass may repeat
    the last position. Those at the last WIDTH - 1 positions before the end of a block are also stored in the window of
    `snapshot`, unless it is -1.
    """
    window_ptr += (at & (POSITIONS - 1)) * C + offs_c
    if at >= tl.maximum(end - WIDTH, 0):
        tl.store(window_ptr + target * (POSITIONS * C), x, mask=mask)
    if (snapshot >= 0) & (at >= block_end - (WIDTH - 1)):
        tl.store(window_ptr + snapshot * (POSITIONS * C), x, mask=mask)


@triton.jit
def _convolve(
    tables, qkvz_ptr, mixed_ptr, conv_ptr, window_ptr, first_row, rows, stride_qkvz, first_head,
    FIRST: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Compute the convolution of ROWS rows in BLOCK_H of the HEADS heads from channel FIRST on, and store windows."""
    heads = first_head + tl.arange(0, BLOCK_H)[:, None]
    offs_c = FIRST + heads * D + tl.arange(0, D)[None, :]
    mask = (heads < HEADS) & (offs_c >= 0)
    taps, inputs = (), ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(conv_ptr + tap * C + offs_c, mask=mask, other=0.0),)  # type: ignore[assignment]
    for number in tl.static_range(ROWS + WIDTH - 1):  # all loads before the first result is used
        row = first_row + number - (WIDTH - 1)
        inside = mask & (row + offs_c * 0 >= 0) & (row + offs_c * 0 < rows)
        x = tl.load(qkvz_ptr + row * stride_qkvz + offs_c, mask=inside, other=0.0)
        inputs += (x.to(window_ptr.dtype.element_ty),)  # type: ignore[assignment]
    for number in tl.static_range(ROWS):
        row = first_row + number
        chunk, position, start, end, source, target, block_end, snapshot = _row_of(tables, row)
        if chunk >= 0:
            acc = tl.zeros([BLOCK_H, D], tl.float32)
            if position - start < WIDTH - 1:
                for tap in tl.static_range(WIDTH - 1):
                    at = position - (WIDTH - 1) + tap
                    ats = at + offs_c * 0
                    old_ptrs = window_ptr + source * (POSITIONS * C) + (at & (POSITIONS - 1)) * C + offs_c
                    old = tl.load(old_ptrs, mask=mask & (ats >= 0) & (ats < start), other=0.0)
                    x = tl.where(ats >= start, inputs[number + tap], old)
                    acc += x.to(tl.float32) * taps[tap].to(tl.float32)
                    if position == start:  # the first row also stores the inputs before the chunk
                        _store_window(window_ptr, at, x, offs_c, mask, end, target, block_end, snapshot, C, WIDTH)
            else:
                for tap in tl.static_range(WIDTH - 1):
                    acc += inputs[number + tap].to(tl.float32) * taps[tap].to(tl.float32)
            x = inputs[number + WIDTH - 1]
            _store_window(window_ptr, position, x, offs_c, mask, end, target, block_end, snapshot, C, WIDTH)
            y = silu(acc + x.to(tl.float32) * taps[WIDTH - 1].to(tl.float32))
            if NORM:
                y *= tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)[:, None]
            tl.store(mixed_ptr + row.to(tl.int64) * C + offs_c, y.to(mixed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_of(tables, row):
    """Return the chunk of a row, -1 without one, and its position, start, end, records, end of block and snapshot."""
    chunks_ptr, records_ptr, snapshots_ptr = tables
    firsts, counts = load_field(chunks_ptr, CHUNK_FIRST), load_field(chunks_ptr, CHUNK_COUNT)
    inside = (row >= firsts) & (row < firsts + counts)
    chunk = tl.max(tl.where(inside, tl.arange(0, inside.shape[0]), -1), 0)
    slot, first, start, end = chunk_fields(chunks_ptr, tl.maximum(chunk, 0))
    position = start + row - first
    records_ptr += tl.maximum(chunk, 0) * RECORDS_WIDTH
    source = tl.load(records_ptr + RECORD_SOURCE).to(tl.int64)
    target = tl.load(records_ptr + RECORD_TARGET).to(tl.int64)
    block_end = (position // BLOCK + 1) * BLOCK
    snapshot = tl.where(block_end <= end, snapshot_record(snapshots_ptr, slot, block_end), -1).to(tl.int64)
    return chunk, position, start, end, source, target, block_end, snapshot


@triton.jit(do_not_specialize=["rows"])
def _delta_conv_kernel(
    chunks_ptr, records_ptr, snapshots_ptr, qkvz_ptr, b_ptr, a_ptr, mixed_ptr, rates_ptr, stride_qkvz, rows,
    conv_ptr, a_log_ptr, dt_bias_ptr, window_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RATES: tl.constexpr,
):  # fmt: skip
    """Compute convolution, l2 norm and gates of rows, and store the windows of records.

    Grid: (cdiv(rows, ROWS), blocks of BLOCK_H heads of q and k, then of v). Rows outside all chunks are not written.
    Moves 2 * C * itemsize bytes a row.

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
    KEY_BLOCKS: tl.constexpr = (2 * KEY_HEADS + BLOCK_H - 1) // BLOCK_H
    first_row, block = tl.program_id(0) * ROWS, tl.program_id(1)
    tables = chunks_ptr, records_ptr, snapshots_ptr
    if block < KEY_BLOCKS:
        _convolve(
            tables, qkvz_ptr, mixed_ptr, conv_ptr, window_ptr, first_row, rows, stride_qkvz, block * BLOCK_H, 0,
            2 * KEY_HEADS, K, C, WIDTH, BLOCK_H, ROWS, True,
        )  # fmt: skip
    else:
        _convolve(
            tables, qkvz_ptr, mixed_ptr, conv_ptr, window_ptr, first_row, rows, stride_qkvz,
            (block - KEY_BLOCKS) * BLOCK_H, 2 * KEY_HEADS * K, VALUE_HEADS, V, C, WIDTH, BLOCK_H, ROWS, False,
        )  # fmt: skip
    if block == 0:
        heads = tl.arange(0, BLOCK_RATES)
        a_log = tl.load(a_log_ptr + heads, mask=heads < VALUE_HEADS, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + heads, mask=heads < VALUE_HEADS, other=0.0)
        for number in tl.static_range(ROWS):
            row = first_row + number
            in_chunk, _, _ = chunk_of(chunks_ptr, row)
            mask = heads < tl.where(in_chunk, VALUE_HEADS, 0)
            b = tl.load(b_ptr + row * VALUE_HEADS + heads, mask=mask, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + row * VALUE_HEADS + heads, mask=mask, other=0.0).to(tl.float32)
            rates_ptrs = rates_ptr + row * (2 * VALUE_HEADS) + heads
            tl.store(rates_ptrs, log_decay(a, a_log, dt_bias), mask=mask)
            tl.store(rates_ptrs + VALUE_HEADS, tl.sigmoid(b), mask=mask)


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
    blocks = cdiv(2 * heads.key, BLOCK_H) + cdiv(heads.value, BLOCK_H)
    _delta_conv_kernel[(cdiv(len(qkvz), ROWS), blocks)](
        *tables,
        qkvz,
        b,
        a,
        mixed,
        rates,
        qkvz.stride(0),
        len(qkvz),
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
        ROWS,
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
