"""The launch configs of a mixture of experts, and the ops that take them."""

from typing import NamedTuple

from ..op import Op
from .down_packed import DOWN_PACKED_ROWS
from .expert_packed import DOWN_PACKED_TILES, GATE_UP_PACKED_ROWS, GATE_UP_PACKED_TILES, PackedTilesConfig
from .expert_rows import DOWN_ROWS, GATE_UP_ROWS, RowsConfig
from .expert_tiles import DOWN_TILES, GATE_UP_TILES, TilesConfig
from .expert_weight import PackedRowsConfig
from .prompt_packed import DOWN_PACKED_PROMPT, GATE_UP_PACKED_PROMPT, PackedPromptConfig
from .route import RouteConfig

AnyRows = RowsConfig | PackedRowsConfig
AnyTiles = TilesConfig | PackedTilesConfig | PackedPromptConfig
# The ops of gate_up and down by the type of their launch config.
OPS: dict[type, tuple[Op, Op]] = {
    RowsConfig: (GATE_UP_ROWS, DOWN_ROWS),
    TilesConfig: (GATE_UP_TILES, DOWN_TILES),
    PackedRowsConfig: (GATE_UP_PACKED_ROWS, DOWN_PACKED_ROWS),
    PackedTilesConfig: (GATE_UP_PACKED_TILES, DOWN_PACKED_TILES),
    PackedPromptConfig: (GATE_UP_PACKED_PROMPT, DOWN_PACKED_PROMPT),
}


class ExpertsConfig(NamedTuple):
    """The launch configs of a pass.

    Args:
        route: of the router.
        tiles: of gate_up and down in tiles of pairs, of equal sizes.
        rows: of gate_up and down for each row separately. If it is not None, the pass uses them.
    """

    route: RouteConfig
    tiles: tuple[AnyTiles, AnyTiles]
    rows: tuple[AnyRows, AnyRows] | None = None
