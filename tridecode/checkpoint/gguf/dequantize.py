"""Values of the blocks of GGUF files, in torch on any device. They equal those of the ggml project to the bit.

Each function gets blocks, uint8 [blocks, bytes of a block], and returns fp32 [blocks, columns of a block]. The order of
the floating-point operations is part of the format.
Source: `ggml-common.h` and `ggml-quants.c` of the ggml project, and `quants.py` of its Python package gguf.
"""

from collections.abc import Callable

import torch

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # Twice the values of e2m1.
Blocks = torch.Tensor


def half(blocks: Blocks, at: int) -> torch.Tensor:
    """Return the fp16 number at byte `at` of each block, fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(data: torch.Tensor, run: int) -> torch.Tensor:
    """Return the low, then the high four bits of each run of bytes: uint8 [blocks, 2 * bytes]."""
    parts = data.unflatten(1, (-1, 1, run))
    return torch.cat((parts & 15, parts >> 4), 2).flatten(1)


def fields(data: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Return the fields of each run of bytes, the lowest bits of all bytes first: uint8 [blocks, 8 / bits * bytes]."""
    parts, mask = data.unflatten(1, (-1, 1, run)), 2**bits - 1
    return torch.cat([parts >> place & mask for place in range(0, 8, bits)], 2).flatten(1)


def fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return bit i % 8 of byte i // 8 for each column i: uint8 [blocks, 8 * bytes]."""
    return torch.stack([data >> place & 1 for place in range(8)], 2).flatten(1)


def scale_codes(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 6-bit codes of scales and of minimums in the 12 bytes of Q4_K and Q5_K: uint8 [blocks, 8] each."""
    low, middle, high = data.split(4, 1)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1)
    return scales, torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1)


def codes_q5(blocks: Blocks, at: int) -> torch.Tensor:
    """Return the codes of Q5_0 and Q5_1, whose fifth bits begin at byte `at`: uint8 [blocks, 32]."""
    return nibbles(blocks[:, at + 4 :], 16) | fifth_bits(blocks[:, at : at + 4]) << 4


def codes_q5_k(blocks: Blocks) -> torch.Tensor:
    """Return the codes of Q5_K: uint8 [blocks, 256]."""
    return nibbles(blocks[:, 48:], 32) | fields(blocks[:, 16:48], 32, 1) << 4


def codes_q6_k(blocks: Blocks) -> torch.Tensor:
    """Return the codes of Q6_K, with 32 added: uint8 [blocks, 256]."""
    return nibbles(blocks[:, :128], 64) | fields(blocks[:, 128:192], 32, 2) << 4


def _grouped(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return scale * codes, with a scale for each group of columns: [blocks, groups, columns of a group]."""
    return scale[:, :, None] * codes.float().unflatten(1, (scale.shape[1], -1))


def _q4_0(blocks: Blocks) -> torch.Tensor:
    return half(blocks, 0) * (nibbles(blocks[:, 2:], 16).float() - 8)


def _q4_1(blocks: Blocks) -> torch.Tensor:
    return half(blocks, 0) * nibbles(blocks[:, 4:], 16).float() + half(blocks, 2)


def _q5_0(blocks: Blocks) -> torch.Tensor:
    return half(blocks, 0) * (codes_q5(blocks, 2).float() - 16)


def _q5_1(blocks: Blocks) -> torch.Tensor:
    return half(blocks, 0) * codes_q5(blocks, 4).float() + half(blocks, 2)


def _q8_0(blocks: Blocks) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def _q2_k(blocks: Blocks) -> torch.Tensor:
    scales, codes = blocks[:, :16], fields(blocks[:, 16:80], 32, 2)
    low = half(blocks, 82) * (scales >> 4).float()
    return (_grouped(half(blocks, 80) * (scales & 15).float(), codes) - low[:, :, None]).flatten(1)


def _q3_k(blocks: Blocks) -> torch.Tensor:
    low = nibbles(blocks[:, 96:104], 8)
    scales = (low | fields(blocks[:, 104:108], 4, 2) << 4).to(torch.int8) - 32
    high = fields(blocks[:, :32], 32, 1) ^ 1  # A bit that is not set subtracts 4.
    codes = fields(blocks[:, 32:96], 32, 2).to(torch.int8) - (high << 2).to(torch.int8)
    return _grouped(half(blocks, 108) * scales.float(), codes).flatten(1)


def _with_minimums(blocks: Blocks, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of Q4_K and Q5_K."""
    scales, minimums = scale_codes(blocks[:, 4:16])
    low = half(blocks, 2) * minimums.float()
    return (_grouped(half(blocks, 0) * scales.float(), codes) - low[:, :, None]).flatten(1)


def _q4_k(blocks: Blocks) -> torch.Tensor:
    return _with_minimums(blocks, nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Blocks) -> torch.Tensor:
    return _with_minimums(blocks, codes_q5_k(blocks))


def _q6_k(blocks: Blocks) -> torch.Tensor:
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _grouped(scales, codes_q6_k(blocks).to(torch.int8) - 32).flatten(1)


def _looked_up(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, fp32."""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def _iq4_nl(blocks: Blocks) -> torch.Tensor:
    return half(blocks, 0) * _looked_up(IQ4_VALUES, nibbles(blocks[:, 2:], 16))


def _iq4_xs(blocks: Blocks) -> torch.Tensor:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> place & 3 for place in (0, 2, 4, 6)], 2).flatten(1)
    scales = half(blocks, 0) * ((low | high << 4).to(torch.int8) - 32).float()
    return _grouped(scales, _looked_up(IQ4_VALUES, nibbles(blocks[:, 8:], 16))).flatten(1)


