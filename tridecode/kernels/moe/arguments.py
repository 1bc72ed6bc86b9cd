"""Arguments that the ops of a mixture of experts share."""

from typing import NamedTuple

import torch

TILE_FIELDS = 3  # Fields of an entry of the table of tiles: expert, first pair, number of pairs.


class Experts(NamedTuple):
    """Sizes of a mixture of experts.

    A shared expert is stored as one more expert after the others. Every row uses it.
    """

    experts: int  # number of experts, without a shared one
    top_k: int  # number of experts that the router chooses for a row
    intermediate: int  # width of an expert
    normalize: bool = True  # the weights of the chosen experts are divided by their sum
    shared: bool = False  # whether there is a shared expert

    @property
    def stored(self) -> int:
        """Number of experts, with a shared one."""
        return self.experts + self.shared

    @property
    def used(self) -> int:
        """Number of experts that a row uses, with a shared one."""
        return self.top_k + self.shared


class Router(NamedTuple):
    """The weights of the router."""

    experts: torch.Tensor  # [experts, hidden]
    shared: torch.Tensor | None = None  # [1, hidden], the gate of the shared expert


class Routes(NamedTuple):
    """The experts of each row. A shared expert is the last of a row."""

    logits: torch.Tensor  # fp32 [rows, stored experts]
    ids: torch.Tensor  # int32 [rows, used experts]; -1 in rows without a token
    weights: torch.Tensor  # fp32 [rows, used experts]


class PairTiles(NamedTuple):
    """The pairs of a row and an expert of the row, sorted by expert, and their division into tiles.

    Pair p is expert p % used of row p // used. A tile has pairs of one expert.
    """

    pairs: torch.Tensor  # int32 [rows, used experts]
    tiles: torch.Tensor  # int32 [rows, used experts, TILE_FIELDS]
    number: torch.Tensor  # int32 [rows, 1]: the first element is the number of tiles
