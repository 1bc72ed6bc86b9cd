"""route: chooses the experts of each row and their weights."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...layout import MAX_CHUNKS
from ..chunks import CHUNK_COUNT, CHUNK_FIRST, CHUNK_WIDTH, listed
from ..common import (
    META_WIDTH,
    RUN,
    STATUS,
    cdiv,
    equal_sigmoid,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    next_power_of_2,
    options,
    running,
)
from ..linear.epilogue import load_partials, norm_scale
from ..linear.project import Normed
from ..op import Op
from .arguments import ExpertSizes, Router, Routes

_CHUNKS = tl.constexpr(MAX_CHUNKS)


@dataclass(frozen=True)
class RouteConfig:
    """Launch config of route.

    With tensor cores, a second launch chooses the experts. Without, the program of a row that ends last chooses.

    Attributes:
        block_m: Rows of a program: 1, or a multiple of 16 for products on tensor cores.
        block_n: Experts of a program.
        block_k: Columns of a step.
        stages: Steps in flight, with tensor cores.
    """

    block_m: int = 1
    block_n: int = 4
    block_k: int = 1024
    num_warps: int = 4
    stages: int = 3

    @property
    def tensor_cores(self) -> bool:
        """Whether tensor cores multiply."""
        return self.block_m > 1


@triton.jit
def _has_token(meta_ptr, chunks_ptr, offs_m, rows, DECODING: tl.constexpr, CHUNKS: tl.constexpr):
    """Return which of the rows offs_m have a token, [BLOCK_M].

    The first DECODING rows are rows of meta. They have a token if they run. With CHUNKS, other rows have one if they
    are rows of a chunk.
    """
    has = (offs_m < 0) & (offs_m >= 0)  # False for all rows.
    if DECODING > 0:
        status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < DECODING, other=-1)
        has = status == RUN
    if CHUNKS:
        chunk = chunks_ptr + tl.arange(0, _CHUNKS) * CHUNK_WIDTH
        first, count = tl.load(chunk + CHUNK_FIRST), tl.load(chunk + CHUNK_COUNT)
        row = offs_m[:, None]
        inside = (row >= first[None, :]) & (row < (first + count)[None, :])
        has = has | (tl.max(inside.to(tl.int32), 1) > 0)
    return has & (offs_m < rows)


@triton.jit
def _choose(
    logits_ptr, has, offs_m, mask_m, ids_ptr, weights_ptr, E: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    """Store the TOP_K experts of each row with the largest logits, and their weights. Ties take the lowest index.

    One reduction finds both the largest logit and its index. It compares keys of 64 bits. The high half of a key is the
    logit as an integer of the same order. The low half is BLOCK_E - 1 - index. A NaN becomes the smallest logit, so the
    indices are valid. The weights of its row become NaN.

    Args:
        logits_ptr: [rows, E + SHARED] fp32. Other programs have stored them.
        has: [BLOCK_M], whether a row has a token. The ids of other rows become -1, and their weights 0.
        offs_m, mask_m: [BLOCK_M], the rows, and whether to store their experts.
        BLOCK_E, BLOCK_TOP: powers of two that are at least E and TOP_K.
    """
    USED: tl.constexpr = TOP_K + SHARED
    offs_e, offs_k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_TOP)[None, :]
    logits_ptrs = logits_ptr + offs_m.to(tl.int64)[:, None] * (E + SHARED)
    mask_logits = has[:, None] & (offs_e < E)
    logits = tl.load(logits_ptrs + offs_e, mask=mask_logits, other=0.0, cache_modifier=".cg")
    nan = (logits != logits) & (offs_e < E)
    valid = tl.maximum(tl.where(nan, -3e38, logits), -3e38)
    bits = valid.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(offs_e < E, (ordered << 32) | (BLOCK_E - 1 - offs_e).to(tl.int64), -(2**63))
    ids = tl.zeros_like(offs_k + offs_m[:, None])
    chosen = tl.full(ids.shape, -float("inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        keys = tl.where(keys == best, -(2**63), keys)
        high = (best >> 32).to(tl.int32)
        logit = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        ids = tl.where(offs_k == i, BLOCK_E - 1 - (best & (BLOCK_E - 1)).to(tl.int32), ids)
        chosen = tl.where(offs_k == i, logit, chosen)
    top = tl.max(chosen, 1)[:, None]
    exponentials = tl.exp(chosen - top)
    if NORMALIZE:
        total = tl.sum(exponentials, 1)[:, None]
    else:
        total = tl.sum(tl.where(offs_e < E, tl.exp(valid - top), 0.0), 1)[:, None]
    broken = tl.max(nan.to(tl.int32), 1)[:, None] > 0
    weights = tl.where(broken, float("nan"), exponentials / total)
    places = offs_m[:, None] * USED + offs_k
    mask = mask_m[:, None] & (offs_k < TOP_K)
    tl.store(ids_ptr + places, tl.where(has[:, None], ids, -1), mask=mask)
    tl.store(weights_ptr + places, tl.where(has[:, None], weights, 0.0), mask=mask)
    if SHARED:
        gate = tl.load(logits_ptr + offs_m.to(tl.int64) * (E + 1) + E, mask=has, other=0.0, cache_modifier=".cg")
        tl.store(ids_ptr + offs_m * USED + TOP_K, tl.where(has, E, -1), mask=mask_m)
        tl.store(weights_ptr + offs_m * USED + TOP_K, tl.where(has, tl.sigmoid(gate), 0.0), mask=mask_m)


@triton.jit(do_not_specialize=["n_sumsq", "rows"])
def _route_kernel(
    meta_ptr, chunks_ptr, x_ptr, router_ptr, shared_ptr, logits_ptr, ids_ptr, weights_ptr, counter_ptr, sumsq_ptr, eps,
    stride_xm, stride_sumsq, n_sumsq, rows, E: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, NORMALIZE: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
    DECODING: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
    TENSOR_CORES: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Compute the logits of BLOCK_M rows for BLOCK_N experts. Without tensor cores, the last program to end chooses.

    Grid: (PROGRAMS, cdiv(rows, BLOCK_M)), PROGRAMS = cdiv(stored experts, BLOCK_N).

    Args:
        meta_ptr: [DECODING, META_WIDTH] int32.
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32. Read only if CHUNKS.
        x_ptr: [rows, K].
        router_ptr: [E, K].
        shared_ptr: [1, K]. Read only if SHARED.
        logits_ptr: [rows, E + SHARED] fp32 (output).
        ids_ptr, weights_ptr: [rows, TOP_K + SHARED] int32 and fp32 (outputs).
        counter_ptr: [cdiv(rows, BLOCK_M)] int32, zero between launches. It counts the programs of BLOCK_M rows whose
            logits are stored.
        sumsq_ptr: partial sums of squares. Read only if NORMED.
    """
    STORED: tl.constexpr = E + SHARED
    pid, block = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = offs_m < rows
    row_ptrs = router_ptr + offs_n * K
    if SHARED:
        row_ptrs = tl.where(offs_n == E, shared_ptr, row_ptrs)
    w = ()
    if not TENSOR_CORES:
        for k in tl.static_range(0, K, BLOCK_K):
            mask = (offs_n < STORED)[:, None] & (k + offs_k < K)[None, :]
            w += (tl.load(row_ptrs[:, None] + (k + offs_k)[None, :], mask=mask, other=0.0),)
    has = _has_token(meta_ptr, chunks_ptr, offs_m, rows, DECODING, CHUNKS)
    some = tl.max(has.to(tl.int32), 0)
    if PDL:
        gdc_wait()
    if DECODING > 0 and not CHUNKS:
        if some == 0:
            return
    scale = 1.0
    if NORMED:
        partials = load_partials(
            sumsq_ptr, offs_m[:, None], mask_m[:, None], stride_sumsq, n_sumsq, SUMSQ_BLOCK
        )  # fmt: skip
        scale = norm_scale(tl.sum(partials, 1), K, eps)[:, None]
    xs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    if not TENSOR_CORES:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in tl.static_range(0, K, BLOCK_K):
            x = tl.load(xs + (k + offs_k)[None, :], mask=(k + offs_k < K)[None, :], other=0.0)
            acc += w[k // BLOCK_K].to(tl.float32) * x.to(tl.float32)
        logits = tl.sum(acc, 1)[None, :]
    else:
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask_k = k + offs_k < K
            x = tl.load(xs + (k + offs_k)[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            mask = mask_k[:, None] & (offs_n < STORED)[None, :]
            weight = tl.load(row_ptrs[None, :] + (k + offs_k)[:, None], mask=mask, other=0.0)
            if DOT_FP32:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            logits = tl.dot(x, weight.to(x.dtype), logits, input_precision="ieee")
    logits_ptrs = logits_ptr + offs_m.to(tl.int64)[:, None] * STORED
    mask = has[:, None] & (offs_n < STORED)[None, :]
    tl.store(logits_ptrs + offs_n[None, :], logits * scale, mask=mask)
    if not TENSOR_CORES:
        tl.debug_barrier()  # All threads have stored their logits before one of them counts the program.
        if PROGRAMS > 1:
            if tl.atomic_add(counter_ptr + block, 1) < PROGRAMS - 1:
                return
            tl.store(counter_ptr + block, 0)
        mask_stored = mask_m if CHUNKS else has
        _choose(
            logits_ptr, has, offs_m, mask_stored, ids_ptr, weights_ptr, E, TOP_K, SHARED, NORMALIZE, BLOCK_E, BLOCK_TOP
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _choose_kernel(
    meta_ptr, chunks_ptr, logits_ptr, ids_ptr, weights_ptr, rows, E: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, NORMALIZE: tl.constexpr, DECODING: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one row.

    Grid: (rows,). A program has one warp, which reduces without waiting for others.

    Args: see _route_kernel.
    """
    offs_m = tl.program_id(0) + tl.arange(0, 1)
    if PDL:
        gdc_launch_dependents()
    has = _has_token(meta_ptr, chunks_ptr, offs_m, rows, DECODING, CHUNKS)
    if PDL:
        gdc_wait()
    mask_stored = offs_m < rows if CHUNKS else has
    _choose(
        logits_ptr, has, offs_m, mask_stored, ids_ptr, weights_ptr, E, TOP_K, SHARED, NORMALIZE, BLOCK_E, BLOCK_TOP
    )  # fmt: skip


def route(
    meta, chunks, x, router: Router, normed: Normed | None, routes: Routes, counter, sizes: ExpertSizes, *,
    config: RouteConfig, pdl=False,
):  # fmt: skip
    """Choose the experts of each row: those with the largest logits.

    A weight is the softmax over all logits, or with `sizes.normalize` over those of the chosen experts.

    A decode pass writes nothing for idle rows. A prompt pass stores the id -1 for rows without a token.

    Args:
        meta: int32 [decoding rows, META_WIDTH], or None. In a decode pass, all rows are decoding rows.
        chunks: the table of chunks of a prompt pass, or None in a decode pass.
        x: [rows, hidden]. With `normed`, the residual stream times the norm's weight, else normalized rows.
        normed: the partial sums for the division by the root mean square, or None.
        counter: int32 [rows, 1], zero between launches.
    """
    rows, K = x.shape
    programs = cdiv(sizes.stored, config.block_n)
    sumsq, n_sumsq, eps = (routes.logits, 0, 0.0) if normed is None else normed
    tables = routes.ids if meta is None else meta, routes.ids if chunks is None else chunks
    choice = dict(
        E=sizes.experts, TOP_K=sizes.top_k, SHARED=sizes.shared, NORMALIZE=sizes.normalize,
        DECODING=0 if meta is None else len(meta), CHUNKS=chunks is not None,
        BLOCK_E=next_power_of_2(sizes.experts), BLOCK_TOP=next_power_of_2(sizes.top_k), PDL=pdl,
    )  # fmt: skip
    _route_kernel[(programs, cdiv(rows, config.block_m))](
        *tables, x, router.weight, router.weight if router.shared_gate is None else router.shared_gate, *routes,
        counter, sumsq, eps, x.stride(0), sumsq.stride(0), n_sumsq, rows, K=K, NORMED=normed is not None,
        SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 1)), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, STAGES=config.stages, PROGRAMS=programs,
        TENSOR_CORES=config.tensor_cores, DOT_FP32=interpreted(), **choice, **options(config.num_warps, pdl),
    )  # fmt: skip
    if config.tensor_cores:
        _choose_kernel[(rows,)](*tables, *routes, rows, **choice, **options(1, pdl))


def route_ref(
    meta, chunks, x, router: Router, normed: Normed | None, routes: Routes, counter, sizes: ExpertSizes
) -> None:
    """Compute `route` in torch in fp32.

    Logits and gates are computed row by row, so other rows do not change their bits.
    """
    rows = [] if meta is None else running(meta, len(meta))
    if chunks is not None:
        routes.ids.fill_(-1)
        routes.weights.zero_()
        rows += [row for chunk in listed(chunks) for row in range(len(x))[chunk.rows]]
    if not rows:
        return
    at = torch.tensor(rows, device=x.device)
    own = x[at].float()
    if normed is not None:
        squares = normed.sumsq[at, : normed.partials].sum(1, keepdim=True)
        own = own * torch.rsqrt(squares / x.shape[1] + normed.eps)
    matrix = router.weight.float()
    logits = torch.stack([matrix @ row for row in own])
    probabilities = logits.softmax(1)
    ids = logits.nan_to_num(-3e38).sort(dim=1, descending=True, stable=True).indices[:, : sizes.top_k]
    weights = probabilities.gather(1, ids)
    if sizes.normalize:
        weights = weights / weights.sum(1, keepdim=True)
    if router.shared_gate is not None:
        gate = (own * router.shared_gate.float()).sum(1, keepdim=True)
        logits, ids = torch.cat((logits, gate), 1), torch.cat((ids, torch.full_like(ids[:, :1], sizes.experts)), 1)
        weights = torch.cat((weights, equal_sigmoid(gate)), 1)
    routes.logits[at], routes.ids[at], routes.weights[at] = logits, ids.int(), weights


def route_bytes(
    meta, chunks, x, router: Router, normed: Normed | None, routes: Routes, counter, sizes: ExpertSizes
) -> int:
    """Return the bytes that a launch moves."""
    shared = 0 if router.shared_gate is None else router.shared_gate.nbytes
    return x.nbytes + router.weight.nbytes + shared + sum(each.nbytes for each in routes)


ROUTE = Op(
    route,
    route_ref,
    route_bytes,
    (_route_kernel, _choose_kernel),
    outputs=("routes.logits", "routes.ids", "routes.weights"),
)
