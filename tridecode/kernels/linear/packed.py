"""Packed tensors: quantized weights in the layout that the kernels read. Codes are packed into words of 32 bits.

A row is divided into tiles of 16 words: 128 columns of 4 bits, or 64 columns of 8 bits. Four lanes of a warp read a
tile, 16 bytes each. A lane has eight adjacent columns of each 32, as it has of 16-bit weights and of activations
(register_tiles.py). Columns 0 and 1 of these eight are at the same bits of the two halves of one word. The same is true
of columns 2 and 3, 4 and 5, and 6 and 7. Operations on both halves at once make the pairs of bf16 that tensor cores
read (bits.py). A half contains two e4m3 codes. The bits of the first are at their place in bf16; the second has the
remaining bits.

A tile of codes of 6 bits has 256 columns and 48 words: the low four bits as two tiles of codes of four bits, then 16
words with the high two bits. A lane has four of these words, each for eight columns of two successive 32.
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
        zero: zero points, [n, k / group] uint8. None: half the range of the codes, or 0 for e4m3 and for codes of four
            bits with minimums.
        order: [k] int64, for each column of the codes its column in the weight. None if the columns are in order.
        minimum: [n, k / max(group, 32)], or None.
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
        if self.codes.dtype == torch.uint8:
            value -= self.own_zero if self.zero is None else expand(self.zero, 1, self.group, n, k)
        value *= expand(self._factor(self.scale, 0), self.rows, self.group, n, k)
        if self.minimum is not None:
            value -= expand(self._factor(self.minimum, 1), 1, minimum_group(self.group), n, k)
        if self.order is None:
            return value
        placed = torch.empty_like(value)
        placed[:, self.order] = value
        return placed

    @property
    def own_zero(self) -> int:
        """The zero point of integers whose zero points are not stored."""
        return own_zero(self.bits, self.minimum is not None)

    def _factor(self, each: torch.Tensor, which: int) -> torch.Tensor:
        """Return scales or minimums in fp32."""
        if self.over is None:
            return each.float()
        over = self.over[:, :, which].float()
        group = minimum_group(self.group) if which else self.group
        return each.float() * over.repeat_interleave(self.over_group // group, 1)[:, : each.shape[1]]


def expand(blocks: torch.Tensor, rows: int, group: int, n: int, k: int) -> torch.Tensor:
    """Repeat each value for its block of `rows` x `group` elements. Return [n, k]."""
    return blocks.repeat_interleave(rows, 0)[:n].repeat_interleave(group, 1)[:, :k]


def minimum_group(group: int) -> int:
    """Return the number of columns that share a minimum."""
    return max(group, 32)


def own_zero(bits: int, minimums: bool) -> int:
    """Return the zero point of integers whose zero points are not stored."""
    return 0 if bits == 4 and minimums else 2 ** (bits - 1)


def _dimensions(bits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a tile of codes in the order of the columns, and the order of the dimensions in words.

    In words the order is row, tile, lane, word of the lane, planes (one dimension, or two for 2 bits), element of the
    pair.
    """
    if bits == 2:  # Two successive chunks of 32 columns, chunk of these, lane, pair, element.
        return (4, 2, 4, 4, 2), (0, 1, 4, 2, 3, 5, 6)
    planes = 16 // bits  # Chunk of 32 columns, lane, word of the lane's eight columns, pair, element.
    return (planes, 4, 4 // planes, planes, 2), (0, 1, 3, 2, 4, 5, 6)


@dataclass(frozen=True)
class Packed:
    """The description of a packed tensor: codes packed into words, scales and zero points of a weight.

    Args:
        number_type: "int4", "int6", "int8" or "e4m3".
        bits: bits of a code.
        k: columns of the weight.
        group: columns that share a scale; k for all.
        rows: rows that share a scale.
        zeros: each row of a group has a zero point.
        ordered: the columns are in an order that a tensor stores.
        scale_dtype: dtype of the scales, and of the minimums.
        minimums: each row of a group has a minimum, which is subtracted.
        over_group: columns whose scales and minimums, which are integers, share factors in fp16; 0 if there are none.
            A row has a multiple of four of these integers, because kernels load them as words of four bytes.
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

    def __post_init__(self) -> None:
        assert not self.over_group or self.k % (4 * minimum_group(self.group)) == 0

    @property
    def plain(self) -> bool:
        """Whether the scales are the only numbers besides the codes, zero points and the order."""
        return not self.minimums and not self.over_group

    @property
    def tile(self) -> int:
        """Number of columns in a tile."""
        return 256 if self.bits == 6 else WORDS * 32 // self.bits

    def shapes(self, n: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor of a weight of n rows."""
        groups = -(-self.k // self.group)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": ((n, -(-self.k // self.tile) * (self.tile * self.bits // 32)), torch.int32),
            "scale": ((-(-n // self.rows), groups), self.scale_dtype),
        }
        if self.zeros:
            shapes["zero"] = (n, groups), torch.bfloat16
        if self.ordered:
            shapes["order"] = (self.k,), torch.int32
        if self.minimums:
            shapes["minimum"] = (n, -(-self.k // minimum_group(self.group))), self.scale_dtype
        if self.over_group:
            shapes["over"] = (n, -(-self.k // self.over_group), 1 + self.minimums), torch.float16
        return shapes

    def pack(self, tensors: dict[str, torch.Tensor], start: int, weight: QuantizedWeight) -> None:
        """Pack a weight into the rows from `start` on of tensors that `shapes` describes.

        The groups of the weight may be larger, its codes may have fewer bits, and it may have no minimums. Its values
        do not change.
        """
        n = len(weight.codes)
        step = max(_SLICE // self.k, 1)
        up = own_zero(self.bits, self.minimums) - weight.own_zero if self.bits != weight.bits else 0
        for first in range(0, n, step):
            part = weight.codes[first : first + step]
            part = part + up if up else part
            tensors["weight"][start + first : start + first + len(part)] = self.pack_codes(part)
        groups = tensors["scale"].shape[1]
        scale = weight.scale
        if weight.rows > 1 or weight.group > self.group:
            scale = expand(scale, weight.rows, weight.group // self.group, n, groups)
        rows = tensors["scale"][start // self.rows : -(-(start + n) // self.rows)]
        rows.copy_((scale if weight.rows == 1 else scale[:: self.rows]).to(rows.dtype))
        if self.zeros:
            assert weight.zero is not None
            tensors["zero"][start : start + n] = self.offset(weight.zero)
        if self.minimums:
            minimum = tensors["minimum"][start : start + n]
            minimum.copy_(weight.minimum) if weight.minimum is not None else minimum.zero_()
        if self.over_group:
            assert weight.over is not None
            over = tensors["over"][start : start + n].zero_()
            over[:, :, : weight.over.shape[2]] = weight.over
        if self.ordered and weight.order is not None:
            tensors["order"].copy_(weight.order)

    def offset(self, zero: torch.Tensor) -> torch.Tensor:
        """Return the zero points as kernels subtract them: zero / 64 for codes of four bits, zero - 128 for eight."""
        return zero.float() / 64 if self.bits == 4 else zero.float() - 128

    def pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes [n, k] into words, int32 [n, words]."""
        n = len(codes)
        codes = codes.view(torch.uint8)
        if self.number_type == "int8":  # Two's complement.
            codes = codes ^ 128
        padded = torch.nn.functional.pad(codes, (0, -self.k % self.tile))
        if self.bits != 6:
            return self._words(padded, self.bits).view(n, -1)
        low, high = self._words(padded & 15, 4), self._words(padded >> 4, 2)
        return torch.cat((low.view(n, -1, 2 * WORDS), high.view(n, -1, WORDS)), 2).view(n, -1)

    def _words(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        """Pack codes of 2, 4 or 8 bits into words, int32 [n, tiles, lanes, words of a lane]."""
        shape, order = _dimensions(bits)
        parts = codes.view(len(codes), -1, *shape).permute(order)
        parts = parts.reshape(*parts.shape[:3], -1, 16 // bits, 2).to(torch.int32)
        words = torch.zeros(parts.shape[:-2], dtype=torch.int32, device=codes.device)
        for plane in range(16 // bits):
            for element in range(2):
                words |= self._placed(parts[..., plane, element], plane, bits) << (16 * element)
        return words

    def _placed(self, codes: torch.Tensor, plane: int, bits: int) -> torch.Tensor:
        """Move int32 codes to the bits of a half word that contain the codes of a plane."""
        if self.number_type != "e4m3":
            return codes << (bits * plane)
        if plane == 0:
            return (codes & 128) << 8 | (codes & 127) << 4
        return (codes & 112) << 8 | (codes & 128) << 4 | codes & 15

    def _taken(self, halves: torch.Tensor, plane: int, bits: int) -> torch.Tensor:
        """Return the codes of a plane from half words, uint8. The inverse of `_placed`."""
        if self.number_type != "e4m3":
            codes = halves >> (bits * plane) & (2**bits - 1)
        elif plane == 0:
            codes = halves >> 8 & 128 | halves >> 4 & 127
        else:
            codes = halves >> 8 & 112 | halves >> 4 & 128 | halves & 15
        return codes.to(torch.uint8)

    def unpack_codes(self, words: torch.Tensor) -> torch.Tensor:
        """Return the codes [n, k] that `pack_codes` packed into the words."""
        if self.bits == 6:
            tiles = words.view(len(words), -1, 3 * WORDS)
            low, high = self._codes(tiles[:, :, : 2 * WORDS], 4), self._codes(tiles[:, :, 2 * WORDS :], 2)
            return (low | high << 4)[:, : self.k]
        codes = self._codes(words, self.bits)[:, : self.k]
        if self.number_type == "e4m3":
            return codes.contiguous().view(torch.float8_e4m3fn)
        return codes ^ 128 if self.number_type == "int8" else codes

    def _codes(self, words: torch.Tensor, bits: int) -> torch.Tensor:
        """Return the codes [n, columns] that `_words` packed into the words."""
        shape, order = _dimensions(bits)
        places = [(plane, element) for plane in range(16 // bits) for element in range(2)]
        parts = torch.stack([self._taken(words >> (16 * element), plane, bits) for plane, element in places], -1)
        packed = [shape[dimension - 2] for dimension in order[2:]]
        inverse = [order.index(dimension) for dimension in range(len(order))]
        return parts.view(len(words), -1, *packed).permute(inverse).reshape(len(words), -1)

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
