"""From the bytes of a checkpoint's files to the places of the weights, piece by piece."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch

from ..errors import CheckpointError
from ..kernels.linear.packed import Codes
from ..models.files import open_regular, unreadable
from .quantization.quantize import quantized
from .slices import Target, TensorSlice, stored

READ = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
BLOCK = 128  # rows that may share a scale: codes are read in multiples of these
_NUMBERS = 2**24  # of a weight, dequantized or quantized at once


class Loader:
    """Fills `places` (target -> part -> tensor) from the files of `tensors` (name -> TensorInfo)."""

    def __init__(self, tensors, plan: dict[str, Target], places: dict, limit: int, opened: ExitStack):
        self._tensors, self._plan, self.places, self._limit, self._opened = tensors, plan, places, limit, opened
        self._files: dict[Path, BinaryIO] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._ordered: set[str] = set()

    def place(self, name: str, piece: TensorSlice) -> Iterator[int]:
        """Put a piece where it belongs; yields the bytes that were read, again and again."""
        target, parts = self._plan[piece.target], self.places[piece.target]
        if piece.scheme is not None:
            yield from self._coded(name, piece, target, parts)
        elif target.made is not None:
            row = piece.shape[1]
            step = max(min(_NUMBERS, self._limit) // row, 1)
            for first in range(0, piece.shape[0], step):
                read = self._read(name, first, min(step, piece.shape[0] - first))
                read_rows = read.to(parts["weight"].device)
                quantize_into(parts, target, piece.start + first, scaled(read_rows, piece.scale))
                yield read.nbytes
        else:
            rows, read = parts["weight"][piece.start : piece.start + piece.shape[0]], 0
            for place in rows.split(max(self._limit // (self._tensors[name].nbytes // piece.shape[0]), 1)):
                yield self._straight(name, read, place, piece.scale)
                read += len(place)

    def _coded(self, name: str, piece: TensorSlice, target: Target, parts: dict) -> Iterator[int]:
        """In rows of blocks where the format has them together, else whole."""
        n, k = piece.shape
        needed, module = stored(name, piece), name.removesuffix("weight")
        rowwise = next(iter(needed.values())).per
        step = max(_NUMBERS // k // BLOCK * BLOCK, BLOCK) if rowwise else n
        device = parts["weight"].device
        for first in range(0, n, step):
            count, tensors = min(step, n - first), {}
            for own, of in needed.items():
                begin, end = (first // of.per, -(-(first + count) // of.per)) if of.per else (0, None)
                rows = self._read(own, begin, None if end is None else end - begin)
                tensors[own.removeprefix(module)] = rows.to(device)
                yield rows.nbytes
            try:
                codes = piece.scheme.read.codes(piece.scheme, tensors, count, k)
            except ValueError as error:
                raise CheckpointError(f"{self._tensors[own].file}: {module[:-1]}: {error}") from None
            if piece.scale != 1:
                codes = replace(codes, scale=codes.scale.float() * piece.scale)
            if target.packed is None:
                place = parts["weight"][piece.start + first : piece.start + first + count]
                for begin in range(0, count, inner := max(_NUMBERS // k // BLOCK * BLOCK, BLOCK)):
                    place[begin : begin + inner] = codes.part(begin, min(begin + inner, count)).dequantized()
            else:
                self._check_order(name, piece, codes, parts)
                target.packed.write(parts, piece.start + first, codes)

    def _check_order(self, name: str, piece: TensorSlice, codes: Codes, parts: dict) -> None:
        """One product has one order of its columns."""
        if "order" not in parts:
            return
        order = torch.arange(piece.shape[1], device=parts["order"].device) if codes.order is None else codes.order
        if piece.target not in self._ordered:
            parts["order"].copy_(order)
            self._ordered.add(piece.target)
        elif not torch.equal(parts["order"].long(), order):
            raise CheckpointError(
                f"{self._tensors[next(iter(stored(name, piece)))].file}: {name.removesuffix('.weight')} orders its "
                "columns otherwise than the projections beside it, which is not supported; use device cpu, or a "
                "checkpoint without desc_act"
            )

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = self._opened.enter_context(open_regular(path))
        return self._files[path]

    def _read(self, name: str, first: int, count: int | None) -> torch.Tensor:
        """Rows of a tensor of the file, on the CPU; count None: all of it."""
        info = self._tensors[name]
        shape = info.shape if count is None else (count, *info.shape[1:])
        found = torch.empty(shape, dtype=READ[info.dtype])
        self._fill(name, first if count is not None else 0, found)
        return found

    def _fill(self, name: str, first: int, part: torch.Tensor) -> None:
        """Fill `part`, contiguous on the CPU, with rows from `first` on."""
        info = self._tensors[name]
        opened = self._file(info.file)
        try:
            opened.seek(info.begin + first * (info.nbytes // max(info.shape[0] if info.shape else 1, 1)))
            got = opened.readinto(part.reshape(-1).view(torch.uint8).numpy())
        except OSError as error:
            raise unreadable(info.file, error) from None
        if got < part.nbytes:
            raise CheckpointError(f"{info.file}: became shorter while it was read; load it again once it is whole")

    def _straight(self, name: str, first: int, place: torch.Tensor, scale: float) -> int:
        """Fill `place`, rows of a tensor as it is, from row `first` on; returns the bytes read."""
        kind = READ[self._tensors[name].dtype]
        straight = place.dtype == kind and place.device.type == "cpu" and scale == 1
        part = place
        if not straight:
            if len(self._buffer) < place.numel() * kind.itemsize:
                self._buffer = torch.empty(place.numel() * kind.itemsize, dtype=torch.uint8)
            part = self._buffer[: place.numel() * kind.itemsize].view(kind).view(place.shape)
        self._fill(name, first, part)
        if not straight:
            # A dtype is changed on the device: the bytes cross the bus as they are in the file.
            place.copy_(part if kind == place.dtype and scale == 1 else scaled(part.to(place.device), scale))
        return part.nbytes


def scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Return rows * scale, rounded once."""
    return rows if scale == 1 else rows.float() * scale


def quantize_into(parts: dict[str, torch.Tensor], target: Target, start: int, rows: torch.Tensor) -> None:
    """Quantize rows of a weight, and put them from `start` on: packed, or as numbers again."""
    step = max(_NUMBERS // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        codes = quantized(rows[first : first + step], target.made)
        if target.packed is not None:
            target.packed.write(parts, start + first, codes)
        else:
            parts["weight"][start + first : start + first + len(codes.values)] = codes.dequantized()
