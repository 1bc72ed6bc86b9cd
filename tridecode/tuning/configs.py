"""The decisions of tuning: a kernel and launch config for each linear of a model, a config for each attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.linear.project import Case, LinearKernel


class AttentionCase(NamedTuple):
    """What the launch config of attention depends on, with the rows of the pass and the device.

    dtype: of the weights, and of K and V unless fp8.
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
    """A kernel and how it is launched. source: "rule", "table" (of the package) or "user table"."""

    kernel: LinearKernel
    config: Any
    source: str = "rule"

    def partials(self, n: int) -> int:
        """Partial sums of squares that AddResidual leaves for n outputs."""
        return self.kernel.partials(n, self.config)


@dataclass(frozen=True)
class PassConfigs:
    """The choices for passes of up to so many rows."""

    linears: Mapping[Case, Choice]
    attention: Mapping[AttentionCase, AttentionConfig | AttentionRowsConfig]
