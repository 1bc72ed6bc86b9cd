"""Packed tensors: quantized weights in the layout that the kernels read. Codes are packed into words of 32 bits.

A row is divided into tiles of 16 words: 128 columns of 4 bits, or 64 columns of 8 bits. Four lanes of a warp read a
tile, 16 bytes each. A lane has eight adjacent columns of each 32, as it has of 16-bit weights and of activations
(register_tiles.py). Columns 0 and 1 of these eight are at the same bits of the two halves of one word. The same is true
of columns 2 and 3, 4 and 5, and 6 and 7. Operations on both halves at once make the pairs of bf16 that tensor cores
read (bits.py). A half contains
two e4m3 codes. The bits of the first are at their place in bf16; the second has the remaining bits.
"""

from dataclasses import dataclass, replace

import torch

WORDS = 16  # Number of words of a tile.
_SLICE = 2**23  # Number of codes that are packed together.


@dataclass(frozen=True)
class QuantizedWeight:
    """Rows of a quantized weight whose codes are not packed. The weight is (codes - zero) * scale - minimum.

    The last block of rows or columns that share a scale may be short.

    Args:
        codes: [n, k] uint8 or float8_e4m3fn.
        scale: [n / rows, k / group].
        rows, group: rows and columns that share a scale.
        bits: bits of a code.
        zero: zero points, [n, k / group] uint8. None: half the range of the codes, or 0 for e4m3 and with minimums.
        order: [k] int64, for each column of the codes its column in the weight. None if the columns are in order.
        minimum: [n, k / group], or None.
        over: [n, k / over_group, 2] fp16, by which scale and minimum are multiplied, or None. With it, scale and
            minimum are integers. The last axis is 1 without minimums.
        over_group: columns that share a factor in `over`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    rows: int
    group: int
    bits: int
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    over: torch.Tensor | None = None
    over_group: int = 0

    def part(self, first: int, end: int) -> "QuantizedWeight":
        """Return the rows from `first`, the first row of a block, to `end` - 1."""
        scale = self.scale[first // self.rows : -(-end // self.rows)]
        zero, minimum, over = (
            None if each is None else each[first:end] for each in (self.zero, self.minimum, self.over)
        )
        return replace(self, codes=self.codes[first:end], scale=scale, zero=zero, minimum=minimum, over=over)

    def dequantize(self) -> torch.Tensor:
        """Return the weight in fp32, [n, k]."""
        n, k = self.codes.shape
        value = self.codes.float()
        if self.codes.dtype == torch.uint8 and self.minimum is None:
            value -= 2 ** (self.bits - 1) if self.zero is None else expand(self.zero, 1, self.group, n, k)
        value *= expand(self._factor(self.scale, 0), self.rows, self.group, n, k)
        if self.minimum is not None:
            value -= expand(self._factor(self.minimum, 1), 1, self.group, n, k)
        if self.order is None:
            return value
        placed = torch.empty_like(value)
        placed[:, self.order] = value
        return placed

    def _factor(self, each: torch.Tensor, which: int) -> torch.Tensor:
        """Return scales or minimums in fp32."""
        if self.over is None:
            return each.float()
        over = self.over[:, :, which].float()
        return each.float() * over.repeat_interleave(self.over_group // self.group, 1)[:, : each.shape[1]]


def expand(blocks: torch.Tensor, rows: int, group: int, n: int, k: int) -> torch.Tensor:
    """Repeat each value for its block of `rows` x `group` elements. Return [n, k]."""
    return blocks.repeat_interleave(rows, 0)[:n].repeat_interleave(group, 1)[:, :k]


@dataclass(frozen=True)
class Packed:
    """The description of a packed tensor: codes packed into words, scales and zero points of a weight.

    Args:
        number_type: "int4", "int8" or "e4m3".
        bits: bits of a code.
        k: columns of the weight.
        group: columns that share a scale; k for all.
        rows: rows that share a scale.
        zeros: each row of a group has a zero point.
        ordered: the columns are in an order that a tensor stores.
        scale_dtype: dtype of the scales, and of the minimums.
        minimums: each row of a group has a minimum, which is subtracted.
        over_group: columns whose scales and minimums, which are integers, share factors in fp16; 0 if there are none.
    """

    number_type: str
    bits: int
    k: int
    group: int
    rows: int = 1
    zeros: bool = False
    ordered: bool = False
    scale_dtype: torch.dtype = torch.float32
    minimums: bool = False
    over_group: int = 0

    @property
    def plain(self) -> bool:
        """Whether the scales are the only numbers besides the codes, zero points and the order."""
        return not self.minimums and not self.over_group

    @property
    def tile(self) -> int:
        """Number of columns in a tile."""
        return WORDS * 32 // self.bits

    def shapes(self, n: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor of a weight of n rows."""
        groups = -(-self.k // self.group)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((n, -(-self.k // self.tile) * WORDS), torch.int32),
            "scale": ((-(-n // self.rows), groups), self.scale_dtype),
        }
        if self.zeros:
            shapes["zero"] = (n, groups), torch.bfloat16
        if self.ordered:
            shapes["order"] = (self.k,), torch.int32
        if self.minimums:
            shapes["minimum"] = (n, groups), self.scale_dtype
        if self.over_group:
            shapes["over"] = (n, -(-self.k // self.over_group), 1 + self.minimums), torch.float16
        return shapes

    def pack(self, tensors: dict[str, torch.Tensor], start: int, weight: QuantizedWeight) -> None:
        """Pack a weight into the rows from `start` on of tensors that `shapes` describes."""
        n = len(weight.codes)
        step = max(_SLICE // self.k, 1)
        for first in range(0, n, step):
            part = weight.codes[first : first + step]
            tensors["weight"][start + first : start + first + len(part)] = self.pack_codes(part)
        groups = tensors["scale"].shape[1]
        scale = weight.scale
        if weight.rows > 1:
            scale = expand(scale, weight.rows, weight.group // self.group, n, groups)
        rows = tensors["scale"][start // self.rows : -(-(start + n) // self.rows)]
        rows.copy_((scale if weight.rows == 1 else scale[:: self.rows]).to(rows.dtype))
        if self.zeros:
            assert weight.zero is not None
            tensors["zero"][start : start + n] = self.offset(weight.zero)
        for name in ("minimum", "over"):
            if name in tensors:
                tensors[name][start : start + n] = getattr(weight, name)
        if self.ordered and weight.order is not None:
            tensors["order"].copy_(weight.order)

    def offset(self, zero: torch.Tensor) -> torch.Tensor:
        """Return the zero points as kernels subtract them: zero / 64 for codes of four bits, zero - 128 for eight."""
        return zero.float() / 64 if self.bits == 4 else zero.float() - 128

    def pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes [n, k] into words, int32 [n, words]."""
        n = len(codes)
        codes = codes.view(torch.uint8)
        if self.number_type == "int8" and not self.minimums:  # Two's complement.
            codes = codes ^ 128
        padded = torch.nn.functional.pad(codes, (0, -self.k % self.tile))
        # Dimensions: tile, chunk of 32 columns, lane, word of the lane's eight columns, place in a half word, element
        # of the pair.
        planes = 16 // self.bits
        shape = (n, -1, self.tile // 32, 4, 4 // planes, planes, 2)
        parts = padded.view(shape).permute(0, 1, 3, 2, 4, 5, 6).to(torch.int32)
        words = torch.zeros(parts.shape[:-2], dtype=torch.int32, device=codes.device)
        for plane in range(planes):
            for element in range(2):
                words |= self._placed(parts[..., plane, element], plane) << (16 * element)
        return words.reshape(n, -1)

    def _placed(self, codes: torch.Tensor, plane: int) -> torch.Tensor:
        """Move int32 codes to the bits of a half word that contain the codes of a plane."""
        if self.number_type != "e4m3":
            return codes << (self.bits * plane)
        if plane == 0:
            return (codes & 128) << 8 | (codes & 127) << 4
        return (codes & 112) << 8 | (codes & 128) << 4 | codes & 15

    def _taken(self, halves: torch.Tensor, plane: int) -> torch.Tensor:
        """Return the codes of a plane from half words, uint8. The inverse of `_placed`."""
        if self.number_type != "e4m3":
            codes = halves >> (self.bits * plane) & (2**self.bits - 1)
        elif plane == 0:
            codes = halves >> 8 & 128 | halves >> 4 & 127
        else:
            codes = halves >> 8 & 112 | halves >> 4 & 128 | halves & 15
        return codes.to(torch.uint8)

    def unpack_codes(self, words: torch.Tensor) -> torch.Tensor:
        """Return the codes [n, k] that `pack_codes` packed into the words."""
        n, planes = len(words), 16 // self.bits
        places = [(plane, element) for plane in range(planes) for element in range(2)]
        parts = torch.stack([self._taken(words >> (16 * element), plane) for plane, element in places], -1)
        shape = (n, -1, 4, self.tile // 32, 4 // planes, planes, 2)
        codes = parts.view(shape).permute(0, 1, 3, 2, 4, 5, 6).reshape(n, -1)[:, : self.k]
        if self.number_type == "e4m3":
            return codes.contiguous().view(torch.float8_e4m3fn)
        return codes ^ 128 if self.number_type == "int8" and not self.minimums else codes

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """Return the weight that `pack` packed into the tensors."""
        zero = None
        if self.zeros:
            zero = tensors["zero"].float()
            zero = (zero * 64 if self.bits == 4 else zero + 128).to(torch.uint8)
        order = tensors["order"].long() if self.ordered else None
        codes = self.unpack_codes(tensors["weight"])
        return QuantizedWeight(
            codes, tensors["scale"], self.rows, self.group, self.bits, zero, order, tensors.get("minimum"),
            tensors.get("over"), self.over_group,
        )  # fmt: skip
