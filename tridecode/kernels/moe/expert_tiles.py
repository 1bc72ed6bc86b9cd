"""expert_tiles: the products of rows with the dense weights of their experts, in tiles of pairs of one expert.

A fixed number of programs walks the tiles that `sort_pairs` lists. A weight is read once for each tile that uses it.
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import gdc_launch_dependents, gdc_wait, interpreted, next_power_of_2, options
from ..linear.epilogue import load_partials, norm_scale, silu
from ..linear.project import Normed
from ..linear.weight import LoadedLinear
from ..op import Op
from ..sort_pairs import TILE_FIELDS, PairTiles, load_entry
from .arguments import ExpertSizes, Routes


@dataclass(frozen=True)
class TilesConfig:
    """Launch config of a product of expert_tiles.

    Attributes:
        block_m: Number of pairs that are multiplied together: a power of two of at least 16, or 1 on a CPU.
        extra_m: Number of further pairs of a tile, with products of their own; 0 or a power of two of at least 16. A
            tile has up to block_m + extra_m pairs, so that one tile suffices for most experts.
        block_n: Rows of the weight of a block; gate_up takes block_n rows of gate and of up.
        block_k: Columns of a step.
        stages: Steps in flight.
        programs: Number of programs.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    num_warps: int
    programs: int
    extra_m: int = 0

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return self.block_m + self.extra_m


# The sorted pairs, the activations, and the partial sums of their squares; see _expert_tiles_kernel.
Inputs = namedtuple("Inputs", "x_ptr pairs_ptr sumsq_ptr stride_xm stride_sumsq")


@triton.jit
def _gather(X, first, offs_m, offs_k, count, USED: tl.constexpr, GATED: tl.constexpr):
    """Return the pairs offs_m of a tile [m], pointers to the first columns of their rows [m, k], and a mask [m, 1].

    Args:
        first, count: place of the tile's first pair, and its number of pairs.
    """
    pairs = tl.load(X.pairs_ptr + first + offs_m, mask=offs_m < count, other=0)
    rows = pairs // USED if GATED else pairs
    return pairs, X.x_ptr + rows.to(tl.int64)[:, None] * X.stride_xm + offs_k[None, :], (offs_m < count)[:, None]


@triton.jit
def _dot(w, x, acc, DOT_FP32: tl.constexpr):
    """Add w [n, k] times x [m, k] to acc [n, m]."""
    if DOT_FP32:
        w, x = w.to(tl.float32), x.to(tl.float32)
    return tl.dot(w.to(x.dtype), x.T, acc, input_precision="ieee")


