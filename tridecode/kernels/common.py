"""The meta layout as compile-time constants, and the options of a launch. Every kernel uses them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401

from .. import layout

META_WIDTH = tl.constexpr(layout.META_WIDTH)
SAMP_WIDTH = tl.constexpr(layout.SAMP_WIDTH)
RING = tl.constexpr(layout.RING)
FLAGS = tl.constexpr(layout.FLAGS)
N_KNOWN = tl.constexpr(layout.N_KNOWN)
LIMIT = tl.constexpr(layout.LIMIT)
ALLOCATED = tl.constexpr(layout.ALLOCATED)
RECORD = tl.constexpr(layout.RECORD)
GENERATION = tl.constexpr(layout.GENERATION)
SLOT = tl.constexpr(layout.SLOT)
SEED_LO = tl.constexpr(layout.SEED_LO)
SEED_HI = tl.constexpr(layout.SEED_HI)
N_STOP = tl.constexpr(layout.N_STOP)
TOP_K = tl.constexpr(layout.TOP_K)
N_LOGPROBS = tl.constexpr(layout.N_LOGPROBS)
STOP_IDS = tl.constexpr(layout.STOP_IDS)
MAX_STOP_IDS = tl.constexpr(layout.MAX_STOP_IDS)
POSITION = tl.constexpr(layout.POSITION)
STEP = tl.constexpr(layout.STEP)
STATUS = tl.constexpr(layout.STATUS)
SOURCE = tl.constexpr(layout.SOURCE)
OWN_ROW = tl.constexpr(layout.OWN_ROW)
LATE = tl.constexpr(layout.LATE)
DRAFTS = tl.constexpr(layout.DRAFTS)
DRAFT_LIMIT = tl.constexpr(layout.DRAFT_LIMIT)
MAX_DRAFTS = tl.constexpr(layout.MAX_DRAFTS)
RUN = tl.constexpr(layout.RUN)
STOP = tl.constexpr(layout.STOP)
LIMIT_REACHED = tl.constexpr(layout.LIMIT_REACHED)
NAN = tl.constexpr(layout.NAN)
WAIT = tl.constexpr(layout.WAIT)
FLAG_BIAS = tl.constexpr(layout.FLAG_BIAS)
FLAG_PENALTIES = tl.constexpr(layout.FLAG_PENALTIES)
FLAG_MASK = tl.constexpr(layout.FLAG_MASK)
TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
TOP_P = tl.constexpr(layout.TOP_P)
MIN_P = tl.constexpr(layout.MIN_P)
REPETITION_PENALTY = tl.constexpr(layout.REPETITION_PENALTY)
PRESENCE_PENALTY = tl.constexpr(layout.PRESENCE_PENALTY)
FREQUENCY_PENALTY = tl.constexpr(layout.FREQUENCY_PENALTY)


def cdiv(a: int, b: int) -> int:
    """Return `a / b`, rounded up. Launchers call this, because a call of triton.cdiv takes 5 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n. Launchers call this, because Triton's function takes 5 µs."""
    return 1 << max(n - 1, 0).bit_length()


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1)."""
    return triton.knobs.runtime.interpret


def options(num_warps: int, pdl: bool = False, registers: int = 0) -> dict:
    """Return launch options.

    Args:
        num_warps: Warps of a program.
        pdl: Programmatic dependent launch. The kernel may start while its predecessor drains (sm_90 and later).
        registers: Maximum number of registers of a thread. A low limit lets more programs fit into a multiprocessor. 0
            sets the largest limit that num_warps allows.
    """
    # Without an explicit limit, ptxas may use only 64 or 128 registers. Then fewer loads are in flight, and some
    # versions
    # spill.
    registers = registers or min(65536 // (32 * num_warps), 255)
    launch = {"num_warps": num_warps, "num_stages": 1, "maxnreg": registers, "enable_fp_fusion": True}
    if pdl:
        launch["launch_pdl"] = True
    return launch


def equal_sigmoid(x):
    """Return the sigmoids of a torch tensor, for a reference.

    On a CPU, torch.sigmoid computes most numbers by vector instructions and rounds the remaining ones differently. Then
    the result of a row would depend on the number of rows. exp rounds all numbers alike.
    """
    return 1 / (1 + (-x).exp())


def running(meta, count: int) -> list[int]:
    """Return those of the first `count` rows whose status is RUN. References skip the other rows, as kernels do."""
    return [row for row, status in enumerate(meta[:count, STATUS.value].tolist()) if status == RUN.value]
