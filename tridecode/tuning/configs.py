"""The result of tuning: a kernel and a launch config for each linear of a model, and a launch config for attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.linear.project import Case, LinearKernel

TILE_ROWS = 64  # Number of rows of a buffer that kernels read in tiles.
DRAFT_SPLITS = 32  # Number of programs that search the tokens of one row for drafts.
HOPPER = 90  # The compute capability of most measurements.
MAX_ROWS = 64  # Maximum rows of a pass for which tables and rules choose kernels. Passes with more rows use torch.
MIN_HEAD_OUTPUTS = 2**15  # A linear with a norm before it and at least this many outputs is treated as the LM head.
PROGRAMS = 4  # Number of programs without a GPU, because the interpreter runs one program after the other.


class AttentionCase(NamedTuple):
    """Properties of attention that its launch config depends on, with the rows of the pass and the device.

    dtype is the type of the weights, and of K and V unless they are fp8.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    fp8: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Choice:
    """A kernel and its launch config. source is "rule", "table" (of the package) or "user table"."""

    kernel: LinearKernel
    config: Any
    source: str = "rule"

    def partials(self, n: int) -> int:
        """Return the number of partial sums of squares that AddResidual writes for n outputs."""
        return self.kernel.partials(n, self.config)


@dataclass(frozen=True)
class PassConfigs:
    """The choices for passes of one model that have up to a certain number of rows."""

    linears: Mapping[Case, Choice]
    attention: Mapping[AttentionCase, AttentionConfig | AttentionRowsConfig]


def is_head(case: Case) -> bool:
    """Return whether the case is an LM head.

    No programs share the columns of an LM head, because the buffer of their sums has no room for it.
    """
    return case.epilogue == "normed" and case.n >= MIN_HEAD_OUTPUTS
