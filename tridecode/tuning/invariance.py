"""The constraint of batch-invariant mode: the sums of a row are added in the same order for any number of rows."""

from collections.abc import Sequence
from dataclasses import replace

from ..kernels.device import Device
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_hopper import HopperConfig
from ..kernels.linear.matmul_wide import WideConfig
from ..kernels.linear.project import Case
from .configs import Choice
from .rules import choose
from .tables import Table, listed

ROWS = (16, 32, 64)  # Passes of up to each of these numbers of rows have a separate choice.


def order_of_sums(case: Case, choice: Choice) -> tuple:
    """Return a key for the order in which the sums of a row are added. Choices with equal keys compute equal bits."""
    config = choice.config
    if isinstance(config, HopperConfig):  # The order depends on the columns at which each program begins.
        tiles = -(-case.k // config.block_k)
        order = tuple(part * tiles // config.split * config.block_k for part in range(config.split))
        order += (config.block_k if case.packed else 0,)  # The columns whose sums are scaled together.
    elif isinstance(config, WideConfig):
        order = config.split, config.block_k, config.block_m >= 16
    elif isinstance(config, MatmulConfig):
        # Programs that share the rows may keep all activations. Then they subtract zero points from their sums.
        kept = config.x_ahead if config.programs else 0
        order = config.num_warps, config.block_m >= 16, config.programs, kept
    else:
        order = (config,)
    sums_of_squares = choice.partials(case.n) if case.epilogue == "residual" else 0
    return choice.kernel.name, order, sums_of_squares


def invariant_choices(
    case: Case, rows_of_passes: Sequence[int], device: Device, tables: Sequence[Table], adapters: bool = False
) -> dict[int, Choice]:
    """Choose a kernel and a config for each maximum number of rows, so that all choices have the same order of sums.

    The rules choose the kernel. The table's entry for the largest number of rows with this kernel decides the order.
    Other entries are used if they have the same order. With `adapters`, only kernels whose epilogues add adapters are
    chosen.
    """
    ruled = {rows: choose(case, rows, device, (), True, adapters) for rows in rows_of_passes}
    max_rows = max(rows_of_passes)
    entries = {}
    for rows in rows_of_passes:
        entry = listed(tables, case, rows, device, adapters)
        if entry and entry.kernel == ruled[max_rows].kernel:
            if isinstance(entry.config, WideConfig | MatmulConfig):  # Tiles of eight rows use another instruction.
                entry = replace(entry, config=replace(entry.config, block_m=16))
            entries[rows] = entry
    decisive = max(entries, default=max_rows)
    first = choice = entries.get(decisive, ruled[max_rows])
    order, chosen = order_of_sums(case, first), {}
    for rows in sorted(rows_of_passes, reverse=True):
        # The choice for more rows can also compute fewer rows.
        last = choice if rows < decisive else _with_split_of(first, ruled[rows])
        options = [option for option in (entries.get(rows), ruled[rows], last) if option]
        matching = next((option for option in options if order_of_sums(case, option) == order), None)
        if matching is None:
            return ruled
        chosen[rows] = choice = matching
    return chosen


def _with_split_of(first: Choice, choice: Choice) -> Choice:
    """Return a choice with the number of programs that share the columns in `first`."""
    split = {"split": first.config.split} if hasattr(first.config, "split") else {}
    return replace(choice, config=replace(choice.config, **split))
