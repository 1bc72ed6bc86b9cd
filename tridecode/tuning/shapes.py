"""Launch configs of a pass: one for each linear by its role, and one for attention."""

from dataclasses import dataclass

from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_queries import QueriesConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_hopper import HopperConfig
from ..kernels.linear.matmul_ring import RingConfig
from ..kernels.linear.matmul_tiles import TilesConfig
from ..kernels.linear.matmul_wide import WideConfig
from ..kernels.linear.matvec import MatvecConfig

MAX_SPLITS = 64  # of the K/V of one row, in attention
TILE_ROWS = 64  # that a buffer has which tiles are read from
DRAFT_SPLITS = 32  # programs that look through the tokens of one row for drafts

Shape = MatvecConfig | MatmulConfig | TilesConfig | WideConfig | HopperConfig | RingConfig


@dataclass(frozen=True)
class StepShapes:
    qkv: Shape
    o_proj: Shape
    gate_up: Shape
    down: Shape
    lm_head: Shape
    attention: AttentionConfig | AttentionRowsConfig | QueriesConfig

