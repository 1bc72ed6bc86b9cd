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
from .gates import L2_EPS, gated_norm, l2_norm, log_decay, output_gate, rates, silu, split_heads

BLOCK_X = 1024  # columns of the hidden state that are multiplied at once
POSITIONS = tl.constexpr(RING)


@dataclass(frozen=True)
class DeltaConfig:
    """Launch config of delta_decode."""

    queries: int = 1  # rows of each request
    num_warps: int = 8
    registers: int = 0  # maximum number of registers of a thread; 0: no limit


@triton.jit
def _load_tiles(ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Load N elements as a tuple of tiles [BLOCK]."""
    offs = tl.arange(0, BLOCK)
    tiles = ()
    for first in tl.static_range(0, N, BLOCK):
        tiles += (tl.load(ptr + first + offs, mask=first + offs < N, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _dot(x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the products of two tuples of tiles."""
    acc = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, N, BLOCK):
        acc += x[first // BLOCK].to(tl.float32) * y[first // BLOCK].to(tl.float32)
    return tl.sum(acc, 0)


@triton.jit
def _row_rates(
    x_ptr, sumsq_ptr, row, stride_xm, stride_sumsq, n_sumsq, eps, w_b, w_a, a_log, dt_bias, HIDDEN: tl.constexpr,
    BLOCK_X: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Return the factor of the state, exp(g), and the learning rate beta of a row, and g."""
    x = _load_tiles(x_ptr + row * stride_xm, HIDDEN, BLOCK_X)
    b, a = _dot(w_b, x, HIDDEN, BLOCK_X), _dot(w_a, x, HIDDEN, BLOCK_X)
    if NORMED:
        scale = norm_scale(
            tl.sum(load_partials(sumsq_ptr, row, True, stride_sumsq, n_sumsq, SUMSQ_BLOCK), 0), HIDDEN, eps
        )
        b, a = b * scale, a * scale
    g = log_decay(a, a_log, dt_bias)
    return tl.exp(g), tl.sigmoid(b), g


@triton.jit
def _past(window_ptr, conv_ptr, position, offs_c, C: tl.constexpr, WIDTH: tl.constexpr):
    """Return the part of the convolution at `position` that the positions before it contribute, for channels offs_c."""
    acc = offs_c * 0.0
    for tap in tl.static_range(WIDTH - 1):
        at = position - (WIDTH - 1) + tap
        exists = at + offs_c * 0 >= 0
        x = tl.load(window_ptr + (at & (POSITIONS - 1)) * C + offs_c, mask=exists, other=0.0)
        acc += x.to(tl.float32) * tl.load(conv_ptr + offs_c * WIDTH + tap).to(tl.float32)
    return acc


@triton.jit
def _past_of_draft(
    window_ptr, qkvz_ptr, conv_ptr, position, draft, stride_qkvz, offs_c, C: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return `_past` of the row `draft` of a request: rows before it are in qkvz, earlier positions in the window."""
    acc = offs_c * 0.0
    for tap in tl.static_range(WIDTH - 1):
        row = draft - (WIDTH - 1) + tap
        at = position + row
        in_pass, exists = row + offs_c * 0 >= 0, at + offs_c * 0 >= 0
        window_ptrs = window_ptr + (at & (POSITIONS - 1)) * C + offs_c
        old = tl.load(window_ptrs, mask=exists & (row + offs_c * 0 < 0), other=0.0)
        new = tl.load(qkvz_ptr + row * stride_qkvz + offs_c, mask=in_pass, other=0.0)
        x = tl.where(in_pass, new.to(window_ptr.dtype.element_ty).to(tl.float32), old.to(tl.float32))
        acc += x * tl.load(conv_ptr + offs_c * WIDTH + tap).to(tl.float32)
    return acc


@triton.jit
def _present(row_ptr, window_ptr, conv_ptr, past, position, offs_c, end, C: tl.constexpr, WIDTH: tl.constexpr):
    """Return the activated convolution of a row. Store its inputs of the channels below `end` in the window."""
    x = tl.load(row_ptr + offs_c).to(window_ptr.dtype.element_ty)
    tl.store(window_ptr + (position & (POSITIONS - 1)) * C + offs_c, x, mask=offs_c < end)
    return silu(past + x.to(tl.float32) * tl.load(conv_ptr + offs_c * WIDTH + WIDTH - 1).to(tl.float32))


@triton.jit
def _unit_rows(x, K: tl.constexpr):
    """Return the rows q and k of x [2, K], each divided by its length. q is also scaled by 1 / sqrt(K).

    x is one tile, because several warps would otherwise compute the same: a vector that is multiplied by the columns of
    the matrix is computed by every warp.
    """
    is_q = tl.arange(0, 2) == 0
    x *= (tl.rsqrt(tl.sum(x * x, 1) + L2_EPS) * tl.where(is_q, K**-0.5, 1.0))[:, None]
    return tl.sum(tl.where(is_q[:, None], x, 0.0), 0), tl.sum(tl.where(is_q[:, None], 0.0, x), 0)


@triton.jit
def _advance(state, decay, k, u):
    """Return the state after an update."""
    return state * decay + k[:, None] * u[None, :]


@triton.jit
def _store_output(
    out_ptrs, o, z, norm, norm_eps, V: tl.constexpr, SIGMOID: tl.constexpr
):  # fmt: skip
    """Store the gated norm of the output o of a head."""
    o = o * tl.rsqrt(tl.sum(o * o, 0) / V + norm_eps) * norm
    tl.store(out_ptrs, (o * output_gate(z, SIGMOID)).to(out_ptrs.dtype.element_ty))


@triton.jit(do_not_specialize=["n_sumsq"])
def _delta_decode_kernel(
    meta_ptr, qkvz_ptr, x_ptr, sumsq_ptr, out_ptr, stride_qkvz, stride_xm, stride_sumsq, stride_om, n_sumsq, eps,
    conv_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, norm_eps,
    state_ptr, window_ptr, covered_ptr,
    draft_k_ptr, draft_u_ptr, draft_g_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_X: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    QUERIES: tl.constexpr,
    DRAFTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the new tokens of one V head of a request.

    Grid: (VALUE_HEADS, requests). A program has the whole matrix [K, V] of its head in registers. Its loads are in
    flight before the wait, because only earlier passes wrote it. It first replays the updates by accepted drafts: those
    between the positions that the state covers and the position of the request. If the state covers the request's
    position already, because the pass is a repetition, it is only read, with the same bits as the first time. The
    updates by drafts are stored, but the state that they lead to is not.
    Moves 8 * K * V bytes a head.

    Args:
        meta_ptr: [requests * QUERIES, META_WIDTH] int32. The running rows of a request come first.
        qkvz_ptr: [rows, C + VALUE_HEADS * V], C = (2 KEY_HEADS * K + VALUE_HEADS * V).
        x_ptr: [rows, HIDDEN], what the linear that computed qkvz has read.
        sumsq_ptr: [rows, ...] fp32, `n_sumsq` partial sums of squares, if NORMED: x is not divided by its rms yet.
        out_ptr: [rows, VALUE_HEADS * V] (output).
        conv_ptr: [C, 1, WIDTH].
        b_ptr, a_ptr: [VALUE_HEADS, HIDDEN].
        a_log_ptr, dt_bias_ptr: [VALUE_HEADS] fp32. norm_ptr: [V] fp32.
        state_ptr: [records, VALUE_HEADS, K, V] fp32 (in and out).
        window_ptr: [records, RING, C] (in and out).
        covered_ptr: [records, VALUE_HEADS] int32 (in and out).
        draft_k_ptr: [slots, RING, KEY_HEADS, K] fp32 (in and out), if DRAFTS.
        draft_u_ptr: [slots, RING, VALUE_HEADS, V] fp32 (in and out), if DRAFTS.
        draft_g_ptr: [slots, RING, VALUE_HEADS] fp32 (in and out), if DRAFTS.
    """
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    C: tl.constexpr = 2 * KEY_HEADS * K + VALUE_HEADS * V
    head, request = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    meta_ptr += request * (QUERIES * META_WIDTH)
    status = tl.load(meta_ptr + STATUS)
    position = tl.where(status == RUN, tl.load(meta_ptr + POSITION), 0)  # the position of an idle row may be invalid
    record, slot = tl.load(meta_ptr + RECORD).to(tl.int64), tl.load(meta_ptr + SLOT).to(tl.int64)
    count = 1  # rows that run, if the first does
    for query in tl.static_range(1, QUERIES):
        count += (tl.load(meta_ptr + query * META_WIDTH + STATUS) == RUN).to(tl.int32)
    key_head = head // GROUP
    end_shared = tl.where(head % GROUP == 0, C, 0)  # one V head writes the q and k that several share
    offs_k, offs_v = tl.arange(0, K), tl.arange(0, V)
    offs_qk = (tl.arange(0, 2) * KEY_HEADS + key_head)[:, None] * K + offs_k[None, :]  # channels of q and of k
    offs_value = 2 * KEY_HEADS * K + head * V + offs_v
    covered_ptr += record * VALUE_HEADS + head
    state_ptrs = state_ptr + (record * VALUE_HEADS + head) * (K * V) + offs_k[:, None] * V + offs_v[None, :]
    window_ptr += record * (POSITIONS * C)
    covered = tl.load(covered_ptr)
    state = tl.load(state_ptrs).to(tl.float32)
    w_b, w_a = _load_tiles(b_ptr + head * HIDDEN, HIDDEN, BLOCK_X), _load_tiles(a_ptr + head * HIDDEN, HIDDEN, BLOCK_X)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    norm = tl.load(norm_ptr + offs_v)
    past_qk = _past(window_ptr, conv_ptr, position, offs_qk, C, WIDTH)
    past_v = _past(window_ptr, conv_ptr, position, offs_value, C, WIDTH)
    repeated = (position > 0) & (covered > position)
    state = tl.where(position > 0, state, 0.0)
    if DRAFTS:
        draft_k_ptr += slot * (POSITIONS * KEY_HEADS * K) + key_head * K
        draft_u_ptr += slot * (POSITIONS * VALUE_HEADS * V) + head * V
        draft_g_ptr += slot * (POSITIONS * VALUE_HEADS) + head
        for number in range(tl.where(position > 0, position - covered, 0)):
            entry = (covered + number) & (POSITIONS - 1)
            k = tl.load(draft_k_ptr + entry * (KEY_HEADS * K) + offs_k)
            u = tl.load(draft_u_ptr + entry * (VALUE_HEADS * V) + offs_v)
            state = _advance(state, tl.exp(tl.load(draft_g_ptr + entry * VALUE_HEADS)), k, u)
    if PDL:
        gdc_wait()
    if status != RUN:
        return

    row = (request * QUERIES).to(tl.int64)
    qkvz_ptr += row * stride_qkvz
    out_ptrs = out_ptr + row * stride_om + head * V + offs_v
    z = tl.load(qkvz_ptr + C + head * V + offs_v).to(tl.float32)
    qk = _present(qkvz_ptr, window_ptr, conv_ptr, past_qk, position, offs_qk, end_shared, C, WIDTH)
    q, k = _unit_rows(qk, K)
    v = _present(qkvz_ptr, window_ptr, conv_ptr, past_v, position, offs_value, C, C, WIDTH)
    decay, beta, _ = _row_rates(
        x_ptr, sumsq_ptr, row, stride_xm, stride_sumsq, n_sumsq, eps, w_b, w_a, a_log, dt_bias, HIDDEN, BLOCK_X,
        SUMSQ_BLOCK, NORMED,
    )  # fmt: skip
    if not repeated:
        state = _advance(state, decay, k, beta * (v - tl.sum(state * k[:, None], 0) * decay))
        state = state.to(state_ptr.dtype.element_ty).to(tl.float32)  # as a repetition reads it
        tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty))
        tl.store(covered_ptr, position + 1)
    _store_output(out_ptrs, tl.sum(state * q[:, None], 0), z, norm, norm_eps, V, SIGMOID)
    if QUERIES > 1:
        for draft in range(1, count):
            own_ptr, at = qkvz_ptr + draft * stride_qkvz, position + draft
            z = tl.load(own_ptr + C + head * V + offs_v).to(tl.float32)
            past_qk = _past_of_draft(window_ptr, qkvz_ptr, conv_ptr, position, draft, stride_qkvz, offs_qk, C, WIDTH)
            past_v = _past_of_draft(window_ptr, qkvz_ptr, conv_ptr, position, draft, stride_qkvz, offs_value, C, WIDTH)
            q, k = _unit_rows(_present(own_ptr, window_ptr, conv_ptr, past_qk, at, offs_qk, end_shared, C, WIDTH), K)
            v = _present(own_ptr, window_ptr, conv_ptr, past_v, at, offs_value, C, C, WIDTH)
            w_b = _load_tiles(b_ptr + head * HIDDEN, HIDDEN, BLOCK_X)  # again, to save registers
            w_a = _load_tiles(a_ptr + head * HIDDEN, HIDDEN, BLOCK_X)
            decay, beta, g = _row_rates(
                x_ptr, sumsq_ptr, row + draft, stride_xm, stride_sumsq, n_sumsq, eps, w_b, w_a, a_log, dt_bias, HIDDEN,
                BLOCK_X, SUMSQ_BLOCK, NORMED,
            )  # fmt: skip
            u = beta * (v - tl.sum(state * k[:, None], 0) * decay)
            state = _advance(state, decay, k, u)
            entry = at & (POSITIONS - 1)
            tl.store(draft_k_ptr + entry * (KEY_HEADS * K) + offs_k, k, mask=offs_k < end_shared)
            tl.store(draft_u_ptr + entry * (VALUE_HEADS * V) + offs_v, u)
            tl.store(draft_g_ptr + entry * VALUE_HEADS, g)
            o = tl.sum(state * q[:, None], 0)
            _store_output(out_ptrs + draft * stride_om, o, z, norm, norm_eps, V, SIGMOID)


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
    queries = config.queries
    assert queries == 1 or drafts is not None
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
        heads.key_dim,
        heads.value_dim,
        weights.width,
        hidden,
        min(next_power_of_2(hidden), BLOCK_X),
        next_power_of_2(n_sumsq),
        norm is not None,
        queries,
        drafts is not None,
        heads.sigmoid,
        pdl,
        **options(config.num_warps, pdl, config.registers),
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
            state = states[record] = state * decay[:, None] + k[:, :, None] * u[:, None]
            if drafted:
                assert drafts is not None, "rows of drafts need a place for their updates"
                drafts.k[slot, position % RING], drafts.u[slot, position % RING] = k[:: heads.group], u
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
            k = k.repeat_interleave(heads.group, 0)
            state = state * g.exp()[:, None, None] + k[:, :, None] * u[:, None]
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
