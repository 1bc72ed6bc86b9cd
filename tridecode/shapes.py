"""Launch shapes of the step's kernels: a plain table lookup, decided before capture."""

from dataclasses import dataclass

import torch

from .config import ModelConfig
from .kernels.attention import AttentionShape


@dataclass(frozen=True)
class MatvecShape:
    """A program covers block_n rows, block_k columns a turn."""

    block_n: int
    block_k: int
    num_warps: int


@dataclass(frozen=True)
class StepShapes:
    qkv: MatvecShape
    o_proj: MatvecShape
    gate_up: MatvecShape
    down: MatvecShape
    lm_head: MatvecShape
    attention: AttentionShape


def matvec_shape(N: int, K: int) -> MatvecShape:
    """Large matrices: two rows of 1,024 columns. Small ones: fewer, larger programs (boundaries cost by grid size)."""
    if N * K < 2**23:
        return MatvecShape(4, 512, 4)
    return MatvecShape(2, 1024, 4)


def attention_shape(head_dim: int, dtype: torch.dtype, capability: int) -> AttentionShape:
    """Wide heads and fp32 take half the tile; eight warps where four would spill: a tile and its successor are held."""
    wide = head_dim > 128 or (head_dim > 64 and capability < 90)
    block_t = 32 if head_dim > 128 or dtype == torch.float32 else 64
    return AttentionShape(block_t=block_t, splits=16, num_warps=8 if wide else 4)


def choose_shapes(config: ModelConfig, dtype: torch.dtype, capability: int) -> StepShapes:
    """Shapes for one model on one GPU; capability is 10 * major + minor (90 for an H100 or H200)."""
    hidden, inter = config.hidden_size, config.intermediate_size
    return StepShapes(
        qkv=matvec_shape(config.q_size + 2 * config.kv_size, hidden),
        o_proj=matvec_shape(hidden, config.q_size),
        gate_up=matvec_shape(2 * inter, hidden),
        down=matvec_shape(hidden, inter),
        lm_head=matvec_shape(config.vocab_size, hidden),
        attention=attention_shape(config.head_dim, dtype, capability),
    )
