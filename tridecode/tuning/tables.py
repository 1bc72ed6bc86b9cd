"""Tables of measured choices: JSON files of this package, one for each GPU, and the user's table.

`tridecode tune` writes the user's table. A table maps the key of a case, for example "gated 19456x2560 int4/128 rows
16", to a kernel and its launch config.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs
import torch

from ..kernels.attention.arguments import MAX_SPLITS
from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.device import Device
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_groups import GroupsConfig
from ..kernels.linear.matmul_hopper import COLUMNS_OF, HopperConfig
from ..kernels.linear.matmul_ring import RingConfig
from ..kernels.linear.matmul_tiles import TilesConfig
from ..kernels.linear.matmul_wide import WideConfig
from ..kernels.linear.matvec import MatvecConfig
from ..kernels.linear.project import Case
from ..kernels.linear.registry import LINEAR_KERNELS, kernel_named
from ..kernels.linear.split_sums import MAX_SPLIT
from ..version import __version__
from .configs import AttentionCase, Choice, PassConfigs, is_head

FORMAT = 8  # This number grows when a kernel interprets the fields of its config differently.
COUNTS, REGISTERS = range(2**16), range(0, 256, 8)
# Type of a config -> {searched field: values that a table may contain}.
VALUES = {
    MatvecConfig: {
        "block_n": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16), "registers": REGISTERS, "programs": COUNTS,
    },
    MatmulConfig: {
        "block_n": (16, 32, 64), "num_warps": (2, 4, 8, 16), "ahead": range(1, 33), "x_ahead": range(1, 65),
        "registers": REGISTERS, "programs": COUNTS, "fetch": range(3),
    },
    TilesConfig: {
        "block_n": (16, 32, 64, 128), "block_k": (32, 64, 128, 256), "stages": range(2, 17), "num_warps": (4, 8),
        "block_m": (16, 32, 64),
    },
    WideConfig: {
        "block_n": (32, 64, 128, 256), "block_k": (32, 64, 128), "ahead": range(1, 33), "x_ahead": range(1, 9),
        "num_warps": (2, 4, 8), "split": range(1, MAX_SPLIT + 1), "registers": REGISTERS,
    },
    HopperConfig: {
        "block_n": (64, 128), "block_k": (64, 128, 256), "stages": range(2, 17), "x_stages": range(2, 17),
        "split": range(1, MAX_SPLIT + 1), "num_warps": (4, 8), "programs": COUNTS, "lag": (0, 1), "producer": (0, 1),
        "registers": range(64, 256, 8),
    },
    RingConfig: {
        "num_warps": (2, 4, 8, 16), "tiles": range(1, 33), "stages": range(1, 17), "x_shared": (0, 1),
        "programs": COUNTS, "producer": (0, 1), "registers": REGISTERS,
    },
    GroupsConfig: {"num_warps": (1, 2, 4, 8, 16), "ahead": range(1, 33), "registers": REGISTERS},
    AttentionConfig: {
        "block_t": (32, 64, 128), "splits": (4, 8, 16, 32, 64), "num_warps": (1, 2, 4, 8, 16), "registers": REGISTERS,
        "ahead": (1, 2), "short_splits": range(MAX_SPLITS + 1), "short_iterations": range(1, 1025),
    },
    AttentionRowsConfig: {
        "block_t": (16, 32, 64, 128), "splits": range(1, MAX_SPLITS + 1), "num_warps": (4, 8), "registers": REGISTERS,
        "least": range(1, 65), "programs": range(1, 2**16), "stages": (1, 2, 3, 5, 7),
    },
}  # fmt: skip
ATTENTION = {"attention": AttentionConfig, "attention_rows": AttentionRowsConfig}
NAMES = {kernel.config: kernel.name for kernel in LINEAR_KERNELS} | {kind: name for name, kind in ATTENTION.items()}


class TableError(ValueError):
    """A table, or an entry of a table, cannot be used by this version of tridecode on this GPU."""


@dataclass(frozen=True)
class Table:
    """Mappings from keys to entries. An entry is checked when it is used.

    Attributes:
        source: as in Choice.
        gpu: name of the GPU on which the entries were measured. Empty if unknown.
    """

    linears: Mapping[str, Any]
    attention: Mapping[str, Any]
    source: str = "table"
    gpu: str = ""

    def linear(self, case: Case, rows: int, device: Device) -> Choice | None:
        """Return the table's choice for a linear, or None if it has no entry. Raises TableError."""
        key = linear_key(case, rows)
        if key in self.linears:
            kernels = [kernel for kernel in LINEAR_KERNELS if kernel.supports(case, rows, device)]
            config = _config(self.linears[key], key, {k.name: k.config for k in kernels if k.config in VALUES})
            _check_linear(config, case, key)
            return Choice(kernel_named(NAMES[type(config)]), config, self.source)
        if self.source == "table" and rows <= 2 and case.weight_type in (torch.float16, torch.float32):
            # The activations are fp32, so use the bf16 config of matvec without its limit on registers.
            entry = self.linear(case._replace(weight_type=torch.bfloat16), 1, device)
            if entry and isinstance(entry.config, MatvecConfig):
                return replace(entry, config=replace(entry.config, registers=0))
        return None

    def attention_config(self, case: AttentionCase, rows: int, device: Device):
        """Return the table's config of attention, or None if it has no entry. Raises TableError."""
        key = attention_key(case, rows)
        if key not in self.attention:
            return None
        config = _config(self.attention[key], key, ATTENTION)
        return replace(config, converts=device.capability >= 89) if case.fp8 else config


