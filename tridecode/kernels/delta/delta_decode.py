"""delta_decode: updates the state of gated delta net layers by the new tokens of each request, and reads it.

A request has one row, or several: its next token and drafts after it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common import (
    META_WIDTH,
    POSITION,
    RECORD,
    RUN,
    SLOT,
    STATUS,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    options,
    running,
)
from ..linear.epilogue import load_partials, norm_scale
from ..linear.project import Normed
from ..op import Op
from .arguments import RING, DeltaHeads, DeltaWeights, DraftRows, RecordLayer
from .gates import (
    L2_EPS,
    gated_norm,
    key_head_of,
    l2_norm,
    log_decay,
    norm_and_gate,
    rates,
    rounded,
    rounded_ref,
    silu,
    split_heads,
)

BLOCK_X = 1024  # columns of the hidden state that are multiplied at once
POSITIONS = tl.constexpr(RING)


@dataclass(frozen=True)
class DeltaConfig:
    """Launch config of delta_decode."""

    queries: int = 1  # rows of each request
    num_warps: int = 4
    batch: int = 4  # rows of a request that are loaded together, a divisor of queries


@triton.jit
def _add(a0, b0, c0, d0, e0, a1, b1, c1, d1, e1):
    """Add five pairs, so that one reduction computes five sums."""
    return a0 + a1, b0 + b1, c0 + c1, d0 + d1, e0 + e1


@triton.jit
def _load_tile(ptr, first, end, BLOCK: tl.constexpr):
    """Load elements first to first + BLOCK - 1. Elements at `end` and later are 0."""
    offs = first + tl.arange(0, BLOCK)
    return tl.load(ptr + offs, mask=offs < end, other=0.0)


@triton.jit
def _load_tiles(ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Load N elements as a tuple of tiles [BLOCK]."""
    tiles = ()
    for first in tl.static_range(0, N, BLOCK):
        tiles += (_load_tile(ptr, first, N, BLOCK),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _products(x, y, PARTS: tl.constexpr):
    """Return PARTS partial sums of the products of two tiles. A thread adds the products that it has."""
    products = x.to(tl.float32) * y.to(tl.float32)
    return tl.sum(tl.reshape(products, [PARTS, x.shape[0] // PARTS]), 1)


@triton.jit
def _load_past(window_ptr, position, offs_c, C: tl.constexpr, WIDTH: tl.constexpr):
    """Return the inputs of channels offs_c at the WIDTH - 1 positions before `position` as a tuple."""
    inputs = ()
    for tap in tl.static_range(WIDTH - 1):
        at = position - (WIDTH - 1) + tap
        exists = at + offs_c * 0 >= 0
        inputs += (tl.load(window_ptr + (at & (POSITIONS - 1)) * C + offs_c, mask=exists, other=0.0),)  # type: ignore[assignment]
    return inputs


@triton.jit
def _load_rows(ptr, offs_c, first, count, stride, type_ptr, BATCH: tl.constexpr):
    """Return columns offs_c of BATCH rows from `first` on as a tuple, in the type of type_ptr's elements."""
    rows = ()
    for number in tl.static_range(BATCH):
        row = first + number
        x = tl.load(ptr + row * stride + offs_c, mask=row + offs_c * 0 < count, other=0.0)
        rows += (x.to(type_ptr.dtype.element_ty),)  # type: ignore[assignment]
    return rows


@triton.jit
def _load_taps(conv_ptr, offs_c, C: tl.constexpr, WIDTH: tl.constexpr):
    """Load the weights of the convolution of channels offs_c as a tuple."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(conv_ptr + tap * C + offs_c),)  # type: ignore[assignment]
    return taps


@triton.jit
def _convolve(inputs, taps, WIDTH: tl.constexpr, BATCH: tl.constexpr):
    """Return the activated convolution of each row as a tuple."""
    rows = ()
    for number in tl.static_range(BATCH):
        acc = inputs[number].to(tl.float32) * taps[0].to(tl.float32)
        for tap in tl.static_range(1, WIDTH):
            acc += inputs[number + tap].to(tl.float32) * taps[tap].to(tl.float32)
        rows += (silu(acc),)  # type: ignore[assignment]
    return rows


@triton.jit
def _store_rows(window_ptr, rows, position, offs_c, first, count, C: tl.constexpr, BATCH: tl.constexpr):
    """Store inputs of the convolution in the window: those of rows before `count`."""
    for number in tl.static_range(BATCH):
        at = (position + first + number) & (POSITIONS - 1)
        tl.store(window_ptr + at * C + offs_c, rows[number], mask=first + number + offs_c * 0 < count)


@triton.jit
def _last(inputs, WIDTH: tl.constexpr, BATCH: tl.constexpr):
    """Return the last WIDTH - 1 of WIDTH - 1 + BATCH inputs."""
    last = ()
    for tap in tl.static_range(WIDTH - 1):
        last += (inputs[BATCH + tap],)  # type: ignore[assignment]
    return last


@triton.jit
def _pick(rows, number, BATCH: tl.constexpr):
    """Return rows[number]. Registers cannot be indexed."""
    x = rows[0]
    for other in tl.static_range(1, BATCH):
        x = tl.where(number == other, rows[other], x)
    return x


@triton.jit
def _advance(state, decay, k, u, state_ptr):
    """Return the state after an update. With fma in the source, every copy of the code rounds in the same way."""
    k, u = tl.broadcast(k[:, None, :, None], u[None, :, None, :])
    return rounded(tl.fma(k, u, state * decay), state_ptr)


@triton.jit
def _read(state, k):
    """Return the product of the transposed state with k: [V_HIGH, V_LOW]."""
    return tl.sum(tl.sum(state * k[:, None, :, None], 2), 0)


@triton.jit(do_not_specialize=["n_sumsq"])
def _delta_decode_kernel(
    meta_ptr, qkvz_ptr, x_ptr, sumsq_ptr, out_ptr, stride_qkvz, stride_xm, stride_sumsq, stride_om, n_sumsq, eps,
    conv_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, norm_eps,
    state_ptr, window_ptr, covered_ptr,
    draft_k_ptr, draft_u_ptr, draft_g_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_LOW: tl.constexpr,
    V_LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_X: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    QUERIES: tl.constexpr,
    BATCH: tl.constexpr,
    DRAFTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the new tokens of one V head of a request.

    Grid: (VALUE_HEADS, requests). A program has the whole matrix [K, V] of its head in registers. Its loads are in
    flight before `gdc_wait`, because only earlier passes wrote it. It first replays the updates by accepted drafts:
    those between the positions that the state covers and the position of the request. If the state covers the request's
    position already, because the pass is a repetition, it is only read, with the same bits as the first time. The
    updates by drafts are stored, but the state that they lead to is not. Reads and writes the matrix once.

    Args:
        meta_ptr: [requests * QUERIES, META_WIDTH] int32. The active rows of a request come first.
        qkvz_ptr: [rows, C + VALUE_HEADS * V], C = (2 KEY_HEADS * K + VALUE_HEADS * V).
        x_ptr: [rows, HIDDEN], what the linear that computed qkvz has read.
        sumsq_ptr: [rows, ...] fp32, `n_sumsq` partial sums of squares, if NORMED: x is not divided by its rms yet.
        out_ptr: [rows, VALUE_HEADS * V] (output).
        conv_ptr: [WIDTH, C], the transposed weight.
        b_ptr, a_ptr: [VALUE_HEADS, HIDDEN].
        a_log_ptr, dt_bias_ptr: [VALUE_HEADS] fp32. norm_ptr: [V] fp32.
        state_ptr: [records, VALUE_HEADS, K, V] fp32 or fp16 (in and out).
        window_ptr: [records, RING, C] (in and out).
        covered_ptr: [records, VALUE_HEADS] int32 (in and out).
        draft_k_ptr: [slots, RING, KEY_HEADS, K] fp32 (in and out), if DRAFTS.
        draft_u_ptr: [slots, RING, VALUE_HEADS, V] fp32 (in and out), if DRAFTS.
        draft_g_ptr: [slots, RING, VALUE_HEADS] fp32 (in and out), if DRAFTS.
    """
    C: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    K_HIGH: tl.constexpr = K // K_LOW
    V_HIGH: tl.constexpr = V // V_LOW
    KEEP: tl.constexpr = QUERIES == BATCH
    head, request = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    meta_ptr += request * (QUERIES * META_WIDTH)
    status = tl.load(meta_ptr + STATUS)
    position = tl.load(meta_ptr + POSITION)
    record, slot = tl.load(meta_ptr + RECORD).to(tl.int64), tl.load(meta_ptr + SLOT).to(tl.int64)
    runs = status == RUN
    position = tl.where(runs, position, 0)  # The position of a row that is not active may be invalid.
    count = 1  # Number of active rows of the request, if its first row is active.
    for other in tl.static_range(1, QUERIES):
        count += (tl.load(meta_ptr + other * META_WIDTH + STATUS) == RUN).to(tl.int32)

    # In this order of axes, the threads of a warp share V_LOW columns and K_LOW groups of rows, and warps the columns.
    offs_k = tl.arange(0, K_LOW)[:, None] * K_HIGH + tl.arange(0, K_HIGH)[None, :]
    offs_v = tl.arange(0, V_HIGH)[:, None] * V_LOW + tl.arange(0, V_LOW)[None, :]
    state_offs = offs_k[:, None, :, None] * V + offs_v[None, :, None, :]
    state_ptrs = state_ptr + (record * VALUE_HEADS + head) * (K * V) + state_offs
    state = tl.load(state_ptrs, mask=state_offs * 0 < position, other=0.0).to(tl.float32)  # empty at position 0
    covered_ptr += record * VALUE_HEADS + head
    covered = tl.load(covered_ptr)
    key_head = key_head_of(head, KEY_HEADS, VALUE_HEADS, TILED)
    channels_q, channels_k = key_head * K + offs_k, (KEY_HEADS + key_head) * K + offs_k
    channels_v = 2 * KEY_HEADS * K + head * V + offs_v
    window_ptr += record * (POSITIONS * C)
    past_q = _load_past(window_ptr, position, channels_q, C, WIDTH)
    past_k = _load_past(window_ptr, position, channels_k, C, WIDTH)
    past_v = _load_past(window_ptr, position, channels_v, C, WIDTH)
    if KEEP:
        taps_q, taps_k = _load_taps(conv_ptr, channels_q, C, WIDTH), _load_taps(conv_ptr, channels_k, C, WIDTH)
        taps_v = _load_taps(conv_ptr, channels_v, C, WIDTH)
        w_b = _load_tiles(b_ptr + head * HIDDEN, HIDDEN, BLOCK_X)
        w_a = _load_tiles(a_ptr + head * HIDDEN, HIDDEN, BLOCK_X)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    norm = tl.load(norm_ptr + offs_v)
    if PDL:
        gdc_wait()
    if not runs:
        return

    row = (request * QUERIES).to(tl.int64)
    qkvz_ptr += row * stride_qkvz
    if DRAFTS:
        draft_k_ptr += slot * (POSITIONS * KEY_HEADS * K) + key_head * K
        draft_u_ptr += slot * (POSITIONS * VALUE_HEADS * V) + head * V
        draft_g_ptr += slot * (POSITIONS * VALUE_HEADS) + head
    writes = head < KEY_HEADS if TILED else head % (VALUE_HEADS // KEY_HEADS) == 0
    shared = tl.where(writes, count, 0)  # one V head writes the q and k that several share
    zeros = tl.zeros([K], tl.float32)
    for first in range(0, QUERIES, BATCH):
        if not KEEP:  # they would need too many registers
            taps_q, taps_k = _load_taps(conv_ptr, channels_q, C, WIDTH), _load_taps(conv_ptr, channels_k, C, WIDTH)
            taps_v = _load_taps(conv_ptr, channels_v, C, WIDTH)
        # All loads of the rows, before the first result is used.
        new_q = _load_rows(qkvz_ptr, channels_q, first, count, stride_qkvz, window_ptr, BATCH)
        new_k = _load_rows(qkvz_ptr, channels_k, first, count, stride_qkvz, window_ptr, BATCH)
        new_v = _load_rows(qkvz_ptr, channels_v, first, count, stride_qkvz, window_ptr, BATCH)
        z = _load_rows(qkvz_ptr, C + head * V + offs_v, first, count, stride_qkvz, qkvz_ptr, BATCH)
        b, a, sumsq = (), (), ()
        for other in tl.static_range(BATCH):
            b, a = b + (zeros,), a + (zeros,)  # type: ignore[assignment]
            if NORMED:
                partials = load_partials(sumsq_ptr, row + first + other, True, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
                sumsq += (tl.sum(tl.reshape(partials, [K, SUMSQ_BLOCK // K]), 1),)  # type: ignore[assignment]
        for column in tl.static_range(0, HIDDEN, BLOCK_X):
            if KEEP:
                tile_b, tile_a = w_b[column // BLOCK_X], w_a[column // BLOCK_X]
            else:
                tile_b = _load_tile(b_ptr + head * HIDDEN, column, HIDDEN, BLOCK_X)
                tile_a = _load_tile(a_ptr + head * HIDDEN, column, HIDDEN, BLOCK_X)
            sums_b, sums_a = (), ()
            for other in tl.static_range(BATCH):
                end = tl.where(first + other < count, HIDDEN, 0)
                x = _load_tile(x_ptr + (row + first + other) * stride_xm, column, end, BLOCK_X)
                sums_b += (b[other] + _products(tile_b, x, K),)  # type: ignore[assignment]
                sums_a += (a[other] + _products(tile_a, x, K),)  # type: ignore[assignment]
            b, a = sums_b, sums_a
        q, k = _convolve(past_q + new_q, taps_q, WIDTH, BATCH), _convolve(past_k + new_k, taps_k, WIDTH, BATCH)
        v = _convolve(past_v + new_v, taps_v, WIDTH, BATCH)
        _store_rows(window_ptr, new_q, position, channels_q, first, shared, C, BATCH)
        _store_rows(window_ptr, new_k, position, channels_k, first, shared, C, BATCH)
        _store_rows(window_ptr, new_v, position, channels_v, first, count, C, BATCH)
        past_q, past_k = _last(past_q + new_q, WIDTH, BATCH), _last(past_k + new_k, WIDTH, BATCH)
        past_v = _last(past_v + new_v, WIDTH, BATCH)

        if DRAFTS:
            if (position > covered) & (position > 0) & (first == 0):
                for number in range(position - covered):
                    entry = (covered + number) & (POSITIONS - 1)
                    old_k = tl.load(draft_k_ptr + entry * (KEY_HEADS * K) + offs_k)
                    old_u = tl.load(draft_u_ptr + entry * (VALUE_HEADS * V) + offs_v)
                    old_decay = tl.exp(tl.load(draft_g_ptr + entry * VALUE_HEADS))
                    state = _advance(state, old_decay, old_k, old_u, state_ptr)
        for number in range(1 if QUERIES == 1 else tl.minimum(count - first, BATCH)):
            query = first + number
            own_q, own_k, own_v = _pick(q, number, BATCH), _pick(k, number, BATCH), _pick(v, number, BATCH)
            own_b, own_a = _pick(b, number, BATCH), _pick(a, number, BATCH)
            own_sumsq = own_b
            if NORMED:
                own_sumsq = _pick(sumsq, number, BATCH)
            sum_b, sum_a, squares, squares_q, squares_k = tl.reduce(
                (own_b, own_a, own_sumsq, tl.reshape(own_q * own_q, [K]), tl.reshape(own_k * own_k, [K])), 0, _add
            )
            if NORMED:
                scale = norm_scale(squares, HIDDEN, eps)
                sum_b, sum_a = sum_b * scale, sum_a * scale
            g, beta = log_decay(sum_a, a_log, dt_bias), tl.sigmoid(sum_b)
            own_k *= tl.rsqrt(squares_k + L2_EPS)
            own_q *= tl.rsqrt(squares_q + L2_EPS) * K**-0.5
            repeated = (query == 0) & (covered > position) & (position > 0)
            decay = tl.where(repeated, 1.0, tl.exp(g))
            u = tl.where(repeated, 0.0, beta * (own_v - _read(state, own_k) * decay))
            state = _advance(state, decay, own_k, u, state_ptr)
            if query == 0:
                tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=(state_offs >= 0) & (not repeated))
                tl.store(covered_ptr, position + 1, mask=not repeated)
            if QUERIES > 1:
                if query > 0:
                    entry = (position + query) & (POSITIONS - 1)
                    tl.store(draft_k_ptr + entry * (KEY_HEADS * K) + offs_k, own_k, mask=offs_k * 0 < shared)
                    tl.store(draft_u_ptr + entry * (VALUE_HEADS * V) + offs_v, u)
                    tl.store(draft_g_ptr + entry * VALUE_HEADS, g)
            o = _read(state, own_q)
            own_z = _pick(z, number, BATCH).to(tl.float32)
            o = norm_and_gate(o, tl.sum(tl.reshape(o * o, [V]), 0), own_z, norm, norm_eps, V, SIGMOID)
            tl.store(out_ptr + (row + query) * stride_om + head * V + offs_v, o.to(out_ptr.dtype.element_ty))


def _warp_tile(heads: DeltaHeads, num_warps: int, state: torch.Tensor) -> tuple[int, int]:
    """Return K_LOW and V_LOW. The warps share the columns, and each thread of a warp has 16 bytes of a row."""
    columns = 16 // state.element_size()
    v_low = min(max(heads.value_dim // num_warps, columns), 128)
    return min(max(32 * columns // v_low, 1), heads.key_dim), v_low


def delta_decode(
    meta, qkvz, x, norm: Normed | None, out, weights: DeltaWeights, records: RecordLayer, drafts: DraftRows | None,
    heads: DeltaHeads, *, config, pdl=False,
):  # fmt: skip
    """Compute the new tokens of each request: config.queries rows, at consecutive positions. Running rows come first.

    Args:
        meta: [rows, META_WIDTH] int32.
        qkvz: [rows, channels + heads.value_size]: q, k and v before the convolution, and z.
        x: [rows, hidden], what the linear that computed qkvz has read.
        norm: the norm by which x must be divided, or None.
        out: [rows, heads.value_size] (output), the normalized and gated output.
        records: the records of the layer (in and out).
        drafts: the updates by drafts (in and out). None: passes have no drafts.
    """
    queries, batch = config.queries, min(config.batch, config.queries)
    assert queries % batch == 0 and (queries == 1 or drafts is not None)
    hidden, requests = x.shape[1], len(out) // queries
    sumsq, n_sumsq, eps = norm or (x, 1, 0.0)
    _delta_decode_kernel[(heads.value, requests)](
        meta,
        qkvz,
        x,
        sumsq,
        out,
        qkvz.stride(0),
        x.stride(0),
        sumsq.stride(0),
        out.stride(0),
        n_sumsq,
        eps,
        *weights,
        heads.eps,
        *records,
        *(drafts or records),
        heads.key,
        heads.value,
        heads.tiled,
        heads.key_dim,
        heads.value_dim,
        *_warp_tile(heads, config.num_warps, records.state),
        weights.width,
        hidden,
        max(min(next_power_of_2(hidden), BLOCK_X), heads.key_dim),
        max(next_power_of_2(n_sumsq), heads.key_dim),
        norm is not None,
        queries,
        batch,
        drafts is not None,
        heads.sigmoid,
        pdl,
        **options(config.num_warps, pdl),
    )


def delta_decode_ref(
    meta, qkvz, x, norm: Normed | None, out, weights: DeltaWeights, records: RecordLayer, drafts: DraftRows | None,
    heads: DeltaHeads,
):  # fmt: skip
    """Compute `delta_decode` in torch. Later rows of a record are drafts."""
    states: dict[int, torch.Tensor] = {}  # after the last row of each record
    for row in running(meta, len(out)):
        slot, record, position = meta[row, [SLOT.value, RECORD.value, POSITION.value]].tolist()
        inputs, z = qkvz[row].float().split((heads.channels, heads.value_size))
        records.window[record, position % RING] = inputs.to(records.window.dtype)
        q, k, v = split_heads(convolve(records.window[record], position, weights), heads)
        q, k = l2_norm(q) * heads.key_dim**-0.5, l2_norm(k)
        hidden = x[row].float()
        if norm is not None:
            hidden = hidden * torch.rsqrt(norm.sumsq[row, : norm.partials].sum() / len(hidden) + norm.eps)
        beta, g = rates(weights.b.float() @ hidden, weights.a.float() @ hidden, weights)
        drafted = record in states
        if not drafted:
            states[record] = replayed(records, drafts, slot, record, position, heads)
        state = states[record]
        if drafted or position == 0 or int(records.covered[record, 0]) <= position:
            decay = g.exp()[:, None]
            u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k) * decay)
            advanced = state * decay[:, None] + k[:, :, None] * u[:, None]
            state = states[record] = rounded_ref(advanced, records.state.dtype)
            if drafted:
                assert drafts is not None, "drafts is None, but requests have several rows"
                drafts.k[slot, position % RING], drafts.u[slot, position % RING] = heads.of_keys(k), u
                drafts.g[slot, position % RING] = g
            else:
                records.state[record] = state
                records.covered[record] = position + 1
        o = gated_norm(torch.einsum("hkv,hk->hv", state, q), z.view_as(v), weights.norm, heads)
        out[row] = o.flatten().to(out.dtype)


def replayed(
    records: RecordLayer, drafts: DraftRows | None, slot: int, record: int, position: int, heads: DeltaHeads
) -> torch.Tensor:
    """Return the state of a record before `position`, or after it if the record covers it: [value heads, K, V]."""
    if position == 0:
        return torch.zeros_like(records.state[record], dtype=torch.float32)
    state = records.state[record].float()
    if drafts is not None:
        for at in range(int(records.covered[record, 0]), position):
            k, u, g = (part[slot, at % RING] for part in drafts)
            k = heads.of_values(k, 0)
            state = rounded_ref(state * g.exp()[:, None, None] + k[:, :, None] * u[:, None], records.state.dtype)
    return state


def convolve(window: torch.Tensor, position: int, weights: DeltaWeights) -> torch.Tensor:
    """Return the activated convolution at a position whose inputs are in the window [RING, channels]."""
    past = [at for at in range(position - weights.width + 1, position + 1) if at >= 0]
    taps = weights.conv[:, 0, -len(past) :].float()
    return torch.nn.functional.silu((window[[at % RING for at in past]].float().T * taps).sum(1))


def delta_decode_bytes(meta, qkvz, x, norm, out, weights, records, drafts, heads) -> int:
    """Return the bytes of the states in and out, and of the projections of the gates. Rows are small in comparison."""
    requests = len({tuple(meta[row, [SLOT.value, RECORD.value]].tolist()) for row in running(meta, len(out))})
    return 2 * requests * records.state[0].nbytes + weights.b.nbytes + weights.a.nbytes


DELTA_DECODE = Op(delta_decode, delta_decode_ref, delta_decode_bytes, (_delta_decode_kernel,), outputs=("out",))
