"""Launch shapes that `tridecode tune` found on this machine: one JSON table a kind of GPU, in the user's cache."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import platformdirs
import torch

from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_hopper import HopperConfig
from ..kernels.linear.matmul_hopper_parts import COLUMNS_OF
from ..kernels.linear.matmul_ring import RingConfig
from ..kernels.linear.matmul_tiles import TilesConfig
from ..kernels.linear.matmul_wide import MAX_SPLIT, WideConfig
from ..kernels.linear.matvec import MatvecConfig
from ..models.config import ModelConfig
from ..version import __version__
from .shapes import MAX_SPLITS, StepShapes

log = logging.getLogger("tridecode")

FORMAT = 6  # of the table; another one when the kernels read the fields of a shape differently
# Form of a shape -> its fields that are searched -> the values that may be tried, and that a table may hold.
VALUES = {
    MatvecConfig: {
        "block_n": (1, 2, 4, 8),
        "num_warps": (1, 2, 4, 8, 16),
        "registers": range(0, 256, 8),
        "programs": range(2**16),
    },
    MatmulConfig: {
        "block_n": (16, 32, 64),
        "num_warps": (2, 4, 8, 16),
        "ahead": range(1, 33),
        "x_ahead": range(1, 65),
        "registers": range(0, 256, 8),
        "programs": range(2**16),
        "fetch": range(3),
    },
    TilesConfig: {
        "block_n": (16, 32, 64, 128),
        "block_k": (32, 64, 128, 256),
        "stages": range(2, 17),
        "num_warps": (4, 8),
        "block_m": (16, 32, 64),
    },
    WideConfig: {
        "block_n": (32, 64, 128, 256),
        "block_k": (32, 64, 128),
        "ahead": range(1, 33),
        "x_ahead": range(1, 9),
        "num_warps": (2, 4, 8),
        "split": range(1, MAX_SPLIT + 1),
        "registers": range(0, 256, 8),
    },
    HopperConfig: {
        "block_n": (64, 128),
        "block_k": (64, 128, 256),
        "stages": range(2, 17),
        "x_stages": range(2, 17),
        "split": range(1, MAX_SPLIT + 1),
        "num_warps": (4, 8),
        "programs": range(2**16),
        "lag": (0, 1),
        "copier": (0, 1),
        "registers": range(64, 256, 8),
    },
    RingConfig: {
        "num_warps": (2, 4, 8, 16),
        "tiles": range(1, 33),
        "stages": range(1, 17),
        "x_shared": (0, 1),
        "programs": range(2**16),
        "copier": (0, 1),
        "registers": range(0, 256, 8),
    },
    AttentionConfig: {
        "block_t": (32, 64, 128),
        "splits": (4, 8, 16, 32, 64),
        "num_warps": (1, 2, 4, 8, 16),
        "registers": range(0, 256, 8),
        "ahead": (1, 2),
        "few": range(MAX_SPLITS + 1),
        "turns": range(1, 1025),
    },
    AttentionRowsConfig: {
        "block_t": (16, 32, 64),
        "splits": range(1, MAX_SPLITS + 1),
        "num_warps": (4, 8),
        "registers": range(0, 256, 8),
        "least": range(1, 65),
        "programs": range(1, 2**16),
        "stages": (1, 3, 5, 7),
    },
}
NAMES = {form: form.__name__.removesuffix("Shape").lower() for form in VALUES}
# Of each of these the members can take each other's place.
SEVERAL = ((MatmulConfig, TilesConfig, WideConfig, HopperConfig), (AttentionConfig, AttentionRowsConfig))


@dataclass(frozen=True)
class Packing:
    """What a table's key says of weights in fewer bits, and whether `matmul_ring` multiplies them by one row, and
    `matmul_hopper` by more than eight."""

    kind: str
    ring: bool
    hopper: bool = False


class TableError(ValueError):
    """A table that is not one of this version of tridecode for this GPU."""


def table_path(gpu: str) -> Path:
    """Where the table of GPUs called `gpu` is or would be."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    return Path(platformdirs.user_cache_dir("tridecode", appauthor=False)) / "shapes" / f"{name}.json"


