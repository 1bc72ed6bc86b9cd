"""Parts of the products in Gluon: what both kernels for Hopper share, and the rings of matmul_hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate, base_value

COLUMNS = gl.constexpr(64)  # that lie side by side in shared memory, 128 bytes; the next ones behind all rows of those
COPIER_REGISTERS = gl.constexpr(24)
# Names that Triton has changed, 3.9's first.
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def record(names: str):
    """A class of values that go from function to function as one; it is made of them in the order of their names."""

    def init(self, *values):
        for name, value in zip(names.split(), values, strict=True):
            setattr(self, name, value)

    init.__triton_builtin__ = True
    types = dict.fromkeys(names.split(), base_value)
    return _aggregate(type("_Record", (), {"__init__": init, "__annotations__": types}))


@gluon.jit
def barriers(STAGES: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(found.index(i), count=1)
    return found


@gluon.jit
def copy_weights(w, c):
    """Tile c of the weights into its stage, which also waits for that of the activations where both have as many. In
    shared memory a tile lies 64 columns at a time, GATED the gate's rows of these, then those of up."""
    HALVES: gl.constexpr = 2 if w.GATED else 1
    ROWS: gl.constexpr = w.BLOCK_N // HALVES
    PIECES: gl.constexpr = w.BLOCK_K // COLUMNS
    X_ROWS: gl.constexpr = w.BLOCK_M if w.STAGES == w.X_STAGES else 0
    stage = c % w.STAGES
    if w.PERSISTENT:
        row, column = (w.pid + c // w.n * gl.num_programs(0)) * ROWS, c % w.n * w.BLOCK_K
    else:
        row, column = w.pid % w.tiles * ROWS, (w.begin + c) * w.BLOCK_K
    mbarrier.expect(w.w_full.index(stage), (ROWS * HALVES + X_ROWS) * w.BLOCK_K * 2)
    parts = view(w.w_ring.index(stage), w.w_ring.dtype, [PIECES * HALVES, ROWS, COLUMNS], w.weight_desc.layout)
    for x in gl.static_range(PIECES):
        for half in gl.static_range(HALVES):
            place = [row + half * w.N, column + x * COLUMNS]
            copy(w.weight_desc, place, w.w_full.index(stage), parts.index(x * HALVES + half))


@gluon.jit
def _copy_rows(w, c):
    """Tile c of the activations into its stage."""
    PIECES: gl.constexpr = w.BLOCK_K // COLUMNS
    stage = c % w.X_STAGES
    column = (c % w.n if w.PERSISTENT else w.begin + c) * w.BLOCK_K
    if w.STAGES != w.X_STAGES:
        mbarrier.expect(w.x_full.index(stage), w.BLOCK_M * w.BLOCK_K * 2)
    parts = view(w.x_ring.index(stage), w.x_ring.dtype, [PIECES, w.BLOCK_M, COLUMNS], w.x_desc.layout)
    for x in gl.static_range(PIECES):
        copy(w.x_desc, [0, column + x * COLUMNS], w.x_full.index(stage), parts.index(x))


@gluon.jit
def copy_first_rows(w):
    for c in gl.static_range(w.X_STAGES):
        if c < w.total:
            _copy_rows(w, c)


@gluon.jit
def copy_next(w, c):
    """The tiles that come into the places of tile c, if there are such."""
    if c + w.STAGES < w.total:
        copy_weights(w, c + w.STAGES)
    if c + w.X_STAGES < w.total:
        _copy_rows(w, c + w.X_STAGES)
