"""Loading of LoRA adapters: directories that the peft library has saved, and ids on the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ..arguments import shown
from ..blocks.adapter import Adapter, LowRank
from ..blocks.declarations import Linear
from ..blocks.spec import ModelSpec
from ..errors import CheckpointError, counted
from ..kernels.linear.adapters import RANK_STEP
from ..models.files import present
from ..tensors import aligned
from .hub import resolve_adapter
from .load import read_header
from .loader import Loader
from .peft import CONFIG, WEIGHTS, PeftConfig, module_names, read_peft_config
from .slices import runs
from .tensor_info import FLOATS, TensorInfo

_MODULE = re.compile(r"(.*?)layers\.(\d{1,6})\.(.+)", re.ASCII)
_PREFIXES = "", "model.", "language_model.", "model.language_model.", "language_model.model."
_PICKLED = "adapter_model.bin"


@dataclass(frozen=True)
class _Place:
    """The part of a linear that a module of the checkpoint is.

    Args:
        layer: number of the layer.
        linear: the linear.
        part: number of the part.
        start, rows: rows of the part.
    """

    layer: int
    linear: Linear
    part: int
    start: int
    rows: int

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row of the module, row of the linear, number of rows) of each run of rows; see slices.py."""
        return runs(self.linear.parts[self.part].groups, self.start, self.rows)


def adapter_rank(path: str | Path) -> int:
    """Return the largest rank that an adapter may have, from its configuration. Raises CheckpointError."""
    return aligned(read_peft_config(resolve_adapter(path)).largest_rank, RANK_STEP)


