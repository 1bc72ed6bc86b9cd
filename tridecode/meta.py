"""The meta buffer: everything that changes between steps, at one fixed device address.

meta is int32 [slots, META_WIDTH]. Fields below DEVICE_FIELDS are written by the host only, the rest by the device only
while a request runs; the host sets both halves once when a request begins.
samp is fp32 [slots, SAMP_WIDTH] and holds the sampling parameters that are not integers.
"""

META_WIDTH = 64
SAMP_WIDTH = 16
MAX_STOP_IDS = 16
RING = 64  # entries of the pinned output ring, a power of two

# host fields
FLAGS = 0  # bit set of FLAG_* below
N_KNOWN = 1  # tokens[0 .. N_KNOWN - 1] are given: sampling never overwrites them
LIMIT = 2  # total number of tokens (prompt and output) at which the generation ends, at most capacity + 1
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
