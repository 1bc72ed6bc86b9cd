"""The tokens nearest to the largest logit, as a list: where it holds all that top-k or top-p can keep, ranks decide.

Nothing is sorted: a token's rank is how many of the list are nearer, found by comparing every pair.
"""

import triton
import triton.language as tl

from .mass import BINS, FARTHEST, share, weight

NEAREST = 512  # tokens that the list holds
RANK_SHIFT = 53  # a token's rank stands above the mass of those before it, which takes 51 bits
EIGHTH_BITS = 14  # of a distance, inside an eighth of a nat: mass.GRID is eight times 2**14
TOPS = 8  # parts of a block of the vocabulary, each of which leaves its largest logit

_NEAREST = tl.constexpr(NEAREST)
_FARTHEST, _BINS = tl.constexpr(FARTHEST), tl.constexpr(BINS)
_EIGHTHS, _EIGHTH_BITS = tl.constexpr((FARTHEST + 1) >> EIGHTH_BITS), tl.constexpr(EIGHTH_BITS)
_RANK_SHIFT, _RANK = tl.constexpr(RANK_SHIFT), tl.constexpr(1 << RANK_SHIFT)  # the latter is above any mass
_TURN = tl.constexpr(8)  # tokens that a program ranks at once


@triton.jit
def distance_bound(distances, wanted):
    """A distance within which at least `wanted` of the distances are: the end of the eighth of a nat that holds the
    wanted-th of them.

    At most the end of the last bin but one, should there be fewer: whoever reaches the last bin keeps everything.
    """
    before = tl.cumsum(tl.histogram(distances >> _EIGHTH_BITS, _EIGHTHS), axis=0) < wanted
    eighth = tl.sum(before.to(tl.int32), axis=0)
    return tl.minimum(((eighth + 1) << _EIGHTH_BITS) - 1, _FARTHEST - _BINS)


@triton.jit
def append(near_ptr, count_ptr, d, mask):
    """Add the distances d to the list, in no order; the count goes on beyond what the list holds."""
    ones = mask.to(tl.int32)
    count = tl.sum(ones, axis=0)
    if count > 0:
        place = tl.atomic_add(count_ptr, count.to(tl.int64), sem="relaxed").to(tl.int32) + tl.cumsum(ones, axis=0) - 1
        tl.store(near_ptr + place, d, mask=mask & (place < _NEAREST))


@triton.jit
def load_nearest(near_ptr, offs, count):
    """Distances and weights of the list at offs; FARTHEST and 0 where it has none."""
    d = tl.where(offs < count, tl.load(near_ptr + offs), _FARTHEST)
    return d, weight(d)


@triton.jit
def rank_nearest(near_ptr, ranks_ptr, d, w, count):
    """Leave with each token of the list how many of d, w [1, NEAREST] are nearer, and their mass.

    The programs share the tokens.
    """
    for first in range(tl.program_id(0) * _TURN, count, tl.num_programs(0) * _TURN):
        offs = first + tl.arange(0, _TURN)
        own = tl.load(near_ptr + offs[:, None])
        nearer = tl.sum(tl.where(d < own, w + _RANK, 0), axis=1)
        tl.store(ranks_ptr + offs, nearer, mask=offs < count)


@triton.jit
def ranked_threshold(d, w, ranks, count, total, use_k, top_k, use_p, top_p):
    """The largest distance that top-k and top-p keep, of a list that decides; total: the mass of all tokens."""
    within = (tl.arange(0, _NEAREST) < count) & ((ranks >> _RANK_SHIFT) < tl.where(use_k, top_k, _NEAREST))
    total = tl.where(use_k, tl.sum(tl.where(within, w, 0), axis=0), total)
    goal = tl.where(use_p, share(top_p, total), _RANK)
    threshold = tl.max(tl.where(within & ((ranks & (_RANK - 1)) < goal), d, 0), axis=0)
    return tl.where(use_p | (count >= top_k), threshold, _FARTHEST)  # of fewer than k, the others are in the last bin
