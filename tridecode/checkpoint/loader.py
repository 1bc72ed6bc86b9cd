"""Loader: reads tensor slices from the files of a checkpoint into the weights on the device."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..kernels.linear.packed import QuantizedWeight
from ..models.files import open_regular, unreadable
from .gguf.tensors import GGUFInfo
from .quantization.quantize import quantize
from .quantization.scheme import Scheme
from .slices import Target, TensorSlice, stored
from .tensor_info import FLOATS

READ = FLOATS | {"I64": torch.int64, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
BLOCK = 128  # Number of rows that may share a scale. Quantized weights are read in multiples of this number.
_NUMBERS = 2**24  # Maximum elements of a weight that are quantized or dequantized at once.


class Loader:
    """Fills the tensors of the weights from files.

    Args:
        tensors: TensorInfo of each tensor of the checkpoint, by name.
        plan: the targets by name.
        places: target -> part -> tensor on the device.
        limit: maximum number of bytes that are copied to the device at once.
        opened: closes the files.
    """

    def __init__(self, tensors, plan: dict[str, Target], places: dict, limit: int, opened: ExitStack):
        self._tensors, self._plan, self.places, self._limit, self._opened = tensors, plan, places, limit, opened
        self._files: dict[Path, BufferedReader] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._ordered: set[str] = set()

    def place(self, name: str, tensor_slice: TensorSlice) -> Iterator[int]:
        """Load one slice. Yield the bytes of each read."""
        target, parts = self._plan[tensor_slice.target], self.places[tensor_slice.target]
        if (scheme := tensor_slice.scheme) is not None:
            yield from self._place_quantized(name, tensor_slice, scheme, target, parts)
        elif target.load_scheme is not None:
            n, k = tensor_slice.shape
            step = max(min(_NUMBERS, self._limit) // k, 1)
            for first in range(0, n, step):
                read = self.read(name, first, min(step, n - first))
                rows = scaled(read.to(parts["weight"].device), tensor_slice.scale)
                for row, place, count in tensor_slice.runs(first, len(rows)):
                    quantize_into(parts, target, place, rows[row - first : row - first + count])
                yield read.nbytes
        else:
            n, info, offset = tensor_slice.shape[0], self._tensors[name], tensor_slice.offset
            step = self._limit // (info.nbytes // n)
            if isinstance(info, GGUFInfo):
                offset, step = offset - info.change.offset, min(step, _NUMBERS // (math.prod(info.shape) // n))
            for row, start, count in tensor_slice.runs():
                for place in parts["weight"][start : start + count].split(max(step, 1)):
                    yield self._load_unquantized(name, row, place, tensor_slice.scale, offset)
                    row += len(place)

    def _place_quantized(
        self, name: str, tensor_slice: TensorSlice, scheme: Scheme, target: Target, parts: dict[str, torch.Tensor]
    ) -> Iterator[int]:
        """Load a slice that is quantized in the checkpoint.

        If the method stores several rows together, load blocks of rows.
        """
        n, k = tensor_slice.shape
        needed, module = stored(name, tensor_slice), name.removesuffix("weight")
        rowwise = next(iter(needed.values())).per
        step = max(_NUMBERS // k // BLOCK * BLOCK, BLOCK) if rowwise else n
        device = parts["weight"].device
        for first in range(0, n, step):
            count, tensors = min(step, n - first), {}
            for own, of in needed.items():
                begin, end = (first // of.per, -(-(first + count) // of.per)) if of.per else (0, None)
                if isinstance(self._tensors[own], GGUFInfo):
                    rows = self._rows(own, first, count)
                else:
                    rows = self.read(own, begin, None if end is None else end - begin)
                tensors[own.removeprefix(module)] = rows.to(device)
                yield rows.nbytes
            try:
                weight = scheme.read(tensors, count, k)
            except ValueError as error:
                raise CheckpointError(f"{self._tensors[own].file}: {module[:-1]}: {error}") from None
            if tensor_slice.scale != 1:
                weight = replace(weight, scale=weight.scale.float() * tensor_slice.scale)
            if target.packed is not None:
                self._check_order(name, tensor_slice, weight, parts)
            for row, start, length in tensor_slice.runs(first, count):
                run = weight.part(row - first, row - first + length)
                if target.packed is not None:
                    target.packed.pack(parts, start, run)
                    continue
                place = parts["weight"][start : start + length]
                for begin in range(0, length, inner := max(_NUMBERS // k // BLOCK * BLOCK, BLOCK)):
                    place[begin : begin + inner] = run.part(begin, min(begin + inner, length)).dequantize()

    def _check_order(self, name: str, tensor_slice: TensorSlice, weight: QuantizedWeight, parts: dict) -> None:
        """Check that all parts of a linear have the same order of columns. Raises CheckpointError."""
        if "order" not in parts:
            return
        order = weight.order
        if order is None:
            order = torch.arange(tensor_slice.shape[1], device=parts["order"].device)
        if tensor_slice.target not in self._ordered:
            parts["order"].copy_(order)
            self._ordered.add(tensor_slice.target)
        elif not torch.equal(parts["order"].long(), order):
            raise CheckpointError(
                f"{self._tensors[next(iter(stored(name, tensor_slice)))].file}: {name.removesuffix('.weight')} has "
                "columns in another order than the other parts of its linear, which is not supported; use device cpu, "
                "or a checkpoint without desc_act"
            )

    def _file(self, path: Path) -> BufferedReader:
        """Return the open file; open it at the first call."""
        if path not in self._files:
            self._files[path] = self._opened.enter_context(open_regular(path, gguf=True))
        return self._files[path]

    def read(self, name: str, first: int, count: int | None) -> torch.Tensor:
        """Read `count` rows of a tensor from row `first` on, onto the CPU; all rows if `count` is None."""
        info = self._tensors[name]
        if isinstance(info, GGUFInfo):
            return info.values(self._rows(name, first, info.shape[0] if count is None else count))
        shape = info.shape if count is None else (count, *info.shape[1:])
        rows = torch.empty(shape, dtype=READ[info.dtype])
        self._fill(name, first if count is not None else 0, rows)
        return rows

    def _rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Read the bytes of rows of a tensor of a GGUF file."""
        return self._tensors[name].rows(first, count, partial(self._fill, name))

    def _fill(self, name: str, first: int, part: torch.Tensor) -> None:
        """Fill `part`, a contiguous tensor on the CPU, with the rows that begin at row `first`."""
        info = self._tensors[name]
        opened = self._file(info.file)
        try:
            opened.seek(info.begin + first * (info.nbytes // max(info.shape[0] if info.shape else 1, 1)))
            count = opened.readinto(part.reshape(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise unreadable(info.file, error) from None
        if count < part.nbytes:
            raise CheckpointError(f"{info.file}: became shorter while it was read; load it again when it is complete")

    def _load_unquantized(self, name: str, first: int, place: torch.Tensor, scale: float, offset: float) -> int:
        """Fill `place` with the rows of an unquantized tensor from row `first` on. Return the bytes read."""
        info = self._tensors[name]
        if isinstance(info, GGUFInfo):
            rows = self._rows(name, first, len(place))
            place.copy_(scaled(info.values(rows.to(place.device)), scale, offset).view(place.shape))
            return rows.nbytes
        dtype = READ[info.dtype]
        plain = scale == 1 and offset == 0
        straight = place.dtype == dtype and place.device.type == "cpu" and plain and place.is_contiguous()
        part = place
        if not straight:
            if len(self._buffer) < place.numel() * dtype.itemsize:
                self._buffer = torch.empty(place.numel() * dtype.itemsize, dtype=torch.uint8)
            part = self._buffer[: place.numel() * dtype.itemsize].view(dtype).view(place.shape)
        self._fill(name, first, part)
        if not straight:
            # The device converts the dtype, so the bytes are copied as they are in the file.
            place.copy_(part if dtype == place.dtype and plain else scaled(part.to(place.device), scale, offset))
        return part.nbytes


def scaled(rows: torch.Tensor, scale: float, offset: float = 0.0) -> torch.Tensor:
    """Return (rows + offset) * scale, rounded once."""
    return rows if scale == 1 and offset == 0 else (rows.float() + offset) * scale


def quantize_into(parts: dict[str, torch.Tensor], target: Target, start: int, rows: torch.Tensor) -> None:
    """Quantize rows of a weight and write them to the target at row `start`, packed or dequantized."""
    assert target.load_scheme is not None
    step = max(_NUMBERS // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        weight = quantize(rows[first : first + step], target.load_scheme)
        if target.packed is not None:
            target.packed.pack(parts, start + first, weight)
        else:
            parts["weight"][start + first : start + first + len(weight.codes)] = weight.dequantize()
