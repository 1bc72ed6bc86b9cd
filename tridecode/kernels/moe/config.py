"""The launch configs of a mixture of experts."""

from typing import NamedTuple

from .expert_rows import RowsConfig
from .expert_tiles import TilesConfig
from .route import RouteConfig


class ExpertsConfig(NamedTuple):
    """The launch configs of a pass.

    Args:
        route: of the router.
        tiles: of gate_up and down in tiles of pairs, of equal sizes.
        rows: of gate_up and down for each row separately. If it is not None, the pass uses them.
    """

    route: RouteConfig
    tiles: tuple[TilesConfig, TilesConfig]
    rows: tuple[RowsConfig, RowsConfig] | None = None
