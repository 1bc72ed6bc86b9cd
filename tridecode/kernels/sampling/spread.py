"""spread: from requests to the rows of a pass that verifies drafts, one for each request's token and each draft."""

import triton
import triton.language as tl

from ..common import DRAFTS, META_WIDTH, POSITION, SAMP_WIDTH, STATUS, STEP, WAIT, options
from ..op import Op


@triton.jit
def _spread_kernel(meta_ptr, samp_ptr, meta_out_ptr, samp_out_ptr, QUERIES: tl.constexpr):
    """Rows QUERIES * r and following get what row r has, each one position and step after the one before.

    meta: [rows, META_WIDTH] int32; samp: [rows, SAMP_WIDTH] fp32; outputs: [rows * QUERIES, ...]. Those beyond the
    drafts do not run. Moves 2 * (4 * META_WIDTH + 4 * SAMP_WIDTH) bytes a row. Grid (rows * QUERIES,), always launched
    without PDL: later kernels read what is written here before their wait.
    """
    row = tl.program_id(0)
    source, query = row // QUERIES, row % QUERIES
    fields = tl.arange(0, META_WIDTH)
    state = tl.load(meta_ptr + source * META_WIDTH + fields)
    idle = query > tl.load(meta_ptr + source * META_WIDTH + DRAFTS)
    state += tl.where((fields == POSITION) | (fields == STEP), query, 0)
    state = tl.where((fields == STATUS) & idle, WAIT, state)
    tl.store(meta_out_ptr + row * META_WIDTH + fields, state)
    fields = tl.arange(0, SAMP_WIDTH)
    tl.store(samp_out_ptr + row * SAMP_WIDTH + fields, tl.load(samp_ptr + source * SAMP_WIDTH + fields))


def spread(meta, samp, meta_out, samp_out, *, pdl=False):
    """meta_out, samp_out [rows * queries, ...]: the states of the rows that verify, from those of meta, samp [rows]."""
    _spread_kernel[(len(meta_out),)](meta, samp, meta_out, samp_out, len(meta_out) // len(meta), **options(2))


def spread_ref(meta, samp, meta_out, samp_out):
    queries = len(meta_out) // len(meta)
    meta_out.copy_(meta.repeat_interleave(queries, 0))
    samp_out.copy_(samp.repeat_interleave(queries, 0))
    for query in range(queries):
        rows = meta_out[query::queries]
        rows[:, [POSITION.value, STEP.value]] += query
        rows[:, STATUS.value].masked_fill_(query > rows[:, DRAFTS.value], WAIT.value)


def spread_bytes(meta, samp, meta_out, samp_out) -> int:
    return 2 * (meta_out.nbytes + samp_out.nbytes)


SPREAD = Op(spread, spread_ref, spread_bytes, (_spread_kernel,))
