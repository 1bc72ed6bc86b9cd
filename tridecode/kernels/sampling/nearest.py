"""The list of the tokens nearest to the largest logit.

If it contains all tokens that top-k or top-p can keep, their ranks in it determine the threshold.

The list is not sorted. The rank of a token is the number of nearer tokens in the list. All pairs are compared to count
them.
"""

import triton
import triton.language as tl

from .mass import BINS, FARTHEST, share, weight

NEAREST = 512  # Maximum length of the list.
RANK_SHIFT = 53  # The rank of a token is stored above the mass of the nearer tokens, which takes 51 bits.
EIGHTH_BITS = 14  # Number of low bits of a distance within an eighth of a nat: mass.GRID is eight times 2**14.
TOPS = 8  # Number of parts of a block of the vocabulary. Each part stores its largest logit.

_NEAREST = tl.constexpr(NEAREST)
_FARTHEST, _BINS = tl.constexpr(FARTHEST), tl.constexpr(BINS)
_EIGHTHS, _EIGHTH_BITS = tl.constexpr((FARTHEST + 1) >> EIGHTH_BITS), tl.constexpr(EIGHTH_BITS)
# The unit of a rank is greater than any mass.
_RANK_SHIFT, _RANK = tl.constexpr(RANK_SHIFT), tl.constexpr(1 << RANK_SHIFT)
_RANKED = tl.constexpr(8)  # Number of tokens that a program ranks in one iteration.


@triton.jit
def distance_bound(distances, count):
    """Return a distance within which at least `count` of the distances are.

    It is the end of the eighth of a nat that contains the count-th distance. If fewer than `count` distances are
    nearer, it is the end of the second-to-last bin, because a threshold in the last bin keeps all tokens.
    """
    before = tl.cumsum(tl.histogram(distances >> _EIGHTH_BITS, _EIGHTHS), axis=0) < count
    eighth = tl.sum(before.to(tl.int32), axis=0)
    return tl.minimum(((eighth + 1) << _EIGHTH_BITS) - 1, _FARTHEST - _BINS)


@triton.jit
def append(near_ptr, count_ptr, d, mask):
    """Append the distances d to the list, in any order. The count also includes those that do not fit into the list."""
    ones = mask.to(tl.int32)
    count = tl.sum(ones, axis=0)
    if count > 0:
        place = tl.atomic_add(count_ptr, count.to(tl.int64), sem="relaxed").to(tl.int32) + tl.cumsum(ones, axis=0) - 1
        tl.store(near_ptr + place, d, mask=mask & (place < _NEAREST))


@triton.jit
def load_nearest(near_ptr, offs, count):
    """Load the distances and weights of the list at offs. Beyond its end, return FARTHEST and 0."""
    d = tl.where(offs < count, tl.load(near_ptr + offs), _FARTHEST)
    return d, weight(d)


@triton.jit
def rank_nearest(near_ptr, ranks_ptr, d, w, count):
    """Store for each token of the list how many of d, w [1, NEAREST] are nearer, and their mass.

    The programs of a row share the tokens.
    """
    for first in range(tl.program_id(0) * _RANKED, count, tl.num_programs(0) * _RANKED):
        offs = first + tl.arange(0, _RANKED)
        own = tl.load(near_ptr + offs[:, None])
        nearer = tl.sum(tl.where(d < own, w + _RANK, 0), axis=1)
        tl.store(ranks_ptr + offs, nearer, mask=offs < count)


@triton.jit
def ranked_threshold(d, w, ranks, count, total, use_k, top_k, use_p, top_p):
    """Return the largest distance from the best logit that top-k and top-p keep.

    The list must contain all candidates for it. total is the mass of all tokens of the vocabulary.
    """
    within = (tl.arange(0, _NEAREST) < count) & ((ranks >> _RANK_SHIFT) < tl.where(use_k, top_k, _NEAREST))
    total = tl.where(use_k, tl.sum(tl.where(within, w, 0), axis=0), total)
    goal = tl.where(use_p, share(top_p, total), _RANK)
    threshold = tl.max(tl.where(within & ((ranks & (_RANK - 1)) < goal), d, 0), axis=0)
    # With fewer than k tokens in the list, the other tokens are in the last bin.
    return tl.where(use_p | (count >= top_k), threshold, _FARTHEST)