def linear_key(case: Case, rows: int) -> str:
    """Return the key of a linear. Passes of 2 to 8 rows share a key, since their tiles have eight rows."""
    return f"{case.epilogue} {case.n}x{case.k} {scheme_name(case)} rows {8 if 1 < rows < 8 else rows}"


def scheme_name(case: Case) -> str:
    """Return the name of the weight's scheme in tables, like "int4/128 zeros", or the dtype of a dense weight.

    "over" are factors of integer scales.
    """
    packed = case.packed
    if packed is None:
        return str(case.weight_type).removeprefix("torch.")
    group = "row" if packed.group == packed.k else packed.group
    words = {"zeros": packed.zeros, "ordered": packed.ordered, "minimums": packed.minimums, "over": packed.over_group}
    return " ".join((f"{packed.number_type}/{group}", *(word for word, has in words.items() if has)))


def attention_key(case: AttentionCase, rows: int) -> str:
    """Return the key of attention."""
    kind = "fp8" if case.fp8 else str(case.dtype).removeprefix("torch.")
    return f"attention {case.heads}/{case.kv_heads}x{case.head_dim} {kind} rows {rows}"


def entry_of(config: Any) -> dict:
    """Return the entry of a config: the name of its kernel, and the fields that are searched."""
    return {"kernel": NAMES[type(config)]} | {name: int(getattr(config, name)) for name in VALUES[type(config)]}


def _config(entry: Any, key: str, kinds: Mapping[str, type]) -> Any:
    """Check the fields of an entry and return its config. kinds: allowed kernels -> types of their configs."""
    kind = kinds.get(str(entry.get("kernel"))) if isinstance(entry, dict) else None
    if kind is None:
        raise TableError(f"kernel of {key!r} must be one of {', '.join(kinds)}")
    if set(entry) != {"kernel", *VALUES[kind]}:
        raise TableError(f"{key!r} must have the fields kernel, {', '.join(VALUES[kind])}")
    for name, allowed in VALUES[kind].items():
        if type(entry[name]) is not int or entry[name] not in allowed:
            values = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 16 else ", ".join(map(str, allowed))
            raise TableError(f"{name} of {key!r} must be one of {values}")
    return kind(**{name: entry[name] for name in VALUES[kind]})


