"""What every kernel shares: the meta layout as compile-time constants, and how a launch is given its options."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401

from .. import meta

META_WIDTH = tl.constexpr(meta.META_WIDTH)
SAMP_WIDTH = tl.constexpr(meta.SAMP_WIDTH)
RING = tl.constexpr(meta.RING)
FLAGS = tl.constexpr(meta.FLAGS)
N_KNOWN = tl.constexpr(meta.N_KNOWN)
LIMIT = tl.constexpr(meta.LIMIT)
PAGE_ROW = tl.constexpr(meta.PAGE_ROW)
SEED_LO = tl.constexpr(meta.SEED_LO)
SEED_HI = tl.constexpr(meta.SEED_HI)
N_STOP = tl.constexpr(meta.N_STOP)
TOP_K = tl.constexpr(meta.TOP_K)
N_LOGPROBS = tl.constexpr(meta.N_LOGPROBS)
STOP_IDS = tl.constexpr(meta.STOP_IDS)
POSITION = tl.constexpr(meta.POSITION)
STEP = tl.constexpr(meta.STEP)
STATUS = tl.constexpr(meta.STATUS)
RUN = tl.constexpr(meta.RUN)
STOP = tl.constexpr(meta.STOP)
LIMIT_REACHED = tl.constexpr(meta.LIMIT_REACHED)
NAN = tl.constexpr(meta.NAN)
FLAG_BIAS = tl.constexpr(meta.FLAG_BIAS)
FLAG_PENALTIES = tl.constexpr(meta.FLAG_PENALTIES)
TEMPERATURE = tl.constexpr(meta.TEMPERATURE)
TOP_P = tl.constexpr(meta.TOP_P)
MIN_P = tl.constexpr(meta.MIN_P)
REPETITION_PENALTY = tl.constexpr(meta.REPETITION_PENALTY)
PRESENCE_PENALTY = tl.constexpr(meta.PRESENCE_PENALTY)
FREQUENCY_PENALTY = tl.constexpr(meta.FREQUENCY_PENALTY)


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1)."""
    return triton.knobs.runtime.interpret


def options(num_warps: int, pdl: bool = False, registers: int = 0) -> dict:
    """Launch options; `pdl` lets the kernel start while its predecessor drains (sm_90 and above).

    registers: the most a thread may use, so that more programs fit a multiprocessor; 0 for as many as there can be.
    """
    # Left alone, ptxas may stop at 64 or 128 registers, with fewer loads in flight and, in some versions, spills.
    registers = registers or min(65536 // (32 * num_warps), 255)
    chosen = {"num_warps": num_warps, "num_stages": 1, "maxnreg": registers, "enable_fp_fusion": True}
    if pdl:
        chosen["launch_pdl"] = True
    return chosen


def running(meta, rows: int) -> list[int]:
    """The rows whose slot has status RUN; the references' form of a kernel leaving early."""
    return [row for row in range(rows) if meta[row, STATUS.value] == RUN.value]
