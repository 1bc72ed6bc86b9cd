"""The layout of quantized weights in memory for the kernels, in words of 32 bits.

A row is cut into tiles of 16 words: 128 columns of 4 bits, or 64 of 8. Four lanes of a warp read a tile, 16 bytes each.
A lane has eight neighbors of each 32 columns, as it has of 16-bit weights and of activations (register_tiles.py).
Columns 0 and 1 of the eight are in the two halves of one word at equal places, so are 2 and 3, and so on: operations on
both at once make the pairs of bf16 that tensor cores read (bits.py). A half has two e4m3. The bits of the first are
where bf16 has them; the second has the other bits.
"""

from dataclasses import dataclass, replace

import torch

WORDS = 16  # words of a tile
_SLICE = 2**23  # values that are packed at once


@dataclass(frozen=True)
class Codes:
    """Rows of a quantized weight matrix: (value - zero) * scale.

    values: [n, k] uint8, or float8_e4m3fn. scale: [n / rows, k / group]. zero: [n, k / group] uint8; None: half the
    range of the values, or 0 of e4m3. order: [k] int64, the weight's column of each column of values; None if they are
    in order. The last block of rows or columns may be short.
    """

    values: torch.Tensor
    scale: torch.Tensor
    rows: int
    group: int
    bits: int
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def part(self, first: int, end: int) -> "Codes":
        """Return rows `first`, which begins a block, to `end` - 1."""
        scale = self.scale[first // self.rows : -(-end // self.rows)]
        zero = None if self.zero is None else self.zero[first:end]
        return replace(self, values=self.values[first:end], scale=scale, zero=zero)

    def dequantized(self) -> torch.Tensor:
        """Return the matrix in fp32."""
        n, k = self.values.shape
        value = self.values.float()
        if self.values.dtype == torch.uint8:
            value -= 2 ** (self.bits - 1) if self.zero is None else spread(self.zero, 1, self.group, n, k)
        value *= spread(self.scale.float(), self.rows, self.group, n, k)
        if self.order is None:
            return value
        placed = torch.empty_like(value)
        placed[:, self.order] = value
        return placed


def spread(blocks: torch.Tensor, rows: int, group: int, n: int, k: int) -> torch.Tensor:
    """Repeat values of blocks of `rows` x `group`: [n, k]."""
    return blocks.repeat_interleave(rows, 0)[:n].repeat_interleave(group, 1)[:, :k]


@dataclass(frozen=True)
class Packed:
    """The packed form of a weight of `k` columns. group, rows: columns (k for all) and rows that share a scale."""

    name: str
    bits: int
    k: int
    group: int
    rows: int = 1
    zeros: bool = False
    ordered: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def tile(self) -> int:
        return WORDS * 32 // self.bits

    def shapes(self, n: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each of its tensors for n rows."""
        groups = -(-self.k // self.group)
        found = {
            "weight": ((n, -(-self.k // self.tile) * WORDS), torch.int32),
            "scale": ((-(-n // self.rows), groups), self.scale_dtype),
        }
        if self.zeros:
            found["zero"] = (n, groups), torch.bfloat16
        if self.ordered:
            found["order"] = (self.k,), torch.int32
        return found

    def nbytes(self, n: int) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.shapes(n).values())

    def write(self, tensors: dict[str, torch.Tensor], start: int, codes: Codes) -> None:
        """Pack codes into the rows from `start` on of tensors that `shapes` describes."""
        n = len(codes.values)
        step = max(_SLICE // self.k, 1)
        for first in range(0, n, step):
            part = codes.values[first : first + step]
            tensors["weight"][start + first : start + first + len(part)] = self.words(part)
        groups = tensors["scale"].shape[1]
        scale = spread(codes.scale, codes.rows, codes.group // self.group, n, groups) if codes.rows > 1 else codes.scale
        rows = tensors["scale"][start // self.rows : -(-(start + n) // self.rows)]
        rows.copy_((scale if codes.rows == 1 else scale[:: self.rows]).to(rows.dtype))
        if self.zeros:
            tensors["zero"][start : start + n] = self.offset(codes.zero)
        if self.ordered and codes.order is not None:
            tensors["order"].copy_(codes.order)

    def offset(self, zero: torch.Tensor) -> torch.Tensor:
        """Return what kernels subtract from an unpacked value: v / 64 of four bits, v - 128 of eight."""
        return zero.float() / 64 if self.bits == 4 else zero.float() - 128

    def words(self, values: torch.Tensor) -> torch.Tensor:
        """Pack values [n, k]: int32 [n, words]."""
        n = len(values)
        codes = values.view(torch.uint8)
        if self.name == "int8":
            codes = codes ^ 128
        padded = torch.nn.functional.pad(codes, (0, -self.k % self.tile))
        # tile, chunk of 32 columns, lane, word of the lane's eight, place in a half of it, pair's element
        planes = 16 // self.bits
        shape = (n, -1, self.tile // 32, 4, 4 // planes, planes, 2)
        parts = padded.view(shape).permute(0, 1, 3, 2, 4, 5, 6).to(torch.int32)
        words = torch.zeros(parts.shape[:-2], dtype=torch.int32, device=values.device)
        for plane in range(planes):
            for element in range(2):
                words |= self._placed(parts[..., plane, element], plane) << (16 * element)
        return words.reshape(n, -1)

    def _placed(self, codes: torch.Tensor, plane: int) -> torch.Tensor:
        """Move codes, int32, to the bits of a half of a word that hold the codes of a plane."""
        if self.name != "e4m3":
            return codes << (self.bits * plane)
        if plane == 0:
            return (codes & 128) << 8 | (codes & 127) << 4
        return (codes & 112) << 8 | (codes & 128) << 4 | codes & 15

    def _taken(self, halves: torch.Tensor, plane: int) -> torch.Tensor:
        """Return the inverse of `_placed`, uint8."""
        if self.name != "e4m3":
            codes = halves >> (self.bits * plane) & (2**self.bits - 1)
        elif plane == 0:
            codes = halves >> 8 & 128 | halves >> 4 & 127
        else:
            codes = halves >> 8 & 112 | halves >> 4 & 128 | halves & 15
        return codes.to(torch.uint8)

    def values(self, words: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `words`."""
        n, planes = len(words), 16 // self.bits
        places = [(plane, element) for plane in range(planes) for element in range(2)]
        parts = torch.stack([self._taken(words >> (16 * element), plane) for plane, element in places], -1)
        shape = (n, -1, 4, self.tile // 32, 4 // planes, planes, 2)
        codes = parts.view(shape).permute(0, 1, 3, 2, 4, 5, 6).reshape(n, -1)[:, : self.k]
        if self.name == "e4m3":
            return codes.contiguous().view(torch.float8_e4m3fn)
        return codes ^ 128 if self.name == "int8" else codes

    def codes(self, tensors: dict[str, torch.Tensor]) -> Codes:
        """Return the codes that `write` packed into the tensors."""
        zero = None
        if self.zeros:
            zero = tensors["zero"].float()
            zero = (zero * 64 if self.bits == 4 else zero + 128).to(torch.uint8)
        order = tensors["order"].long() if self.ordered else None
        values = self.values(tensors["weight"])
        return Codes(values, tensors["scale"], self.rows, self.group, self.bits, zero, order)