def _check_linear(config: Any, case: Case, key: str) -> None:
    """Check the fields whose values depend on the case. Raises TableError."""
    unsplit = is_head(case)
    if isinstance(config, HopperConfig):
        columns = COLUMNS_OF[case.packed.number_type] if case.packed else 0
        if (config.block_k % columns) if columns else config.block_k > 128:
            raise TableError(f"block_k of {key!r} must be {columns or '64 or 128'}")
        unsplit |= case.epilogue == "gated" or config.programs > 0
    if isinstance(config, WideConfig) and config.block_n % (16 * config.num_warps):
        raise TableError(f"block_n of {key!r} must be a multiple of {16 * config.num_warps}")
    if unsplit and getattr(config, "split", 1) != 1:
        raise TableError(f"split of {key!r} must be 1")


def listed(tables: Iterable[Table], case: Case, rows: int, device: Device, adapters: bool = False) -> Choice | None:
    """Return the choice of the first table that has one, with adapters of a kernel whose epilogue adds them."""
    entries = (entry for table in tables if (entry := table.linear(case, rows, device)))
    return next((entry for entry in entries if not adapters or entry.kernel.adapts(entry.config)), None)


def package_tables(device: Device) -> list[Table]:
    """Return the tables for GPUs of this compute capability and number of multiprocessors.

    The table with the name of the device comes first. The others follow, the largest first.
    """

    def order(table: dict) -> tuple[int, int]:
        return len(table["gpu"]) if table["gpu"] in device.name else 0, len(table["linears"])

    like = device.capability, device.multiprocessors
    known = [table for table in _package() if (table["capability"], table["multiprocessors"]) == like]
    known.sort(key=order, reverse=True)
    return [Table(table["linears"], table["attention"], gpu=table["gpu"]) for table in known]


@cache
def _package() -> list[dict]:
    """Read all tables of the package."""
    paths = sorted(files(__package__).joinpath("tables").iterdir(), key=lambda path: path.name)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.name.endswith(".json")]


def table_path(gpu: str) -> Path:
    """Return the path of the user's table for GPUs of this name, which may not exist."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    try:
        directory = platformdirs.user_cache_dir("tridecode", appauthor=False)
    except RuntimeError:  # The user has no home directory, and so no table.
        directory = "/nonexistent/.cache/tridecode"
    return Path(directory) / "shapes" / f"{name}.json"


def read_user_table(path: Path, device: Device) -> Table:
    """Read the user's table. Raises OSError, and ValueError if it is not a table of this format, version and GPU."""
    table = json.loads(path.read_text(encoding="utf-8"))
    for name, value in header(device).items() if isinstance(table, dict) else ():
        if table.get(name) != value:
            raise TableError(f"expected {name} {value!r}, got {str(table.get(name))[:40]!r}")
    linears, attention = (table.get("linears"), table.get("attention")) if isinstance(table, dict) else (None, None)
    if not isinstance(linears, dict) or not isinstance(attention, dict):
        raise TableError("it is not a table of launch configs")
    return Table(linears, attention, "user table")


def header(device: Device) -> dict:
    """Return the header of a table: the format, the version, and the GPU for which it is valid."""
    sizes = {"capability": device.capability, "multiprocessors": device.multiprocessors}
    return {"format": FORMAT, "tridecode": __version__, "gpu": device.name} | sizes


def merged_text(path: Path, device: Device, rows: int, configs: PassConfigs) -> str:
    """Return the text of a table with these choices and the other entries of the current table, if it is usable."""
    try:
        current = read_user_table(path, device)
    except (OSError, ValueError, RecursionError):
        current = Table({}, {})
    linears = {linear_key(case, rows): entry_of(choice.config) for case, choice in configs.linears.items()}
    attention = {attention_key(case, rows): entry_of(config) for case, config in configs.attention.items()}
    return table_text(header(device), {**current.linears, **linears}, {**current.attention, **attention})


def table_text(head: dict, linears: dict[str, dict], attention: dict[str, dict]) -> str:
    """Return the JSON of a table, with one line for each entry."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, entries in ("linears", linears), ("attention", attention):
        keys = sorted(entries, key=lambda key: [int(p) if p.isdigit() else p for p in re.split(r"([0-9]+)", key)])
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entries[key])}" for key in keys)
        lines.append(f' "{name}": {{\n{rows}\n }}' if rows else f' "{name}": {{}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
