"""Arguments that the ops of gated delta net layers share, as named tuples of tensors and sizes.

A record is the state of one request in all layers. Its state after n positions consists, in each layer, of a matrix for
each V head and the inputs of the convolution at the positions before n. Kernels take it as empty at position 0, so
nothing resets a record.
"""

from typing import NamedTuple

import torch

RING = 16  # positions of a record's window and of the rows of drafts: a power of two, at least 2 * MAX_DRAFTS + 1


class DeltaHeads(NamedTuple):
    """Sizes of a gated delta net layer."""

    key: int  # number of heads of q and k
    value: int  # number of V heads, each with a matrix
    key_dim: int  # size of a head of q and k; a power of two
    value_dim: int  # size of a V head; a power of two
    eps: float  # epsilon of the norm of the output
    sigmoid: bool = False  # the gate of the output is sigmoid(z) instead of silu(z)
    tiled: bool = False  # V head h uses head h % key of q and k, instead of head h // (value // key)

    def of_values(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Repeat heads of q or k along `dim`, so that there is one for each V head."""
        if not self.tiled:
            return x.repeat_interleave(self.value // self.key, dim)
        return torch.cat([x] * (self.value // self.key), dim)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heads of q or k from those for each V head, [value heads, ...]."""
        return x[: self.key] if self.tiled else x[:: self.value // self.key]

    @property
    def key_size(self) -> int:
        """Elements of q, and of k, in one row."""
        return self.key * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of v, of z and of the output in one row."""
        return self.value * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size


class DeltaWeights(NamedTuple):
    """The weights of a layer besides its projections of q, k, v, z and of the output."""

    conv: torch.Tensor  # [channels, 1, width], in memory [width, channels]
    b: torch.Tensor  # [value heads, hidden], projection of the rates at which the state learns
    a: torch.Tensor  # [value heads, hidden], projection of the decays
    a_log: torch.Tensor  # fp32 [value heads]
    dt_bias: torch.Tensor  # fp32 [value heads]
    norm: torch.Tensor  # fp32 [value_dim], norm of the output of each head

    @property
    def width(self) -> int:
        """Positions that the convolution reads."""
        return self.conv.shape[2]


class RecordLayer(NamedTuple):
    """The records of one layer. The first dimension of each tensor is the number of the record."""

    state: torch.Tensor  # fp32 or fp16 [number of records, value heads, key_dim, value_dim]
    # [number of records, RING, channels]: the inputs of the convolution. The input of position p is at index p % RING.
    window: torch.Tensor
    covered: torch.Tensor  # int32 [number of records, value heads]: number of positions that a head's state contains


class DraftRows(NamedTuple):
    """The state updates of the drafts of a pass. The next pass replays the updates of the accepted drafts.

    The update of position p is at index p % RING. It computes state = exp(`g`) * state + `k` `u`^T.
    """

    k: torch.Tensor  # fp32 [slots, RING, key heads, key_dim]
    u: torch.Tensor  # fp32 [slots, RING, value heads, value_dim]
    g: torch.Tensor  # fp32 [slots, RING, value heads]
