"""matvec: a weight times each row of activations. The weight is read once for each row.

Whole rows of the weight are tiles in registers, so that all their bytes are in flight before `gdc_wait`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, cdiv, gdc_launch_dependents, gdc_wait, options
from ..op import Op
from .adapters import Adapters, adapter_arguments, load_b_columns, load_y_columns, parts_of, rank_of
from .blocks import RowBlocks
from .epilogue import epilogue_arguments, finish, load_extra, load_partials, norm_scale, silu
from .project import OUTPUTS, LinearKernel, adapted_bytes, adapted_ref


@dataclass(frozen=True)
class MatvecConfig(RowBlocks):
    """Launch config of matvec.

    A program takes block_n whole rows of the weight at a time (Gated: of each half), and has its next rows in flight
    while it sums.

    Attributes:
        registers: Maximum number of registers of a thread; 0: no limit.
        programs: Number of programs that share the rows. 0 launches one for each block_n rows.
    """

    block_n: int
    num_warps: int
    registers: int = 0
    programs: int = 0


@triton.jit
def load_tiles(row_ptrs, mask_n, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """Load K columns of the rows at row_ptrs [n, 1] as a tuple of [n, BLOCK_K]. MASKED: see mask_n."""
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    tiles = ()
    for k in tl.static_range(0, K, BLOCK_K):
        if k + BLOCK_K > K:
            mask = mask_n & (k + offs_k < K)
            tiles += (tl.load(row_ptrs + k + offs_k, mask=mask, other=0.0, eviction_policy=POLICY),)
        elif MASKED:
            tiles += (tl.load(row_ptrs + k + offs_k, mask=mask_n, other=0.0, eviction_policy=POLICY),)
        else:
            tiles += (tl.load(row_ptrs + k + offs_k, eviction_policy=POLICY),)
    return tiles


@triton.jit
def load_rows(weight_ptr, offs_n, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr):
    """Load rows offs_n of weight [N, K] as tiles. MASKED: offs_n may exceed N. A program reads each row once."""
    rows = weight_ptr + offs_n.to(tl.int64)[:, None] * K
    return load_tiles(rows, (offs_n < N)[:, None], K, BLOCK_K, MASKED, "evict_first")


@triton.jit
def dot_tiles(w, x, BLOCK_N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sum the products of w's tiles [BLOCK_N, BLOCK_K] and x's [1, BLOCK_K] along the columns: [BLOCK_N] fp32.

    A thread keeps eight sums for each row. With many rows it keeps one, to save registers, and first adds the elements
    that it loads at once.
    """
    GROUP: tl.constexpr = 8 if BLOCK_N > 2 else 1
    acc = tl.zeros([BLOCK_N, BLOCK_K // GROUP], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        product = w[k // BLOCK_K].to(tl.float32) * x[k // BLOCK_K].to(tl.float32)
        if GROUP == 1:
            acc += product
        else:
            acc += tl.sum(product.reshape(BLOCK_N, BLOCK_K // GROUP, GROUP), 2)
    return tl.sum(acc, 1)


@triton.jit(do_not_specialize=["n_sumsq"])  # n_sumsq depends on the launch config of the previous kernel.
def _matvec_kernel(
    meta_ptr, x_ptr, weight_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps, stride_xm, stride_om, stride_normed,
    stride_sumsq, n_sumsq, b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym,
    N: tl.constexpr, K: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, SUMSQ_UNIT: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr, ADAPTERS: tl.constexpr, A_SPLITS: tl.constexpr, A_PARTS: tl.constexpr,
    BEGIN_1: tl.constexpr, BEGIN_2: tl.constexpr, B_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `project` for each row separately.

    Grid: (PROGRAMS, rows). Each program takes every PROGRAMS-th of BLOCKS blocks of BLOCK_N rows of the weight, and
    stores one partial sum of squares. Its first rows are in flight before `gdc_wait`. BLOCK_K is one 16-byte load of
    each thread, so that the tiles of x [1, BLOCK_K] have the layout of the weight's tiles. Any other layout would be
    converted through shared memory.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        x_ptr: [rows, K].
        weight_ptr: [N, K], or [2 * N, K] if "gated".
        extra_ptr, out_ptr, normed_ptr, sumsq_ptr: see _matmul_kernel.
        n_sumsq: Number of partial sums in units of SUMSQ_UNIT, which is SUMSQ_BLOCK if there are exactly that many.
        b_ptr and the following: see adapter_arguments. B_TILES: number of tiles of `load_b_columns`.
    """
    NORMED: tl.constexpr = EPILOGUE == "normed" or EPILOGUE == "gated"
    GATED: tl.constexpr = EPILOGUE == "gated"
    COLUMNS: tl.constexpr = K + B_TILES * BLOCK_K
    ONE_PART: tl.constexpr = GATED or (BEGIN_1 % BLOCK_N == 0 and BEGIN_2 % BLOCK_N == 0)
    pid = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    up_ptr = weight_ptr + N * K
    if ADAPTERS:
        A = Adapters(b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym)
        adapter = tl.load(numbers_ptr + row)
    w, up = load_rows(weight_ptr, offs_n, N, K, BLOCK_K, N % BLOCK_N != 0), ()
    if GATED:
        up = load_rows(up_ptr, offs_n, N, K, BLOCK_K, N % BLOCK_N != 0)
    extra = load_extra(extra_ptr, offs_n, N, EPILOGUE, HAS_BIAS)
    if ADAPTERS:
        P: tl.constexpr = parts_of(GATED, A_SPLITS, A_PARTS, BEGIN_1, BEGIN_2, TILES=B_TILES)
        tl.debug_barrier()  # Otherwise the compiler waits for the rank before it loads the weight.
        rank = rank_of(A, adapter)
        w += load_b_columns(A, P, adapter, rank, offs_n, offs_n < N, BLOCK_K)
        if GATED:
            up += load_b_columns(A, P, adapter, rank, offs_n + N, offs_n < N, BLOCK_K)
    if PDL:
        gdc_wait()
    if status != RUN:
        return
    # Issue all loads that depend on the predecessor here, so that their latencies overlap.
    x = load_tiles(x_ptr + row * stride_xm, True, K, BLOCK_K, False, "")
    if NORMED:
        n = SUMSQ_BLOCK if SUMSQ_UNIT == SUMSQ_BLOCK else n_sumsq * SUMSQ_UNIT
        partials = load_partials(sumsq_ptr, row, True, stride_sumsq, n, SUMSQ_BLOCK)
        scale = norm_scale(tl.sum(partials, 0), K, eps)
    row_x, x_up = x, x
    if ADAPTERS:
        # If all rows of a tile belong to one part, the first one determines it.
        part_n = pid * BLOCK_N + tl.zeros([1], tl.int32) if ONE_PART else offs_n
        x = row_x + load_y_columns(A, P, rank, row, part_n, BLOCK_K)
        if GATED:
            x_up = row_x + load_y_columns(A, P, rank, row, part_n + N, BLOCK_K)
    sumsq = 0.0
    for iteration in range((BLOCKS + PROGRAMS - 1) // PROGRAMS):
        offs_n = (pid + iteration * PROGRAMS) * BLOCK_N + tl.arange(0, BLOCK_N)
        residual = 0.0
        if EPILOGUE == "residual":
            residual = tl.load(out_ptr + row * stride_om + offs_n, mask=offs_n < N, other=0.0)
        w_next, up_next, extra_next = w, up, extra
        if BLOCKS > PROGRAMS:  # The next rows are in flight while these rows are summed.
            offs_next = offs_n + PROGRAMS * BLOCK_N
            w_next = load_rows(weight_ptr, offs_next, N, K, BLOCK_K, True)
            if GATED:
                up_next = load_rows(up_ptr, offs_next, N, K, BLOCK_K, True)
            extra_next = load_extra(extra_ptr, offs_next, N, EPILOGUE, HAS_BIAS)
            if ADAPTERS:
                w_next += load_b_columns(A, P, adapter, rank, offs_next, offs_next < N, BLOCK_K)
                if GATED:
                    up_next += load_b_columns(A, P, adapter, rank, offs_next + N, offs_next < N, BLOCK_K)
        y = dot_tiles(w, x, BLOCK_N, COLUMNS, BLOCK_K)
        if NORMED:
            y = y * scale
        if GATED:
            y = silu(y) * (dot_tiles(up, x_up, BLOCK_N, COLUMNS, BLOCK_K) * scale)
        mask_n, out_ptrs = offs_n < N, out_ptr + row * stride_om + offs_n
        normed_ptrs = normed_ptr + row * stride_normed + offs_n
        squares = finish(y, out_ptrs, normed_ptrs, extra, residual, mask_n, mask_n, EPILOGUE, HAS_BIAS)
        if EPILOGUE == "residual":
            sumsq += tl.sum(squares, 0)
        w, up, extra = w_next, up_next, extra_next
        if ADAPTERS and A_PARTS > 1 and not GATED and BLOCKS > PROGRAMS:
            part_n += PROGRAMS * BLOCK_N
            x = row_x + load_y_columns(A, P, rank, row, part_n, BLOCK_K)
    if EPILOGUE == "residual":
        tl.store(sumsq_ptr + row * stride_sumsq + pid, sumsq)


def matvec(meta, x, linear, out, epilogue, scratch=None, adapters=None, *, config, pdl=False):
    """Compute `project`. Each row has programs of its own."""
    rows, N = out.shape
    blocks, programs = config.grid(N)
    block_k = 256 * config.num_warps
    b_tiles = cdiv(len(adapters.y) * adapters.max_rank, block_k) if adapters else 0
    arguments = epilogue_arguments(linear, out, epilogue)
    # The compiler can load four partial sums at a time if the mask is constant over them, or absent.
    n_sumsq, sumsq_block = arguments["n_sumsq"], arguments["SUMSQ_BLOCK"]
    unit = sumsq_block if n_sumsq == sumsq_block else 1 if n_sumsq % 4 else 4
    arguments["n_sumsq"] //= unit
    _matvec_kernel[(programs, rows)](
        meta, x, linear.weight, **arguments, **adapter_arguments(adapters), SUMSQ_UNIT=unit, stride_xm=x.stride(0),
        N=N, K=linear.in_features, BLOCK_N=config.block_n, BLOCK_K=block_k, BLOCKS=blocks, PROGRAMS=programs,
        B_TILES=b_tiles, PDL=pdl, **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def _supports(case, rows, device) -> bool:
    """Return whether matvec computes the case; see LinearKernel."""
    return case.packed is None


MATVEC = LinearKernel(
    "matvec",
    Op(matvec, adapted_ref, adapted_bytes, (_matvec_kernel,), OUTPUTS),
    MatvecConfig,
    _supports,
    lambda n, config: config.grid(n)[1],
    adapts=lambda config: True,
)