@triton.jit
def _finish(
    X, acc, up, pairs, mask_m, offs_n, n_sumsq, eps, pair_weights_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr,
    USED: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the results of pairs.

    Args:
        acc, up: fp32 [n, m], the products. With GATED, acc is gate. Otherwise up is not read.
        pairs: [m].
        mask_m: [m, 1], whether the pairs exist.
        offs_n: [n, 1], columns of the output.
    """
    mask_m = tl.trans(mask_m)
    if GATED:
        if NORMED:
            rows = (pairs // USED)[:, None]
            partials = load_partials(
                X.sumsq_ptr, rows, tl.trans(mask_m), X.stride_sumsq, n_sumsq, SUMSQ_BLOCK
            )  # fmt: skip
            scale = norm_scale(tl.sum(partials, 1), K, eps)[None, :]
            acc, up = acc * scale, up * scale
        acc = silu(acc) * up
    else:
        acc = acc * tl.load(pair_weights_ptr + pairs[None, :], mask=mask_m, other=0.0)
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * N + offs_n
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m & (offs_n < N))


@triton.jit(do_not_specialize=["n_sumsq"])
def _expert_tiles_kernel(
    x_ptr, weight_desc, out_ptr, pairs_ptr, tiles_ptr, count_ptr, pair_weights_ptr, sumsq_ptr, eps, stride_xm,
    stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr, USED: tl.constexpr, GATED: tl.constexpr,
    NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, EXTRA_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile of pairs by the weight of its expert, and store the results by pair.

    With GATED, the weight of an expert is [2 * N, K], the rows are rows of the pass, and the result is
    silu(gate) * up. Otherwise it is [N, K], there is a row for each pair, and the result is multiplied by the weight
    of the pair.

    Grid: (PROGRAMS,). Each program takes every PROGRAMS-th product of a tile of pairs and BLOCK_N rows of the weight.

    Args:
        x_ptr: [rows, K] if GATED, else [pairs, K].
        weight_desc: tensor descriptor of the weights of all experts, [rows, K], in tiles [BLOCK_N, BLOCK_K].
        out_ptr: [pairs, N] (output).
        pairs_ptr, tiles_ptr, count_ptr: see PairTiles.
        pair_weights_ptr: [pairs] fp32. Read only without GATED.
        sumsq_ptr: partial sums of squares of the rows. Read only if NORMED.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WEIGHT_ROWS: tl.constexpr = 2 * N if GATED else N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    X = Inputs(x_ptr, pairs_ptr, sumsq_ptr, stride_xm, stride_sumsq)
    for item in range(tl.program_id(0), tl.load(count_ptr) * BLOCKS, PROGRAMS):
        expert, first, count = load_entry(tiles_ptr, item // BLOCKS)
        first_n = item % BLOCKS * BLOCK_N
        row_n = expert * WEIGHT_ROWS + first_n
        pairs, x_ptrs, mask_m = _gather(X, first, offs_m, offs_k, count, USED, GATED)
        acc, up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if EXTRA_M > 0:
            more, more_ptrs, more_mask = _gather(X, first, BLOCK_M + tl.arange(0, EXTRA_M), offs_k, count, USED, GATED)
            acc_more = tl.zeros([BLOCK_N, EXTRA_M], tl.float32)
            up_more = tl.zeros([BLOCK_N, EXTRA_M], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask_k = (k + offs_k < K)[None, :]
            w = weight_desc.load([row_n, k])
            x = tl.load(x_ptrs + k, mask=mask_m & mask_k, other=0.0)
            acc = _dot(w, x, acc, DOT_FP32)
            if GATED:
                w_up = weight_desc.load([row_n + N, k])
                up = _dot(w_up, x, up, DOT_FP32)
            if EXTRA_M > 0:
                x = tl.load(more_ptrs + k, mask=more_mask & mask_k, other=0.0)
                acc_more = _dot(w, x, acc_more, DOT_FP32)
                if GATED:
                    up_more = _dot(w_up, x, up_more, DOT_FP32)
        offs_n = first_n + tl.arange(0, BLOCK_N)[:, None]
        _finish(
            X, acc, up, pairs, mask_m, offs_n, n_sumsq, eps, pair_weights_ptr, out_ptr, N, K, USED, GATED, NORMED,
            SUMSQ_BLOCK,
        )  # fmt: skip
        if EXTRA_M > 0:
            _finish(
                X, acc_more, up_more, more, more_mask, offs_n, n_sumsq, eps, pair_weights_ptr, out_ptr, N, K, USED,
                GATED, NORMED, SUMSQ_BLOCK,
            )  # fmt: skip


def _launch(x, linear, tiles, routes, out, normed, sizes, config, pdl, n, gated) -> None:
    k = x.shape[-1] if gated else sizes.intermediate
    sumsq, n_sumsq, eps = (out, 0, 0.0) if normed is None else normed
    weight = TensorDescriptor.from_tensor(linear.weight, [config.block_n, config.block_k])
    _expert_tiles_kernel[(config.programs,)](
        x, weight, out, *tiles, routes.weights, sumsq, eps, x.stride(0) if gated else k, sumsq.stride(0), n_sumsq, N=n,
        K=k, USED=sizes.used, GATED=gated, NORMED=normed is not None, SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 1)),
        BLOCK_M=config.block_m, EXTRA_M=config.extra_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        STAGES=config.stages, PROGRAMS=config.programs, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl),
    )  # fmt: skip


def gate_up_tiles(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: ExpertSizes, *,
    config: TilesConfig, pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row.

    Args:
        x: [rows, hidden]. With `normed`, the residual stream times the norm's weight, else normalized rows.
        linear: gate and up of all experts, [experts * 2 * intermediate, hidden].
        tiles: tiles of at most config.tile pairs.
        out: contiguous [rows, used experts * intermediate] (output).
    """
    _launch(x, linear, tiles, routes, out, normed, sizes, config, pdl, sizes.intermediate, True)


def down_tiles(
    x,
    linear: LoadedLinear,
    tiles: PairTiles,
    routes: Routes,
    out,
    sizes: ExpertSizes,
    *,
    config: TilesConfig,
    pdl=False,
):
    """Multiply silu(gate) * up of each pair by its expert's weight and by the weight of the pair.

    Args:
        x: contiguous [rows, used experts * intermediate].
        linear: down of all experts, [experts * hidden, intermediate].
        tiles: tiles of at most config.tile pairs.
        out: contiguous [rows, used experts * hidden] (output).
    """
    _launch(x, linear, tiles, routes, out, None, sizes, config, pdl, out.shape[1] // sizes.used, False)


def _listed(tiles: PairTiles) -> list[tuple[int, torch.Tensor]]:
    """Return the expert of each tile and its pairs."""
    entries = tiles.tiles.view(-1, TILE_FIELDS)[: int(tiles.number.view(-1)[0])].tolist()
    pairs = tiles.pairs.view(-1).long()
    return [(expert, pairs[first : first + count]) for expert, first, count in entries]


def gate_up_tiles_ref(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: ExpertSizes
) -> None:
    """Compute `gate_up_tiles` in torch in fp32."""
    n, by_pair = sizes.intermediate, out.view(-1, sizes.intermediate)
    for expert, pairs in _listed(tiles):
        rows = pairs // sizes.used
        y = x[rows].float() @ linear.rows(expert * 2 * n, 2 * n).T
        if normed is not None:
            squares = normed.sumsq[rows, : normed.partials].sum(1, keepdim=True)
            y = y * torch.rsqrt(squares / x.shape[1] + normed.eps)
        gate, up = y.chunk(2, 1)
        by_pair[pairs] = (torch.nn.functional.silu(gate) * up).to(out.dtype)


def down_tiles_ref(x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, sizes: ExpertSizes) -> None:
    """Compute `down_tiles` in torch in fp32."""
    n = out.shape[1] // sizes.used
    inputs, by_pair, weights = x.view(-1, sizes.intermediate), out.view(-1, n), routes.weights.view(-1, 1)
    for expert, pairs in _listed(tiles):
        by_pair[pairs] = (inputs[pairs].float() @ linear.rows(expert * n, n).T * weights[pairs]).to(out.dtype)


def expert_tiles_bytes(x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, *more) -> int:
    """Return the bytes that a launch moves: the weights of the experts in use once, the rows in and out."""
    sizes = more[-1]
    experts = {expert for expert, _ in _listed(tiles)}
    return linear.nbytes // sizes.stored * len(experts) + x.nbytes + out.nbytes


GATE_UP_TILES = Op(gate_up_tiles, gate_up_tiles_ref, expert_tiles_bytes, (_expert_tiles_kernel,), outputs=("out",))
DOWN_TILES = Op(down_tiles, down_tiles_ref, expert_tiles_bytes, (_expert_tiles_kernel,), outputs=("out",))
