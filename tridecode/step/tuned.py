"""Launch shapes that `tridecode tune` found on this machine: one JSON table a kind of GPU, in the user's cache."""

import json
import logging
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import platformdirs
import torch

from ..model.config import ModelConfig
from ..version import __version__

log = logging.getLogger("tridecode")

FORMAT = 2  # of the table; another one when the kernels read the fields of a shape differently
# Field of a shape -> the values that may be tried, and that a table may hold. Fields not named here are left alone.
VALUES = {
    "block_n": (1, 2, 4, 8),
    "num_warps": (1, 2, 4, 8, 16),
    "registers": range(0, 256, 8),
    "programs": range(2**16),
    "block_t": (32, 64, 128),
    "ahead": (1, 2),
    "splits": (4, 8, 16, 32, 64),
}


class TableError(ValueError):
    """A table that is not one of this version of tridecode for this GPU."""


def table_path(gpu: str) -> Path:
    """Where the table of GPUs called `gpu` is or would be."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    return Path(platformdirs.user_cache_dir("tridecode", appauthor=False)) / "shapes" / f"{name}.json"


def table_keys(config: ModelConfig, dtype: torch.dtype) -> dict[str, str]:
    """Field of StepShapes -> its key in a table: the matrix's rows and columns (of gate_up those of one half), or the
    heads, and the dtype."""
    hidden, inter, kind = config.hidden_size, config.intermediate_size, str(dtype).removeprefix("torch.")
    sizes = {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
        "gate_up": (inter, hidden),
        "down": (hidden, inter),
        "lm_head": (config.vocab_size, hidden),
    }
    heads = f"attention {config.num_heads}/{config.num_kv_heads}x{config.head_dim} {kind}"
    return {op: f"{op} {rows}x{columns} {kind}" for op, (rows, columns) in sizes.items()} | {"attention": heads}


def searched(shape) -> dict[str, int]:
    """The fields of a shape that tune searches."""
    return {name: value for name, value in asdict(shape).items() if name in VALUES}


def with_table(shapes, config: ModelConfig, dtype: torch.dtype, gpu: str):
    """`shapes` (a StepShapes) with what the user's table of this GPU has for the model. A table that cannot be used is
    left alone, with a warning in the log."""
    path = table_path(gpu)
    try:
        table = read_table(path, gpu)
        keys = table_keys(config, dtype)
        found = {op: changed(getattr(shapes, op), table[key], key) for op, key in keys.items() if key in table}
    except FileNotFoundError:
        return shapes
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s; `tridecode tune` makes a new one", path, " ".join(str(error).split())[:200])
        return shapes
    return replace(shapes, **found)


def changed(shape, entry, key: str):
    """`shape` with the fields of a table's entry. Raises TableError for anything that tune would not write."""
    known = {f.name for f in fields(shape)} & set(VALUES)
    if not isinstance(entry, dict) or set(entry) != known:
        raise TableError(f"expected {', '.join(sorted(known))} for {key!r}")
    for name, value in entry.items():
        if type(value) is not int or value not in (*VALUES[name], getattr(shape, name)):
            raise TableError(f"{name} of {key!r} must be one of {', '.join(map(str, VALUES[name]))}")
    return replace(shape, **entry)


def read_table(path: Path, gpu: str) -> dict[str, dict]:
    """Key -> fields of a shape, not checked yet. Raises OSError; ValueError for another format, version or GPU."""
    table = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict) or not isinstance(table.get("shapes"), dict):
        raise TableError("it is no table of launch shapes")
    for name, value in header(gpu).items():
        if table.get(name) != value:
            raise TableError(f"expected {name} {value!r}, got {str(table.get(name))[:40]!r}")
    return table["shapes"]


def merged_table(path: Path, gpu: str, found: dict[str, dict]) -> str:
    """The text of a table with `found`, and with what the present one has for other models if it can be used."""
    try:
        shapes = read_table(path, gpu)
    except (OSError, ValueError, RecursionError):
        shapes = {}
    return json.dumps({**header(gpu), "shapes": dict(sorted((shapes | found).items()))}, indent=1) + "\n"


def header(gpu: str) -> dict:
    return {"format": FORMAT, "tridecode": __version__, "gpu": gpu}
