"""matmul for up to 64 rows, with tiles of the rows and of the weight that TMA copies to shared memory.

A program multiplies all rows by BLOCK_N rows of the weight and adds all their columns itself, in one order. No sums
remain to be added between programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import (
    META_WIDTH,
    RUN,
    STATUS,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    next_power_of_2,
    options,
)
from ..op import Op
from .adapters import Adapters, adapter_arguments, expand_rows, load_b_group, parts_of
from .epilogue import epilogue_arguments, finish, load_extra, load_partials, norm_scale, silu
from .project import MAX_ROWS, OUTPUTS, SHORT, LinearKernel, adapted_bytes, adapted_ref


@dataclass(frozen=True)
class TilesConfig:
    """Launch config of matmul_tiles.

    Attributes:
        block_n, block_k: Rows and columns of a tile of the weight. Gated takes block_n rows of each half.
        stages: Tiles in flight.
        block_m: Minimum number of rows of a tile of activations.
    """

    block_n: int = 32
    block_k: int = 128
    stages: int = 4
    num_warps: int = 4
    block_m: int = 16


@triton.jit
def _matmul_tiles_kernel(
    meta_ptr, x_desc, weight_desc, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps, stride_om, stride_normed,
    stride_sumsq, rows, N, n_sumsq, b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym,
    K: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ADAPTERS: tl.constexpr, A_SPLITS: tl.constexpr,
    A_PARTS: tl.constexpr, BEGIN_1: tl.constexpr, BEGIN_2: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Compute `project` for `rows` rows. A program computes BLOCK_N outputs of all rows.

    Grid: (cdiv(N, BLOCK_N),). Each program stores one partial sum of squares per row. STAGES tiles of x and of the
    weight are in flight.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        x_desc: Tensor descriptor of [BLOCK_M, K], in tiles [BLOCK_M, BLOCK_K].
        weight_desc: Tensor descriptor of [N, K], or [2 * N, K] if "gated", in tiles [BLOCK_N, BLOCK_K].
        extra_ptr, out_ptr, normed_ptr, sumsq_ptr: see _matmul_kernel.
        b_ptr and the following: see adapter_arguments.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
    some = tl.max((status == RUN).to(tl.int32), 0)
    mask_n = (offs_n < N)[None, :]
    extra = load_extra(extra_ptr, offs_n[None, :], N, EPILOGUE, HAS_BIAS)
    if ADAPTERS:
        A = Adapters(b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym)
        P: tl.constexpr = parts_of(False, A_SPLITS, A_PARTS, BEGIN_1, BEGIN_2)
        first_n, numbers = pid * BLOCK_N, tl.load(numbers_ptr + offs_m, mask=offs_m < rows, other=0)
        group = load_b_group(A, P, numbers, 0, 0, offs_n, offs_n < N)
    if PDL:
        gdc_wait()
    if some == 0:
        return
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = x_desc.load([0, k])
        w = weight_desc.load([pid * BLOCK_N, k])
        if DOT_FP32:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if EPILOGUE == "gated":
            w = weight_desc.load([N + pid * BLOCK_N, k])
            if DOT_FP32:
                w = w.to(tl.float32)
            up = tl.dot(x, w.T, up, input_precision="ieee")
    if ADAPTERS:
        TYPE: tl.constexpr = tl.float32 if DOT_FP32 else b_ptr.dtype.element_ty
        acc += tl.trans(
            expand_rows(A, P, group, offs_n, offs_n < N, first_n, first_n + BLOCK_N, numbers, offs_m, TYPE)
        )  # fmt: skip
        if EPILOGUE == "gated":
            first_n += N
            group = load_b_group(A, P, numbers, 0, 0, offs_n + N, offs_n < N)
            up += tl.trans(
                expand_rows(A, P, group, offs_n + N, offs_n < N, first_n, first_n + BLOCK_N, numbers, offs_m, TYPE)
            )  # fmt: skip
    mask = (status == RUN)[:, None] & mask_n
    out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :]
    normed_ptrs = normed_ptr + offs_m[:, None] * stride_normed + offs_n[None, :]
    residual = 0.0
    if EPILOGUE == "residual":
        residual = tl.load(out_ptrs, mask=mask, other=0.0)
    if EPILOGUE == "normed" or EPILOGUE == "gated":
        mask_m = (offs_m < rows)[:, None]
        partials = load_partials(sumsq_ptr, offs_m[:, None], mask_m, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
        scale = norm_scale(tl.sum(partials, 1), K, eps)[:, None]
        acc = acc * scale
    if EPILOGUE == "gated":
        acc = silu(acc) * (up * scale)
    squares = finish(acc, out_ptrs, normed_ptrs, extra, residual, mask, mask_n, EPILOGUE, HAS_BIAS)
    if EPILOGUE == "residual":
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, tl.sum(squares, 1), mask=status == RUN)


def matmul_tiles(meta, x, linear, out, epilogue, scratch=None, adapters=None, *, config, pdl=False):
    """Compute `project` for up to 64 rows with any epilogue except Plain.

    Args:
        x: The first rows of a buffer that has at least as many rows as a tile.
    """
    rows, N = out.shape
    K, block_m = linear.in_features, max(next_power_of_2(rows), config.block_m)
    # If a tile exceeded the buffer, the copy would be slower. It is faster to include rows that are not used.
    whole = torch.as_strided(x, (block_m, K), (x.stride(0), 1))
    _matmul_tiles_kernel[(cdiv(N, config.block_n),)](
        meta, TensorDescriptor.from_tensor(whole, [block_m, config.block_k]),
        TensorDescriptor.from_tensor(linear.weight, [config.block_n, config.block_k]),
        **epilogue_arguments(linear, out, epilogue), **adapter_arguments(adapters), rows=rows, N=N, K=K,
        BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.stages, PDL=pdl,
        DOT_FP32=interpreted(), **options(config.num_warps, pdl),
    )  # fmt: skip


def _supports(case, rows, device) -> bool:
    """Return whether matmul_tiles computes the case; see LinearKernel."""
    fits_tma = case.weight_type in SHORT and case.k % 8 == 0  # TMA needs rows that begin at multiples of 16 bytes.
    return fits_tma and case.epilogue != "plain" and rows <= MAX_ROWS and not 0 < device.capability < 80


TILES = LinearKernel(
    "tiles",
    Op(matmul_tiles, adapted_ref, adapted_bytes, (_matmul_tiles_kernel,), OUTPUTS),
    TilesConfig,
    _supports,
    lambda n, config: cdiv(n, config.block_n),
    adapts=lambda config: True,
)
