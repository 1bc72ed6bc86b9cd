"""The layout of the state that a pass reads and writes at fixed device addresses.

meta is int32 [rows, META_WIDTH], the state of the request of each row. Only the host writes the fields below
DEVICE_FIELDS. While a request runs, only the device writes the other fields; the host sets all fields once when a
request begins. A kernel loads the status and the position of a row with one load.
samp is fp32 [rows, SAMP_WIDTH], the sampling parameters that are not integers.
Large state does not move while a request runs. Tokens, counts, bias, pages and the output ring belong to the slot that
the field SLOT names.
An entry of the output ring is an int64: generation << GENERATION_SHIFT | step << STEP_SHIFT | the counters of a pass
that verifies drafts | token.
chunks is int32 [MAX_CHUNKS, CHUNK_WIDTH], the table of the prompts that a prompt pass reads. Rows
[FIRST, FIRST + COUNT) of the pass are the slot's tokens from position START on. Chunks without rows are last.
"""

from array import array
from collections.abc import Sequence
from struct import pack
from typing import NamedTuple

META_WIDTH = 64
SAMP_WIDTH = 16
MAX_STOP_IDS = 16  # Maximum stop tokens of a request that the device compares with each token. It is a power of two.
MAX_LOGPROBS = 20  # Maximum number of the most likely tokens that a step reports.
RING = 64  # Number of entries of a slot's output ring, a power of two.

# Fields that the host writes.
FLAGS = 0  # Bits, see FLAG_* below.
N_KNOWN = 1  # tokens[0 .. N_KNOWN - 1] are known, such as the prompt. Sampling never overwrites them.
LIMIT = 2  # Number of tokens (prompt and output) at which the request ends. It is at most capacity + 1.
SLOT = 3
GENERATION = 9  # Number of the request among the requests of the slot. Entries of the output ring contain it.
ALLOCATED = 10  # Number of positions that have pages. At this position the row waits until the host adds pages.
RECORD = 11  # The record of the request, for layers with recurrent state.
SEED_LO = 4
SEED_HI = 5
N_STOP = 6
TOP_K = 7  # 0 disables top-k.
N_LOGPROBS = 8  # Number of the most likely tokens that each step reports.
STOP_IDS = 16  # The last stop id is at index 31.

# Fields that the device writes.
DEVICE_FIELDS = 32
POSITION = 32  # Index of the token that the next step embeds.
STEP = 33  # Number of completed steps of the request.
STATUS = 34
# Row of the prompt pass that this row continues, which the host sets. OWN_ROW means the row with the same number.
SOURCE = 35
OWN_ROW = -1
LATE = 36  # 1 if the row's mask was not complete when this pass needed it. Then the row repeats the pass.
DRAFTS = 37  # Number of draft tokens after POSITION in this pass.
DRAFT_LIMIT = 38  # Maximum number of drafts. It grows after right drafts and shrinks to 0 after wrong ones.

# Values of STATUS. Kernels write nothing for a row whose status is not RUN.
RUN = 0
STOP = 1
LIMIT_REACHED = 2
NAN = 3
WAIT = 4  # POSITION has reached ALLOCATED.

# Bits of FLAGS.
FLAG_BIAS = 1  # Add bias[slot] to the logits.
FLAG_PENALTIES = 2  # Read counts[slot], and apply the three penalties.
FLAG_MASK = 4  # Sample only tokens that mask[slot] allows, after mask_stamp[slot] has the stamp of this position.

# Drafts are tokens after the position of a row. A pass verifies each draft in its own row and also samples the next
# token.
MAX_DRAFTS = 7
MAX_QUERIES = MAX_DRAFTS + 1  # Maximum rows of a request in one pass.
MAX_NGRAM = 16  # Largest number of matching tokens that an engine may require for a draft.
NGRAM = 8, 2  # Default maximum and minimum number of matching tokens.

# Fields of samp.
TEMPERATURE = 0  # 0 means greedy.
TOP_P = 1  # 1 disables top-p.
MIN_P = 2  # 0 disables min-p.
REPETITION_PENALTY = 3  # 1 disables the penalty.
PRESENCE_PENALTY = 4  # 0 disables the penalty.
FREQUENCY_PENALTY = 5  # 0 disables the penalty.