@torch.no_grad()
def load_adapter(name: str, path: str | Path, spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    """Load an adapter into host memory. All sizes are checked before memory is allocated.

    Args:
        name: the name of the adapter.
        path: a directory, or a Hugging Face id.
        dtype: dtype of the matrices.

    Raises:
        CheckpointError: the adapter is malformed, is of an unsupported kind, or does not fit the model.
    """
    directory = resolve_adapter(path)
    config = read_peft_config(directory, spec.num_layers)
    file = directory / WEIGHTS
    if not present(file):
        pickled = f"; {_PICKLED} is not read: save it with safe_serialization=True" * present(directory / _PICKLED)
        raise CheckpointError(f"{directory}: no {WEIGHTS}{pickled or '; the adapter is incomplete'}")
    infos = read_header(file)
    modules = _modules(infos, config, spec, file)
    scales = config.scales(list(modules))
    _check(infos, modules, scales, file)
    linears: dict[tuple[int, str], LowRank] = {}
    with ExitStack() as opened:
        loader = Loader(infos, {}, {}, 0, opened)
        for key, linear, places in _by_linear(modules):
            rank = aligned(max(scales[module][0] for module in places), RANK_STEP)
            matrices = LowRank(
                torch.zeros(len(linear.parts), rank, linear.k, dtype=dtype),
                torch.zeros(linear.n, rank, dtype=dtype),
            )
            for module, place in places.items():
                own, factor = scales[module]
                a, b = (loader.read(modules[module][1][matrix], 0, None).float() for matrix in "AB")
                filled = matrices.a[place.part], matrices.b[place.start : place.start + place.rows]
                filled[0][:own] = a
                for row, target, count in place.runs():
                    matrices.b[target : target + count, :own] = b[row : row + count] * (factor * linear.scale)
                if not all(tensor.isfinite().all() for tensor in filled):
                    raise CheckpointError(f"{file}: {module} has NaN or infinite numbers; download the file again")
            linears[key] = matrices
    return Adapter(name, str(path), linears)


def _modules(
    infos: dict[str, TensorInfo], config: PeftConfig, spec: ModelSpec, file: Path
) -> dict[str, tuple[_Place, dict[str, str]]]:
    """Return for each module of an adapter its place in the model, and its tensors by matrix ("A", "B")."""
    places = _places(spec)
    tensors_of: dict[str, tuple[_Place, dict[str, str]]] = {}
    by_place: dict[_Place, str] = {}
    prefixes = {*_PREFIXES, spec.prefix}
    for tensor, (module, matrix) in module_names(infos, str(file)).items():
        match = _MODULE.fullmatch(module)
        place = places.get((int(match[2]), match[3])) if match and match[1] in prefixes else None
        if place is None:
            raise CheckpointError(f"{file}: {shown(module)} {_why_not(spec, match)}")
        if any(block.reordered and place.linear in block.linears() for block in spec.layers[place.layer].blocks):
            fix = "give the model as a Hugging Face checkpoint"
            raise CheckpointError(f"{file}: {shown(module)} has another order in a GGUF file; {fix}")
        if by_place.setdefault(place, module) != module:
            raise CheckpointError(f"{file}: {shown(module)} and {shown(by_place[place])} are the same linear")
        tensors_of.setdefault(module, (place, {}))[1][matrix] = tensor
    if not tensors_of:
        raise CheckpointError(f"{file}: has no tensors")
    # The names of all linears of the model, as the adapter writes them.
    prefix = next(iter(tensors_of)).split("layers.")[0]
    every = {place: f"{prefix}layers.{layer}.{module}" for (layer, module), place in places.items()}
    names = [by_place.get(place, name) for place, name in every.items()]
    chosen = config.matching(names)
    for module in tensors_of:
        if module not in chosen:
            raise CheckpointError(f"{file}: has {shown(module)}, which target_modules of {CONFIG} does not select")
    for module in chosen:
        absent = [matrix for matrix in "AB" if matrix not in tensors_of.get(module, (None, {}))[1]]
        if absent:
            raise CheckpointError(f"{file}: lacks {module}.lora_{absent[0]}.weight, which target_modules selects")
    return tensors_of


def _why_not(spec: ModelSpec, match: re.Match[str] | None) -> str:
    """Return why adapters cannot change a module. match: the match of its name with _MODULE."""
    if match and int(match[2]) < spec.num_layers:
        experts = (linear for linear in spec.layers[int(match[2])].linears() if linear.experts)
        owners = {part.module.split(".")[0] for linear in experts for part in linear.parts}
        if match[3].split(".")[0] in owners:
            fix = "exclude it when training, or merge the adapter with peft's merge_and_unload"
            return f"belongs to a mixture of experts, which adapters cannot change; {fix}"
    return "is not a linear of the model that adapters can change"


def _places(spec: ModelSpec) -> dict[tuple[int, str], _Place]:
    """Return the part of a linear that each module of a layer is, without experts."""
    places = {}
    for index, layer in enumerate(spec.layers):
        for linear in (each for each in layer.linears() if not each.experts):
            start = 0
            for number, part in enumerate(linear.parts):
                places[index, part.module] = _Place(index, linear, number, start, part.rows)
                start += part.rows
    return places


def _check(
    infos: dict[str, TensorInfo], modules: dict[str, tuple[_Place, dict[str, str]]],
    scales: dict[str, tuple[int, float]], file: Path,
) -> None:  # fmt: skip
    """Check the dtypes and shapes of all tensors. Raises CheckpointError."""
    for module, (place, tensors) in modules.items():
        rank = scales[module][0]
        for matrix, shape in ("A", (rank, place.linear.k)), ("B", (place.rows, rank)):
            info = infos[tensors[matrix]]
            if info.dtype not in FLOATS:
                allowed = ", ".join(FLOATS)
                raise CheckpointError(f"{file}: {tensors[matrix]} has dtype {info.dtype}; expected one of {allowed}")
            if info.shape != shape:
                expected = f"expected {list(shape)} for rank {rank}"
                raise CheckpointError(f"{file}: {tensors[matrix]} has shape {list(info.shape)}; {expected}")


def _by_linear(
    modules: dict[str, tuple[_Place, dict[str, str]]],
) -> Iterator[tuple[tuple[int, str], Linear, dict[str, _Place]]]:
    """Yield each linear that the modules belong to, and its modules."""
    grouped: dict[tuple[int, str], dict[str, _Place]] = {}
    for module, (place, _) in modules.items():
        grouped.setdefault((place.layer, place.linear.name), {})[module] = place
    for key, places in grouped.items():
        yield key, next(iter(places.values())).linear, places


def described(adapter: Adapter) -> str:
    """Return a short description of an adapter for the user."""
    return f"{adapter.name}: rank {adapter.rank}, {counted(len(adapter.linears), 'linear')}, {adapter.source}"