def table_keys(
    config: ModelConfig, dtype: torch.dtype, rows: int = 1, packed: Mapping[str, Packing] = MappingProxyType({})
) -> dict[str, str]:
    """Field of StepShapes -> its key in a table: the matrix's rows and columns (of gate_up those of one half), or the
    heads, the dtype or how the weights are packed, and of several the rows of a pass."""
    hidden, inter, kind = config.hidden_size, config.intermediate_size, str(dtype).removeprefix("torch.")
    sizes = {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
        "gate_up": (inter, hidden),
        "down": (hidden, inter),
        "lm_head": (config.vocab_size, hidden),
    }
    of = "" if rows == 1 else f" for {rows} rows"
    heads = f"attention {config.num_heads}/{config.num_kv_heads}x{config.head_dim} {kind}{of}"
    kinds = dict.fromkeys(sizes, kind) | {op: packing.kind for op, packing in packed.items()}
    return {op: f"{op} {N}x{K} {kinds[op]}{of}" for op, (N, K) in sizes.items()} | {"attention": heads}


def searched(shape) -> dict:
    """The form of a shape, and its fields that tune searches: an entry of a table."""
    return {"form": NAMES[type(shape)]} | {name: int(getattr(shape, name)) for name in VALUES[type(shape)]}


def with_table(
    shapes: dict[int, StepShapes],
    config: ModelConfig,
    dtype: torch.dtype,
    gpu: str,
    packed: Mapping[str, Packing] = MappingProxyType({}),
) -> dict[int, StepShapes]:
    """`shapes` by rows with what the user's table of this GPU has for the model; packed: of the roles whose weights
    have fewer bits. A table that cannot be used is left alone, with a warning in the log."""
    path = table_path(gpu)
    try:
        table, found = read_table(path, gpu), {}
        for rows, step in shapes.items():
            keys = table_keys(config, dtype, rows, packed)
            known = {op: key for op, key in keys.items() if key in table}
            forms = {op: forms_of(getattr(step, op), packed.get(op), rows) for op in known}
            mine = {op: changed(getattr(step, op), table[key], key, forms[op]) for op, key in known.items()}
            found[rows] = replace(step, **mine)
    except FileNotFoundError:
        return shapes
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s; `tridecode tune` makes a new one", path, " ".join(str(error).split())[:200])
        return shapes
    return found


def forms_of(shape, packing: Packing | None, rows: int) -> tuple[type, ...]:
    """Those that can take the place of `shape`, itself among them."""
    if packing is not None and packing.ring and rows == 1:
        return MatmulConfig, RingConfig
    if packing is not None:
        return (MatmulConfig, HopperConfig) if packing.hopper and rows > 8 else (MatmulConfig,)
    return next((group for group in SEVERAL if type(shape) in group), (type(shape),))


def changed(shape, entry, key: str, own: tuple[type, ...]):
    """The shape that a table's entry says, of one of the forms `own`, in the place of `shape`. Raises TableError for
    anything that tune would not write."""
    forms = {NAMES[form]: form for form in own}
    form = forms.get(str(entry.get("form"))) if isinstance(entry, dict) else None
    if form is None or set(entry) != {"form", *VALUES[form]}:
        known = " or ".join(f"{name} with {', '.join(VALUES[form])}" for name, form in forms.items())
        raise TableError(f"expected form {known} for {key!r}")
    present = shape if type(shape) is form else form()
    for name, allowed in VALUES[form].items():
        if type(entry[name]) is not int or entry[name] not in (*allowed, getattr(present, name)):
            raise TableError(f"{name} of {key!r} must be one of {', '.join(map(str, allowed))}")
    alone = key.startswith("lm_head")  # too many outputs for the buffer of sums
    if form is HopperConfig:
        columns = next((columns for name, columns in COLUMNS_OF.items() if f" {name}/" in key), 0)
        if (entry["block_k"] % columns) if columns else entry["block_k"] > 128:
            raise TableError(f"block_k of {key!r} must be {columns or '64 or 128'}")
        alone |= key.startswith("gate_up") or entry["programs"] > 0
    if alone and entry.get("split", 1) != 1:
        raise TableError(f"split of {key!r} must be 1")
    return replace(present, **{name: entry[name] for name in VALUES[form]})


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
