"""Arguments that the attention ops share, as named tuples of tensors and sizes.

A launcher passes each tuple to its kernel as the pointers, strides and sizes that `kernel_arguments` lists. The kernel
groups them again as Cache, Rotary, Partials and Sizes, because Triton does not keep the field names of a tuple that is
a launch argument.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from .fp8_kv import is_fp8, scales

MAX_SPLITS = 64  # Maximum number of programs that share the K/V of one row.


class KVLayer(NamedTuple):
    """K and V of one layer.

    For fp8 K/V they are uint8 codes, and the scales follow the codes of each head (fp8_kv.py).
    """

    table: torch.Tensor  # int32 [slots, max_pages], the pages of each slot
    k: torch.Tensor  # Shape [pages, kv_heads, page, head_dim]. A view of the pool.
    v: torch.Tensor

    @property
    def page(self) -> int:
        """Positions of a page."""
        return self.k.shape[2]

    @property
    def fp8(self) -> bool:
        """Whether K and V are fp8 codes with scales."""
        return is_fp8(self.k)

    def kernel_arguments(self) -> tuple:
        """Return table_ptr, stride_table, and the fields of pages.Cache."""
        k_scale, v_scale = scales(self.k), scales(self.v)
        strides = *self.k.stride()[:2], *k_scale.stride()[:2]
        return self.table, self.table.stride(0), self.k, self.v, k_scale, v_scale, *strides


class Rope(NamedTuple):
    """Rotary embedding, and the RMS norm of queries and keys before it."""

    cos: torch.Tensor  # fp32 [capacity, rotary / 2]
    sin: torch.Tensor
    q_norm: torch.Tensor | None  # Weights [head_dim], or None for models without these norms.
    k_norm: torch.Tensor | None
    eps: float  # Epsilon of the norms.

    @property
    def rotary(self) -> int:
        """Columns of a head that are rotated."""
        return 2 * self.cos.shape[1]

    def kernel_arguments(self) -> tuple:
        """Return the fields of rope.Rotary. If a norm is None, `cos` replaces it as a placeholder."""
        norms = (self.cos if norm is None else norm for norm in (self.q_norm, self.k_norm))
        return self.cos, self.sin, *norms, self.eps


class Scratch(NamedTuple):
    """Buffers of the partial results of splits.

    The comments list the shapes in decode passes. For prompt passes, see scratch_sizes in prompt_attention.py.
    """

    partial: torch.Tensor  # fp32 [rows, query heads, max splits, head_dim], weighted sums of values.
    lse: torch.Tensor  # fp32 [rows, query heads, max splits, 2], maximum of the scores and sum of the weights.
    counter: torch.Tensor  # int32 [rows, K/V heads], number of finished splits. It is zero between launches.


class Heads(NamedTuple):
    """Sizes of an attention layer."""

    query: int  # number of query heads
    kv: int  # number of K/V heads
    dim: int  # Head dimension.
    scale: float  # Factor by which scores are multiplied before the softmax.
    window: int  # Number of positions that a query attends to, including its own. 0 means all.
    # Whether each query head is followed by a gate. The output of the head is multiplied by sigmoid(gate).
    gate: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.query // self.kv

    @property
    def query_columns(self) -> int:
        """Columns of a query head in qkv: the query, and the gate if there is one."""
        return self.dim * (1 + self.gate)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return queries, gates or None, keys and values of rows of qkv [..., columns], by head."""
        q, k, v = qkv.split((self.query * self.query_columns, self.kv * self.dim, self.kv * self.dim), -1)
        q, k, v = (part.unflatten(-1, (heads, -1)) for part, heads in ((q, self.query), (k, self.kv), (v, self.kv)))
        return (*q.split(self.dim, -1), k, v) if self.gate else (q, None, k, v)


class Sizes(NamedTuple):
    """Compile-time sizes and choices that the decode attention kernels and their functions share."""

    PAGE: tl.constexpr  # Number of positions of a page.
    KV_HEADS: tl.constexpr  # Number of K/V heads.
    GROUP: tl.constexpr  # Number of query heads that share a K/V head.
    COLUMNS: tl.constexpr  # Number of queries that are multiplied together, padded.
    D: tl.constexpr  # Head dimension.
    BLOCK_D: tl.constexpr  # D, padded
    BLOCK_G: tl.constexpr  # GROUP, padded
    BLOCK_T: tl.constexpr  # Number of positions of a tile.
    WARP_T: tl.constexpr  # Number of positions of a tile that each warp attends to, for fp8 K/V.
    TILES: tl.constexpr  # Number of tiles that are loaded before the wait.
    MAX_SPLITS: tl.constexpr  # Maximum number of splits for which `partial` has room.
    COMBINE: tl.constexpr  # Number of splits that are combined together.
    WINDOW: tl.constexpr  # Number of positions that a query attends to. 0 means all.
    QK_NORM: tl.constexpr  # Whether queries and keys are normalized.
    FP8: tl.constexpr  # Whether K and V are e4m3 codes with scales.
    CONVERTS: tl.constexpr  # Whether the GPU has an instruction that converts e4m3.
    INTERPRETED: tl.constexpr  # Whether Triton's interpreter runs the kernel. It multiplies in fp32.
    ROTARY: tl.constexpr  # Number of columns of a head that are rotated.
    GATE: tl.constexpr  # Whether each query head is followed by the gate of its output.
    Q_COLUMNS: tl.constexpr  # Number of columns of a query head in qkv.
