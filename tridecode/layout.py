"""The layout of the state that a pass reads and writes at fixed device addresses, as numbers.

meta is int32 [rows, META_WIDTH]: of each row of a pass the state of its request. Fields below DEVICE_FIELDS are
written by the host only, the rest by the device only while a request runs; the host sets both halves once when a
request begins.
samp is fp32 [rows, SAMP_WIDTH] and holds the sampling parameters that are not integers.
What is large stays where it is while its request runs: tokens, counts, bias, pages and ring are those of the slot that
the field SLOT names. A kernel has a row's status and position after one load, as if there were no slots.
An entry of the output ring is an int64: generation << GENERATION_SHIFT | step << STEP_SHIFT | what a pass that verifies
drafts tells beside | token.
chunks is int32 [MAX_CHUNKS, CHUNK_WIDTH] and says whose prompts a prompt pass reads: rows [FIRST, FIRST + COUNT) of the
pass are the slot's tokens from position START on. Chunks without rows stand last.
"""

from array import array
from collections.abc import Sequence
from struct import pack
from typing import NamedTuple

META_WIDTH = 64
SAMP_WIDTH = 16
MAX_STOP_IDS = 16  # with which the device compares each token; a power of two
MAX_LOGPROBS = 20  # most likely tokens that a step reports
RING = 64  # entries of a slot's output ring, a power of two

# host fields
FLAGS = 0  # bit set of FLAG_* below
N_KNOWN = 1  # tokens[0 .. N_KNOWN - 1] are given: sampling never overwrites them
LIMIT = 2  # total number of tokens (prompt and output) at which the generation ends, at most capacity + 1
SLOT = 3
GENERATION = 9  # which request of the slot this is: its entries in the ring bear it
ROOM = 10  # positions that have pages: at that one the row waits until the host has given it more
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
SOURCE = 35  # row of the prompt pass that this row continues, written by the host; OWN: the one of its own number
OWN = -1
LATE = 36  # 1: when this pass wanted the row's mask it was not there yet, and the row does the same pass again
DRAFTS = 37  # tokens behind POSITION that are guessed, in this pass
TRUST = 38  # how many may be guessed at a time: more after success, fewer and at last none after failure

# STATUS values: with anything but RUN every kernel of a step leaves without writing
RUN = 0
STOP = 1
LIMIT_REACHED = 2
NAN = 3
WAIT = 4  # POSITION has reached ROOM

# FLAGS bits
FLAG_BIAS = 1  # add bias[slot] to the logits
FLAG_PENALTIES = 2  # read counts[slot] and apply the three penalties
FLAG_MASK = 4  # draw only what mask[slot] allows, once mask_stamp[slot] says that it is this position's

# Drafts: tokens behind a row's position that a pass verifies, each in a row of its own, while it draws the next one.
MAX_DRAFTS = 7
MAX_QUERIES = MAX_DRAFTS + 1  # rows of a request in one pass
MAX_NGRAM = 16  # tokens that may have to agree before what followed them is guessed
NGRAM = 8, 2  # those looked for, and those that will do

# samp fields
TEMPERATURE = 0  # 0: greedy
TOP_P = 1  # 1: off
MIN_P = 2  # 0: off
REPETITION_PENALTY = 3  # 1: off
PRESENCE_PENALTY = 4  # 0: off
FREQUENCY_PENALTY = 5  # 0: off

# a chunk
MAX_CHUNKS = 64
CHUNK_WIDTH = 4
CHUNK_SLOT = 0
CHUNK_FIRST = 1
CHUNK_COUNT = 2
CHUNK_START = 3

# an entry of the output ring
FOLLOWING_SHIFT = 20  # entries of the same pass behind it, 3 bits
DRAFTED_SHIFT = 23  # drafts that the pass verified, 3 bits
WANTED_SHIFT = 26  # drafts that the request could use in the next one, 3 bits
STEP_SHIFT = 29
GENERATION_SHIFT = 40
MAX_GENERATION = 2**23 - 1  # then they begin again at 1; an entry stays positive
STEP_MASK = 2**11 - 1  # of the step its lower bits, far more than a ring has entries
NO_TOKEN = 2**20 - 1  # the step's logits were not finite
LATE_TOKEN = 2**20 - 2  # the step drew none: its mask was late; a vocabulary has no more
EMPTY = 0  # no request has generation 0


def packed(ids: Sequence[int]) -> array:
    """Token ids as the device has them, int32: what is one already stays itself. Raises struct.error for more bits."""
    return ids if isinstance(ids, array) else array("i", pack(f"{len(ids)}i", *ids))  # twice as fast as array(ids)


def ring_entry(generation: int, step: int, token: int, following: int = 0, drafted: int = 0, wanted: int = 0) -> int:
    told = following << FOLLOWING_SHIFT | drafted << DRAFTED_SHIFT | wanted << WANTED_SHIFT
    return generation << GENERATION_SHIFT | (step & STEP_MASK) << STEP_SHIFT | told | token


class Entry(NamedTuple):
    """What an entry of the output ring tells; see the shifts above."""

    token: int
    following: int
    drafted: int
    wanted: int


def entry_of(value: int, generation: int, step: int) -> Entry | None:
    """The entry of that step, or None where the ring's place holds another one."""
    if value >> STEP_SHIFT != generation << GENERATION_SHIFT - STEP_SHIFT | step & STEP_MASK:
        return None
    following, drafted, wanted = value >> FOLLOWING_SHIFT, value >> DRAFTED_SHIFT, value >> WANTED_SHIFT
    return Entry(value & NO_TOKEN, following & MAX_DRAFTS, drafted & MAX_DRAFTS, wanted & MAX_DRAFTS)


def mask_stamp(generation: int, position: int) -> int:
    """Whose mask it is: of the request's pass that embeds the token at `position`."""
    return generation << GENERATION_SHIFT | position


def mask_words(vocab: int) -> int:
    """int32 words of a mask: the lowest bit of the first is token 0, and a bit that is set allows its token."""
    return -(-vocab // 32)


class Chunk(NamedTuple):
    """Rows [first, first + count) of a pass are the slot's tokens from position `start` on."""

    slot: int
    first: int
    count: int  # type: ignore[assignment]  # hides the method of tuple
    start: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.start + self.count
