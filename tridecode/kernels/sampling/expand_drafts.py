"""expand_drafts: writes the rows of a verifying pass, one for each request's next token and one for each draft."""

import triton
import triton.language as tl

from ..common import DRAFTS, META_WIDTH, POSITION, SAMP_WIDTH, STATUS, STEP, WAIT, options
from ..op import Op


@triton.jit
def _expand_drafts_kernel(meta_ptr, samp_ptr, meta_out_ptr, samp_out_ptr, QUERIES: tl.constexpr):
    """Copy row r to rows QUERIES * r and following, each one position and one step after the previous one.

    A program writes one row. Grid: (rows * QUERIES,). Moves 2 * (4 * META_WIDTH + 4 * SAMP_WIDTH) bytes per row. Rows
    beyond the drafts get status WAIT. Launched without PDL in every pass, because later kernels read its outputs before
    their wait.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        samp_ptr: [rows, SAMP_WIDTH] fp32.
        meta_out_ptr: [rows * QUERIES, META_WIDTH] int32 (output).
        samp_out_ptr: [rows * QUERIES, SAMP_WIDTH] fp32 (output).
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


def expand_drafts(meta, samp, meta_out, samp_out, *, pdl=False):
    """Write the states of the rows that verify drafts, from meta and samp [rows, ...] to meta_out and samp_out.

    meta_out and samp_out have `queries` rows for each row of meta.
    """
    _expand_drafts_kernel[(len(meta_out),)](meta, samp, meta_out, samp_out, len(meta_out) // len(meta), **options(2))


def expand_drafts_ref(meta, samp, meta_out, samp_out):
    """Compute `expand_drafts` in torch."""
    queries = len(meta_out) // len(meta)
    meta_out.copy_(meta.repeat_interleave(queries, 0))
    samp_out.copy_(samp.repeat_interleave(queries, 0))
    for query in range(queries):
        rows = meta_out[query::queries]
        rows[:, [POSITION.value, STEP.value]] += query
        rows[:, STATUS.value].masked_fill_(query > rows[:, DRAFTS.value], WAIT.value)


def expand_drafts_bytes(meta, samp, meta_out, samp_out) -> int:
    """Return the bytes that a launch moves."""
    return 2 * (meta_out.nbytes + samp_out.nbytes)


EXPAND_DRAFTS = Op(expand_drafts, expand_drafts_ref, expand_drafts_bytes, (_expand_drafts_kernel,))
