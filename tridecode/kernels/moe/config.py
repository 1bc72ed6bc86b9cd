"""The launch configs of a mixture of experts, and the ops that take them."""

from typing import NamedTuple

from ..op import Op
from .down_packed import DOWN_PACKED_ROWS
from .expert_groups import DOWN_GROUPS, GATE_UP_GROUPS, ExpertGroupsConfig
from .expert_packed import DOWN_PACKED_TILES, GATE_UP_PACKED_ROWS, GATE_UP_PACKED_TILES, PackedTilesConfig
from .expert_ring import DOWN_RING, GATE_UP_RING, RingTilesConfig
from .expert_rows import DOWN_ROWS, GATE_UP_ROWS, RowsConfig
from .expert_tiles import DOWN_TILES, GATE_UP_TILES, TilesConfig
from .expert_weight import PackedRowsConfig
from .prompt_packed import DOWN_PACKED_PROMPT, GATE_UP_PACKED_PROMPT, PackedPromptConfig
from .route import RouteConfig

AnyRows = RowsConfig | PackedRowsConfig | ExpertGroupsConfig
AnyTiles = TilesConfig | PackedTilesConfig | RingTilesConfig | PackedPromptConfig


class ExpertOps(NamedTuple):
    """The ops of the two products of an expert. Both take launch configs of one type."""

    gate_up: Op
    down: Op


OPS: dict[type, ExpertOps] = {
    RowsConfig: ExpertOps(GATE_UP_ROWS, DOWN_ROWS),
    TilesConfig: ExpertOps(GATE_UP_TILES, DOWN_TILES),
    PackedRowsConfig: ExpertOps(GATE_UP_PACKED_ROWS, DOWN_PACKED_ROWS),
    ExpertGroupsConfig: ExpertOps(GATE_UP_GROUPS, DOWN_GROUPS),
    PackedTilesConfig: ExpertOps(GATE_UP_PACKED_TILES, DOWN_PACKED_TILES),
    RingTilesConfig: ExpertOps(GATE_UP_RING, DOWN_RING),
    PackedPromptConfig: ExpertOps(GATE_UP_PACKED_PROMPT, DOWN_PACKED_PROMPT),
}


class ExpertsConfig(NamedTuple):
    """The launch configs of the ops of a mixture of experts, for passes of one size.

    Args:
        route: launch config of `route`.
        tiles: launch configs of gate_up and of down in tiles of pairs. Both have the same maximum number of pairs of a
            tile (`tile`).
        rows: launch configs of gate_up and of down for each row separately, or None. If they exist, decode passes use
            them instead of `tiles`.
    """

    route: RouteConfig
    tiles: tuple[AnyTiles, AnyTiles]
    rows: tuple[AnyRows, AnyRows] | None = None
