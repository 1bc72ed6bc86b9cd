"""expert_rows: the products of each row with the dense weights of its experts, for passes of one or two rows.

A weight is read once for each row that uses it. As in matvec.py, whole rows of the weight are tiles in registers.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import (
    META_WIDTH,
    RUN,
    STATUS,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    options,
    running,
)
from ..linear.epilogue import load_partials, norm_scale, silu
from ..linear.matvec import dot_tiles, load_tiles
from ..linear.project import OUTPUTS, AddResidual, Gated
from ..linear.weight import LoadedLinear
from ..op import Op
from .arguments import ExpertSizes, Routes


@dataclass(frozen=True)
class RowsConfig:
    """Launch config of a product of expert_rows.

    Attributes:
        block_n: Rows of the weight of a program; gate_up takes block_n rows of gate and of up.
    """

    block_n: int
    num_warps: int

    def programs(self, n: int) -> int:
        """Return the number of programs for n rows of a weight. Each of down stores one partial sum of squares."""
        return cdiv(n, self.block_n)


@triton.jit(do_not_specialize=["n_sumsq"])
def _gate_up_rows_kernel(
    meta_ptr, x_ptr, weight_ptr, ids_ptr, out_ptr, sumsq_ptr, eps, stride_xm, stride_om, stride_sumsq, n_sumsq,
    N: tl.constexpr, K: tl.constexpr, USED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of a row. A program computes BLOCK_N columns of one expert.

    Grid: (USED * cdiv(N, BLOCK_N), rows). The kernel calls gdc_launch_dependents only after gdc_wait. So `route` has
    ended before any later kernel of the pass starts, and later kernels may read the ids before their own gdc_wait.

    Args:
        x_ptr: [rows, K], the residual stream times the norm's weight.
        weight_ptr: [experts, 2 * N, K], gate before up.
        ids_ptr: [rows, USED] int32.
        out_ptr: [rows, USED * N] (output).
        sumsq_ptr: partial sums of squares of the residual stream.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid, row = tl.program_id(0), tl.program_id(1)
    place = pid // BLOCKS
    offs_n = pid % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if status != RUN:
        return
    expert = tl.load(ids_ptr + row * USED + place).to(tl.int64)
    MASKED: tl.constexpr = N % BLOCK_N != 0
    mask_n = (offs_n < N)[:, None]
    gate_ptrs = weight_ptr + (expert * (2 * N) + offs_n)[:, None] * K
    gate = load_tiles(gate_ptrs, mask_n, K, BLOCK_K, MASKED, "evict_first")
    up = load_tiles(gate_ptrs + N * K, mask_n, K, BLOCK_K, MASKED, "evict_first")
    x = load_tiles(x_ptr + row * stride_xm, True, K, BLOCK_K, False, "")
    partials = load_partials(sumsq_ptr, row, True, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
    scale = norm_scale(tl.sum(partials, 0), K, eps)
    y = silu(dot_tiles(gate, x, BLOCK_N, K, BLOCK_K) * scale) * (dot_tiles(up, x, BLOCK_N, K, BLOCK_K) * scale)
    tl.store(out_ptr + row * stride_om + place * N + offs_n, y.to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _down_rows_kernel(
    meta_ptr, x_ptr, weight_ptr, ids_ptr, pair_weights_ptr, norm_ptr, out_ptr, normed_ptr, sumsq_ptr, stride_xm,
    stride_om, stride_normed, stride_sumsq, N: tl.constexpr, K: tl.constexpr, USED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the weighted products of the experts of a row to the residual stream, and prepare the next norm.

    Grid: (cdiv(N, BLOCK_N), rows). A program computes BLOCK_N columns. It reads the ids before gdc_wait; see
    _gate_up_rows_kernel.

    Args:
        x_ptr: [rows, USED * K].
        weight_ptr: [experts, N, K].
        ids_ptr, pair_weights_ptr: [rows, USED], the experts and their weights.
        norm_ptr: [N], the weight of the next norm.
        out_ptr: [rows, N] fp32, the residual stream, updated in place.
        normed_ptr: [rows, N] (output), out * norm.
        sumsq_ptr: [rows, programs] fp32 (output), partial sums of out ** 2.
    """
    pid, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    if status == RUN:
        norm = tl.load(norm_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        w = ()
        for i in tl.static_range(USED):
            expert = tl.load(ids_ptr + row * USED + i).to(tl.int64)
            rows_ptrs = weight_ptr + (expert * N + offs_n)[:, None] * K
            w += (load_tiles(rows_ptrs, mask_n[:, None], K, BLOCK_K, N % BLOCK_N != 0, "evict_first"),)
        if PDL:
            gdc_wait()
        out_ptrs = out_ptr + row * stride_om + offs_n
        y = tl.load(out_ptrs, mask=mask_n, other=0.0)
        for i in tl.static_range(USED):
            x = load_tiles(x_ptr + row * stride_xm + i * K, True, K, BLOCK_K, False, "")
            y += tl.load(pair_weights_ptr + row * USED + i) * dot_tiles(w[i], x, BLOCK_N, K, BLOCK_K)
        tl.store(out_ptrs, y, mask=mask_n)
        normed = (y * norm).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * stride_normed + offs_n, normed, mask=mask_n)
        tl.store(sumsq_ptr + row * stride_sumsq + pid, tl.sum(tl.where(mask_n, y * y, 0.0), 0))
    elif PDL:
        gdc_wait()