def _mxfp4(blocks: Blocks) -> torch.Tensor:
    exponent = blocks[:, :1].to(torch.int32)
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1).clamp(min=0) << 23)
    return bits.view(torch.float32) * _looked_up(E2M1_VALUES, nibbles(blocks[:, 1:], 16))


def _nvfp4(blocks: Blocks) -> torch.Tensor:
    codes = blocks[:, :4]
    exponent, mantissa = (codes >> 3 & 15).float(), (codes & 7).float()
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * torch.exp2(exponent - 7))
    scales = torch.where((codes == 0) | (codes == 127), 0.0, size * 0.5)
    return _grouped(scales, _looked_up(E2M1_VALUES, nibbles(blocks[:, 4:], 8))).flatten(1)


def _tq1_0(blocks: Blocks) -> torch.Tensor:
    """Return the values of digits of base 3. A byte holds five of them, or four at the end."""
    parts = []
    for data, digits in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)):
        powers = torch.tensor([3**i for i in range(digits)], dtype=torch.uint8, device=blocks.device)
        parts.append((data[:, None, :] * powers[None, :, None]).flatten(1))
    codes = (torch.cat(parts, 1).to(torch.int16) * 3 >> 8).float() - 1
    return half(blocks, 52) * codes


def _tq2_0(blocks: Blocks) -> torch.Tensor:
    return half(blocks, 64) * (fields(blocks[:, :64], 32, 2).float() - 1)


_VALUES: dict[str, Callable[[Blocks], torch.Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "NVFP4": _nvfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip
NAMES = tuple(_VALUES)


def dequantize(rows: torch.Tensor, name: str, nbytes: int) -> torch.Tensor:
    """Return the values of rows of blocks, fp32 [n, columns].

    Args:
        rows: uint8 [n, bytes of a row].
        name: the type of the blocks, one of NAMES.
        nbytes: bytes of a block.

    Raises:
        ValueError: a value is not finite.
    """
    values = _VALUES[name](rows.reshape(-1, nbytes)).view(len(rows), -1)
    if not values.isfinite().all():
        raise ValueError("holds values that are not finite")
    return values
