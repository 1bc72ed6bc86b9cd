"""Arguments that the ops of a mixture of experts share."""

from typing import NamedTuple

import torch


class ExpertSizes(NamedTuple):
    """Sizes of a mixture of experts.

    If the shared expert has the width of the experts, it is stored after them as one more expert, which every row uses.
    Otherwise it has linears of its own (blocks/shared_expert.py) and is not counted here.
    """

    experts: int  # number of experts, without the shared one
    top_k: int  # number of experts that the router chooses for a row
    intermediate: int  # width of an expert
    normalize: bool = True  # the weights of the chosen experts are divided by their sum
    shared: bool = False  # whether a shared expert is stored with the experts

    @property
    def stored(self) -> int:
        """Number of stored experts, with the shared one."""
        return self.experts + self.shared

    @property
    def used(self) -> int:
        """Number of stored experts that a row uses, with the shared one."""
        return self.top_k + self.shared


class Router(NamedTuple):
    """The weights of the router."""

    weight: torch.Tensor  # [experts, hidden]
    shared_gate: torch.Tensor | None = None  # [1, hidden], the gate of the shared expert


class Routes(NamedTuple):
    """The experts of each row, and the weights by which their products are multiplied.

    A row and one of its experts are a pair. Pair p is expert p % used of row p // used. A shared expert is the last of
    a row.
    """

    logits: torch.Tensor  # fp32 [rows, stored experts]
    # int32 [rows, used experts], numbers of experts. In a prompt pass, rows without a token have -1. In a decode pass,
    # rows that do not run keep old values, so the kernels read their status.
    ids: torch.Tensor
    weights: torch.Tensor  # fp32 [rows, used experts], the weights of the pairs