# Fields of a chunk.
MAX_CHUNKS = 64
CHUNK_WIDTH = 4
CHUNK_SLOT = 0
CHUNK_FIRST = 1
CHUNK_COUNT = 2
CHUNK_START = 3

# The records of a chunk, int32 [MAX_CHUNKS, RECORDS_WIDTH]. One record contains the state before the chunk. The other
# one receives the state after it.
RECORDS_WIDTH = 2
RECORD_SOURCE = 0
RECORD_TARGET = 1

# The snapshots of a prompt pass, int32 [MAX_SNAPSHOTS, SNAPSHOT_WIDTH]. The pass writes the state of a slot after its
# first POSITION positions to a record. The position is a multiple of SCAN, within a chunk of the pass. 0 means no
# snapshot.
# Number of positions that a scan of recurrent state computes together. Their first position is a multiple of it.
SCAN = 64
MAX_SNAPSHOTS = 64
SNAPSHOT_WIDTH = 3
SNAPSHOT_SLOT = 0
SNAPSHOT_POSITION = 1
SNAPSHOT_RECORD = 2

# Fields of an entry of the output ring.
FOLLOWING_SHIFT = 20  # Number of later entries of the same pass, in 3 bits.
DRAFTED_SHIFT = 23  # Number of drafts that the pass verified, in 3 bits.
REQUESTED_SHIFT = 26  # Number of drafts that the request could use in the next pass, in 3 bits.
STEP_SHIFT = 29
GENERATION_SHIFT = 40
MAX_GENERATION = 2**23 - 1  # The generation after this one is 1 again. So an entry is always positive.
STEP_MASK = 2**11 - 1  # The lower bits of the step. They count far more steps than a ring has entries.
NO_TOKEN = 2**20 - 1  # The logits of the step were not finite.
LATE_TOKEN = 2**20 - 2  # The step sampled no token, because its mask was late. All token ids are below this value.
EMPTY = 0  # No request has generation 0.


def packed(ids: Sequence[int]) -> array:
    """Return token ids as int32, the type of the device. Raises struct.error for larger ids.

    An array is returned unchanged.
    """
    # This is twice as fast as array(ids).
    return ids if isinstance(ids, array) else array("i", pack(f"{len(ids)}i", *ids))


def ring_entry(
    generation: int, step: int, token: int, following: int = 0, drafted: int = 0, requested_drafts: int = 0
) -> int:
    """Return an entry of the output ring."""
    counters = following << FOLLOWING_SHIFT | drafted << DRAFTED_SHIFT | requested_drafts << REQUESTED_SHIFT
    return generation << GENERATION_SHIFT | (step & STEP_MASK) << STEP_SHIFT | counters | token


class Entry(NamedTuple):
    """Fields of an entry of the output ring.

    Attributes:
        token: the sampled token, NO_TOKEN or LATE_TOKEN.
        following: number of later entries of the same pass.
        drafted: number of drafts that the pass verified.
        requested_drafts: number of drafts that the request could use in the next pass.
    """

    token: int
    following: int
    drafted: int
    requested_drafts: int


def entry_of(value: int, generation: int, step: int) -> Entry | None:
    """Return the entry of this step, or None if the ring contains another entry at its place."""
    if value >> STEP_SHIFT != generation << GENERATION_SHIFT - STEP_SHIFT | step & STEP_MASK:
        return None
    following, drafted, requested_drafts = value >> FOLLOWING_SHIFT, value >> DRAFTED_SHIFT, value >> REQUESTED_SHIFT
    return Entry(value & NO_TOKEN, following & MAX_DRAFTS, drafted & MAX_DRAFTS, requested_drafts & MAX_DRAFTS)


def mask_stamp(generation: int, position: int) -> int:
    """Return the stamp of the mask for the pass of a request that embeds the token at `position`."""
    return generation << GENERATION_SHIFT | position


def mask_words(vocab: int) -> int:
    """Return the int32 words of a mask. The lowest bit of the first word is token 0; a set bit allows the token."""
    return -(-vocab // 32)


class Chunk(NamedTuple):
    """A chunk of a prompt: rows [first, first + count) of a pass are the slot's tokens from position `start` on."""

    slot: int
    first: int
    count: int  # type: ignore[assignment]  # hides the method of tuple
    start: int

    @property
    def rows(self) -> slice:
        """Rows of the pass."""
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count
