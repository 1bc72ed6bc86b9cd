"""Launch configs of mixtures of experts."""

from ..kernels.device import Device
from ..kernels.moe.arguments import Experts
from ..kernels.moe.config import ExpertsConfig
from ..kernels.moe.expert_rows import RowsConfig
from ..kernels.moe.expert_tiles import TilesConfig
from ..kernels.moe.route import RouteConfig

MAX_ROWS = 2  # Rows of a decode pass that are computed separately. They rarely share an expert.
PROGRAMS = 4  # Number of programs without a GPU, because the interpreter runs one program after the other.
ROUTE_ROWS = RouteConfig(16, 16, 128, 4)


def experts_config(
    sizes: Experts, rows: int, gpu: Device, batch_invariant: bool, prompt: bool = False
) -> ExpertsConfig:
    """Choose the launch configs for passes of `rows` rows.

    Args:
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass.
    """
    programs = gpu.multiprocessors or PROGRAMS
    tile = TilesConfig(16, 64, 128, 3, 4, 2 * programs)
    if prompt and not batch_invariant and rows * sizes.top_k > 32 * sizes.count:
        tile = TilesConfig(64, 128, 64, 3, 4, programs)
    configs = ExpertsConfig(ROUTE_ROWS, (tile, tile))
    if prompt or batch_invariant or rows > MAX_ROWS:
        return configs
    return configs._replace(route=RouteConfig(1, 4, 1024, 4), rows=(RowsConfig(2, 4), RowsConfig(1, 1)))
