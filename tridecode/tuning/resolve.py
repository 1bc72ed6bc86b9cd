"""Choice of the kernels and launch configs of a model from tables and rules, by number of rows, when it is built."""

import logging
from collections.abc import Iterable, Sequence

import torch

from ..kernels.device import Device
from ..kernels.linear.project import Case
from .attention import attention_config, fp8_config
from .configs import AttentionCase, PassConfigs, is_head
from .invariance import ROWS as INVARIANT_ROWS
from .invariance import invariant_choices
from .rules import choose
from .tables import Table, package_tables, read_user_table, table_path

log = logging.getLogger("tridecode")


def choose_attention(case: AttentionCase, rows: int, device: Device, tables: Iterable[Table]):
    """Choose the launch config of attention: the entry of the first table that has one, else the rule's config.

    Attention to K and V in fp8 without an entry uses the config for bf16, adapted.
    """
    entry = next((config for table in tables if (config := table.attention_config(case, rows, device))), None)
    if entry is None and case.fp8:
        return fp8_config(choose_attention(case._replace(fp8=False), rows, device, tables), case, device)
    return entry or attention_config(case, rows, device)


def resolve_configs(
    cases: Iterable[Case],
    attention: Iterable[AttentionCase],
    dtype: torch.dtype,
    device: Device,
    batch_invariant: bool = False,
    user_table: bool = False,
    adapters: bool = False,
) -> dict[int, PassConfigs]:
    """Choose the kernels and launch configs of a model.

    Args:
        cases: the cases of its linears. They may repeat.
        attention: the cases of its attention layers. They may repeat.
        dtype: dtype of its weights that are not packed.
        batch_invariant: choose so that the sums of a row do not depend on the other rows of a pass.
        user_table: read the user's table first. A table that cannot be used is ignored with a warning.
        adapters: choose kernels whose epilogues add adapters, except for the LM head.

    Returns:
        A mapping from numbers of rows to the choices for passes of up to that many rows. The last choices also serve
        larger passes.
    """
    cases, attention = dict.fromkeys(cases), dict.fromkeys(attention)
    tables = package_tables(device)
    if batch_invariant:
        return _invariant(cases, attention, dtype, device, tables, adapters)
    if user_table:
        path = table_path(device.name)
        try:
            table = read_user_table(path, device)
            for rows in _sizes(cases, dtype):  # The lookups check the entries of the tables.
                for case in cases:
                    table.linear(case, rows, device)
                for layer in attention:
                    table.attention_config(layer, rows, device)
            tables = [table, *tables]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            log.warning("%s is ignored: %s; `tridecode tune` makes a new one", path, reason)
    return _by_rows(cases, attention, dtype, device, tables, adapters)


def _sizes(cases: Iterable[Case], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers of rows for which kernels are chosen."""
    if any(case.packed for case in cases):
        return 1, 8, 16, 32, 64
    return (1, 4, 8, 16, 32, 64) if dtype == torch.bfloat16 else (1, 2)


def _by_rows(
    cases, attention, dtype: torch.dtype, device: Device, tables: Sequence[Table], adapters: bool
) -> dict[int, PassConfigs]:
    """Choose for each number of rows."""
    by_rows = {}
    for rows in _sizes(cases, dtype):
        adapted = {case: adapters and not is_head(case) for case in cases}
        linears = {case: choose(case, rows, device, tables, adapters=adapted[case]) for case in cases}
        by_rows[rows] = PassConfigs(linears, {case: choose_attention(case, rows, device, tables) for case in attention})
    return by_rows


def _invariant(
    cases, attention, dtype: torch.dtype, device: Device, tables: Sequence[Table], adapters: bool
) -> dict[int, PassConfigs]:
    """Choose for each number of rows in batch-invariant mode."""
    rows_of_passes = INVARIANT_ROWS if dtype == torch.bfloat16 else (1,)
    by_case = {
        case: invariant_choices(case, rows_of_passes, device, tables, adapters and not is_head(case)) for case in cases
    }
    configs = {case: attention_config(case, 1, device, batch_invariant=True) for case in attention}
    return {
        rows: PassConfigs({case: choices[rows] for case, choices in by_case.items()}, configs)
        for rows in rows_of_passes
    }
