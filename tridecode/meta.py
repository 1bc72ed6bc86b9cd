"""The meta buffer: everything that changes between steps, at one fixed device address.

meta is int32 [slots, META_WIDTH]. Fields below DEVICE_FIELDS are written by the host only, the rest by the device only
while a request runs; the host sets both halves once when a request begins.
samp is fp32 [slots, SAMP_WIDTH] and holds the sampling parameters that are not integers.
"""

from collections.abc import Sequence

import torch

from .sampling import SamplingParams

META_WIDTH = 64
SAMP_WIDTH = 16
MAX_STOP_IDS = 16
RING = 64  # entries of the pinned output ring, a power of two

# host fields
FLAGS = 0  # bit set of FLAG_* below
N_KNOWN = 1  # tokens[0 .. N_KNOWN - 1] are given: sampling never overwrites them
LIMIT = 2  # total number of tokens (prompt and output) at which the generation ends, at most capacity + 1
PAGE_ROW = 3  # row of the page table
SEED_LO = 4
SEED_HI = 5
N_STOP = 6
TOP_K = 7  # 0: off
N_LOGPROBS = 8  # most likely tokens to report a step
STOP_IDS = 16  # .. 31

# device fields
DEVICE_FIELDS = 32
POSITION = 32  # index of the token the next step embeds
STEP = 33  # steps done in this request
STATUS = 34

# STATUS values: with anything but RUN every kernel of a step leaves without writing
RUN = 0
STOP = 1
LIMIT_REACHED = 2
NAN = 3

# FLAGS bits
FLAG_BIAS = 1  # add bias[slot] to the logits
FLAG_PENALTIES = 2  # read counts[slot] and apply the three penalties

# samp fields
TEMPERATURE = 0  # 0: greedy
TOP_P = 1  # 1: off
MIN_P = 2  # 0: off
REPETITION_PENALTY = 3  # 1: off
PRESENCE_PENALTY = 4  # 0: off
FREQUENCY_PENALTY = 5  # 0: off



def request_rows(
    params: SamplingParams,
    *,
    position: int,
    n_known: int,
    limit: int,
    stop_ids: Sequence[int],
    seed: int,
    page_row: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The meta row (int32 [META_WIDTH]) and samp row (fp32 [SAMP_WIDTH]) with which a request begins, on the host."""
    meta = torch.zeros(META_WIDTH, dtype=torch.int32)
    meta[FLAGS] = FLAG_BIAS * bool(params.logit_bias) | FLAG_PENALTIES * params.penalties
    meta[N_KNOWN], meta[LIMIT], meta[PAGE_ROW] = n_known, limit, page_row
    meta[SEED_LO], meta[SEED_HI] = _as_int32(seed), _as_int32(seed >> 32)
    meta[TOP_K], meta[N_LOGPROBS] = params.top_k, params.logprobs or 0
    meta[N_STOP] = len(stop_ids)
    meta[STOP_IDS : STOP_IDS + len(stop_ids)] = torch.tensor(list(stop_ids), dtype=torch.int32)
    meta[POSITION], meta[STEP], meta[STATUS] = position, 0, RUN
    samp = torch.zeros(SAMP_WIDTH)
    samp[TEMPERATURE], samp[TOP_P], samp[MIN_P] = params.temperature, params.top_p, params.min_p
    samp[REPETITION_PENALTY] = params.repetition_penalty
    samp[PRESENCE_PENALTY], samp[FREQUENCY_PENALTY] = params.presence_penalty, params.frequency_penalty
    return meta, samp


def _as_int32(value: int) -> int:
    """The low 32 bits, as the signed number that an int32 tensor takes."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
