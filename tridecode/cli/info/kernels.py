"""The kernel and launch config of each linear of a model, for `info --kernels`, and the sources of the configs."""

from collections import Counter
from collections.abc import Sequence

import torch

from ...blocks.spec import ModelSpec
from ...checkpoint.load import empty_weights
from ...kernels.device import Device
from ...step.model import choose_configs, linear_cases
from ...tuning.report import KernelRow, kernel_rows
from ...tuning.tables import package_tables, table_path


def kernel_choices(spec: ModelSpec, dtype: torch.dtype, gpu: Device, batch_invariant: bool = False) -> list[KernelRow]:
    """Return the choices for a model on a GPU. No memory is allocated for the weights."""
    weights = empty_weights(spec, "meta", dtype, packs=True)
    configs = choose_configs(spec, weights, gpu, batch_invariant, user_table=True)
    return kernel_rows(linear_cases(spec, weights), configs)


def config_facts(rows: Sequence[KernelRow], gpu: Device, batch_invariant: bool = False) -> dict:
    """Return the sources of the launch configs of linears on a GPU.

    `choices`: the number of choices by source; a linear has one for each size of a pass. `tables`: names of the GPUs
    whose tables in the package serve this GPU. `user_table`: the path of the user's table if a choice is from it.
    `tune`: whether to suggest a search, because all choices are from rules.
    """
    counts = Counter(row.source for row in rows)
    return {
        "choices": {source: counts[source] for source in ("user table", "table", "rule")},
        "tables": [table.gpu for table in package_tables(gpu)],
        "user_table": str(table_path(gpu.name)) if counts["user table"] else None,
        "tune": set(counts) == {"rule"} and not batch_invariant,  # that mode reads no table of the user
    }


def config_words(facts: dict) -> str:
    tables, choices = " and ".join(facts["tables"]), {name: n for name, n in facts["choices"].items() if n}
    names = {"user table": f"your table {facts['user_table']}", "table": f"table of {tables}", "rule": "rules"}
    if set(choices) == {"rule"}:
        why = f"the table of {tables} has no entry for this model" if tables else "no table for this GPU"
        return f"rules ({why})" + "; `tridecode tune` searches better ones" * facts["tune"]
    if len(choices) == 1:
        return names[next(iter(choices))]
    shares = ", ".join(f"{names[source]} for {count}" for source, count in choices.items())
    return f"{shares} of {sum(choices.values())} choices"