def gate_up_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, gated: Gated, sizes: ExpertSizes, *, config, pdl=False
):
    """Compute silu(gate) * up of the experts of each row.

    Args:
        x: [rows, hidden], the residual stream times the norm's weight.
        linear: gate and up of all experts, [experts * 2 * intermediate, hidden].
        out: [rows, used experts * intermediate] (output).
        gated: the partial sums for the division by the root mean square.
    """
    rows, K = x.shape
    n = sizes.intermediate
    _gate_up_rows_kernel[(sizes.used * config.programs(n), rows)](
        meta, x, linear.weight, routes.ids, out, gated.sumsq, gated.eps, x.stride(0), out.stride(0),
        gated.sumsq.stride(0), gated.partials, n, K, sizes.used, next_power_of_2(max(gated.partials, 1)),
        config.block_n, 256 * config.num_warps, pdl, **options(config.num_warps, pdl),
    )  # fmt: skip


def gate_up_rows_ref(meta, x, linear: LoadedLinear, routes: Routes, out, gated: Gated, sizes: ExpertSizes) -> None:
    """Compute `gate_up_rows` in torch in fp32."""
    for row in running(meta, len(x)):
        scale = (gated.sumsq[row, : gated.partials].sum() / x.shape[1] + gated.eps).rsqrt()
        for place, expert in enumerate(routes.ids[row].tolist()):
            weight = linear.rows(expert * 2 * sizes.intermediate, 2 * sizes.intermediate)
            gate, up = (weight @ x[row].float() * scale).chunk(2)
            columns = slice(place * sizes.intermediate, (place + 1) * sizes.intermediate)
            out[row, columns] = (gate * gate.sigmoid() * up).to(out.dtype)


def down_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, epilogue: AddResidual, sizes: ExpertSizes, *, config, pdl=False
):
    """Add the products of each row with its experts, times their weights, to the residual stream.

    Args:
        x: [rows, used experts * intermediate].
        linear: down of all experts, [experts * hidden, intermediate].
        out: fp32 [rows, hidden], updated in place.
        epilogue: the next norm.
    """
    rows, n = out.shape
    _down_rows_kernel[(config.programs(n), rows)](
        meta, x, linear.weight, routes.ids, routes.weights, epilogue.norm, out, epilogue.normed, epilogue.sumsq,
        x.stride(0), out.stride(0), epilogue.normed.stride(0), epilogue.sumsq.stride(0), n, sizes.intermediate,
        sizes.used, config.block_n, 256 * config.num_warps, pdl, **options(config.num_warps, pdl),
    )  # fmt: skip


def down_rows_ref(
    meta, x, linear: LoadedLinear, routes: Routes, out, epilogue: AddResidual, sizes: ExpertSizes
) -> None:
    """Compute `down_rows` in torch in fp32."""
    n = out.shape[1]
    for row in running(meta, len(x)):
        for part, expert, weight in zip(
            x[row].float().chunk(sizes.used), routes.ids[row].tolist(), routes.weights[row].tolist()
        ):
            out[row] += linear.rows(expert * n, n) @ part * weight
        prepare_norm(row, out, epilogue)


def prepare_norm(row: int, out, epilogue: AddResidual) -> None:
    """Write the outputs of AddResidual other than `out` for a row, as references do: normed, and one partial sum."""
    epilogue.normed[row] = (out[row] * epilogue.norm.float()).to(epilogue.normed.dtype)
    epilogue.sumsq[row] = 0
    epilogue.sumsq[row, 0] = out[row].square().sum()


def expert_rows_bytes(meta, x, linear: LoadedLinear, routes: Routes, out, epilogue, sizes: ExpertSizes) -> int:
    """Return the bytes that a launch moves: the weights of the experts of each row, the rows in and out."""
    used = len(running(meta, len(x))) * sizes.used
    return linear.nbytes // sizes.stored * used + x.nbytes + out.nbytes


GATE_UP_ROWS = Op(gate_up_rows, gate_up_rows_ref, expert_rows_bytes, (_gate_up_rows_kernel,), outputs=("out",))
DOWN_ROWS = Op(down_rows, down_rows_ref, expert_rows_bytes, (_down_rows_kernel,), OUTPUTS)
