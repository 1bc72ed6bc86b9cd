"""Schemes of GGUF files: block types whose codes kernels read as packed tensors, without loss.

| types | codes | scale | minimum |
|---|---|---|---|
| Q4_0 | 4 bits | fp16 for 32 columns | |
| Q4_1 | 4 bits | fp16 for 32 columns | fp16 for 32 columns |
| Q4_K | 4 bits | 8 bits for 32 columns, times fp16 for 256 | as the scale |
| Q5_0 | 6 bits | fp16 for 32 columns | |
| Q5_1 | 6 bits | fp16 for 32 columns | fp16 for 32 columns |
| Q5_K | 6 bits | 8 bits for 32 columns, times fp16 for 256 | as the scale |
| Q6_K | 6 bits | 8 bits for 16 columns, times fp16 for 256 | |
| Q8_0, IQ4_NL | 8 bits | fp16 for 32 columns | |

Codes of 5 bits take 6, scales of 6 bits take 8, and the values of IQ4_NL are codes of 8 bits. If the parts of a linear
have different types, all parts have the codes with the most bits (at least 6), the smallest groups, and minimums if one
of them has minimums (`common`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from ...blocks.spec import ModelSpec
from ...errors import conflict, counted
from ...kernels.linear.packed import Packed, QuantizedWeight
from ...models.gguf import TYPES
from ..quantization.scheme import Quantization, Scheme, Stored
from ..tensor_info import FLOATS
from .dequantize import IQ4_VALUES, codes_q5, codes_q5_k, codes_q6_k, half, nibbles, scale_codes
from .tensors import gguf_tensors

HEAD_MODULE = "lm_head"
_OVER = 256  # Columns of a block of Q4_K, Q5_K and Q6_K, whose scales share a factor; see `QuantizedWeight.over`.


@dataclass(frozen=True)
class BlockScheme(Scheme):
    """The scheme of a block type.

    Args:
        type: name of the type.
        columns, nbytes: columns and bytes of a block.
        minimums: groups have minimums, which are subtracted.
    """

    type: str = ""
    columns: int = 32
    nbytes: int = 0
    minimums: bool = False

    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensor that stores a weight [n, k]: weight."""
        return {"weight": Stored((n, k), (self.type,))}

    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] in rows of blocks, uint8. Raises ValueError if a number is not finite."""
        blocks = tensors["weight"].reshape(-1, self.nbytes)
        codes, scale, minimum, over = _PARTS[self.type](blocks)
        for number in (scale, minimum, over):
            if number is not None and number.is_floating_point() and not number.isfinite().all():
                raise ValueError(f"a block of {self.type} holds a number that is not finite")
        rows = (None if each is None else each.view(n, -1) for each in (codes, scale, minimum))
        own_codes, own_scale, own_minimum = rows
        assert own_codes is not None and own_scale is not None
        factors = None if over is None else over.view(n, k // _OVER, -1)
        return QuantizedWeight(
            own_codes, own_scale, 1, self.group, self.bits, minimum=own_minimum, over=factors,
            over_group=self.over_group,
        )  # fmt: skip

    def packed(self, k: int, starts: list[int], scale_dtype: torch.dtype) -> Packed:
        """Return the packed tensor for a weight of k columns."""
        dtype = torch.int8 if self.over_group else torch.float16
        return Packed(
            self.number_type, self.bits, k, self.group, scale_dtype=dtype, minimums=self.minimums,
            over_group=self.over_group,
        )  # fmt: skip

    def common(self, others: "set[Scheme]", k: int) -> Packed | None:
        """Return the packed tensor for parts of several types, or None if some have factors of scales and some not."""
        own = self.packed(k, [0], torch.float16)
        for other in others - {self}:
            if not isinstance(other, BlockScheme) or other.over_group != self.over_group:
                return None
            bits = max(own.bits, other.bits, 6)
            own = replace(
                own, number_type=f"int{bits}", bits=bits, group=min(own.group, other.group),
                minimums=own.minimums or other.minimums,
            )  # fmt: skip
        return own

    @property
    def over_group(self) -> int:
        """Columns that share a factor of integer scales, or 0."""
        return _OVER if self.columns == _OVER else 0

    def describe(self) -> str:
        """Return the name of the type."""
        return self.type


@dataclass(frozen=True)
class BlockTypes(Quantization):
    """The schemes of the modules of a GGUF file. The type is a property of each tensor."""

    modules: tuple[tuple[str, BlockScheme], ...] = ()
    packs_tied_head = True

    @cached_property
    def _by_module(self) -> dict[str, BlockScheme]:
        return dict(self.modules)

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of the weight of a module. None: it is not quantized, or it is expanded."""
        return self._by_module.get(module)

    @property
    def schemes(self) -> list[Scheme]:
        """The distinct schemes."""
        return list(dict.fromkeys(self._by_module.values()))


# Parts of a QuantizedWeight, with a row for each block: codes, scale, minimum, over.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def _fp16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the number at byte `at` of each block, fp16 [blocks, 1]."""
    return half(blocks, at).half()


def _overs(blocks: torch.Tensor, *places: int) -> torch.Tensor:
    """Return the factors of integer scales and minimums at bytes `places`, fp16 [blocks, places]."""
    return torch.cat([_fp16(blocks, at) for at in places], 1)


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    values = torch.tensor([128 + value for value in IQ4_VALUES], dtype=torch.uint8, device=blocks.device)
    return values[nibbles(blocks[:, 2:], 16).long()], _fp16(blocks, 0), None, None


def _k_scales(blocks: torch.Tensor, codes: torch.Tensor) -> Parts:
    """Return the parts of Q4_K and Q5_K."""
    scales, minimums = scale_codes(blocks[:, 4:16])
    return codes, scales, minimums, _overs(blocks, 0, 2)


# Stored codes are not negative: codes of 8 bits have 128 added, and codes of 6 bits 32. Minimums are subtracted, but
# Q4_1 and Q5_1 store numbers that are added.
_PARTS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "Q4_0": lambda blocks: (nibbles(blocks[:, 2:], 16), _fp16(blocks, 0), None, None),
    "Q4_1": lambda blocks: (nibbles(blocks[:, 4:], 16), _fp16(blocks, 0), -_fp16(blocks, 2), None),
    "Q5_0": lambda blocks: (codes_q5(blocks, 2) + 16, _fp16(blocks, 0), None, None),
    "Q5_1": lambda blocks: (codes_q5(blocks, 4) + 32, _fp16(blocks, 0), -_fp16(blocks, 2), None),
    "Q8_0": lambda blocks: (blocks[:, 2:] ^ 128, _fp16(blocks, 0), None, None),
    "IQ4_NL": _iq4_nl,
    "Q4_K": lambda blocks: _k_scales(blocks, nibbles(blocks[:, 16:], 32)),
    "Q5_K": lambda blocks: _k_scales(blocks, codes_q5_k(blocks) + 32),
    "Q6_K": lambda blocks: (
        codes_q6_k(blocks), blocks[:, 192:208].contiguous().view(torch.int8), None, _overs(blocks, 208),
    ),
}  # fmt: skip
_BLOCK_TYPES = {block.name: block for block in TYPES.values()}
SCHEMES = {
    name: BlockScheme(
        bits, group=group, type=name, columns=_BLOCK_TYPES[name].columns, nbytes=_BLOCK_TYPES[name].nbytes,
        minimums=minimums,
    )
    for name, bits, group, minimums in (
        ("Q4_0", 4, 32, False), ("Q4_1", 4, 32, True), ("Q5_0", 6, 32, False), ("Q5_1", 6, 32, True),
        ("Q8_0", 8, 32, False), ("IQ4_NL", 8, 32, False), ("Q4_K", 4, 32, True), ("Q5_K", 6, 32, True),
        ("Q6_K", 6, 16, False),
    )
}  # fmt: skip


def with_file_type(spec: ModelSpec, name: str) -> ModelSpec:
    """Return a specification of a dense model with the types that llama.cpp gives the tensors of a file.

    Args:
        name: one of GGUF_TYPES: "q8_0", or "q4_k_m", which gives some layers more bits.

    Raises:
        ParameterError: the model has recurrent layers.

    Source: llama.cpp, src/llama-quant.cpp.
    """
    if spec.recurrent:
        raise conflict("gguf", ": the types of recurrent layers are not known; choose a dense preset")
    count, eighth = spec.num_layers, spec.num_layers // 8

    def scheme(k: int, more_bits: bool) -> BlockScheme:
        if name == "q8_0":
            return SCHEMES["Q8_0"]
        return SCHEMES[("Q5_0", "Q8_0")[more_bits] if k % _OVER else ("Q4_K", "Q6_K")[more_bits]]

    pairs = [(HEAD_MODULE, scheme(spec.lm_head.k, True))]
    for i, layer in enumerate(spec.layers):
        in_larger_layer = i < eighth or i >= 7 * count // 8 or (i - eighth) % 3 == 2
        for linear in layer.linears():
            for part in linear.parts:
                more_bits = in_larger_layer and part.module.endswith(("v_proj", "down_proj"))
                pairs.append((spec.layer_prefix(i) + part.module, scheme(linear.k, more_bits)))
    return replace(spec, checkpoint_quantization=BlockTypes(name, (), tuple(pairs)))


def with_block_types(path: Path, spec: ModelSpec) -> ModelSpec:
    """Return the specification with the schemes of the modules whose types kernels read, and a note about others.

    Raises:
        CheckpointError: the file is malformed.
    """
    infos = gguf_tensors(path)
    linears = [(spec.layer_prefix(i), linear) for i, layer in enumerate(spec.layers) for linear in layer.linears()]
    modules = [prefix + part.module for prefix, linear in [*linears, ("", spec.lm_head)] for part in linear.parts]
    if spec.tie_word_embeddings:
        modules.append(HEAD_MODULE)
        infos[f"{HEAD_MODULE}.weight"] = infos[spec.embed.tensor]
    types_of_modules = [(module, infos[f"{module}.weight"].dtype) for module in modules if f"{module}.weight" in infos]
    pairs = tuple((module, SCHEMES[name]) for module, name in types_of_modules if name in SCHEMES)
    others = [info for info in infos.values() if info.dtype not in (*SCHEMES, *FLOATS)]
    if others:
        names, numbers = ", ".join(sorted({info.dtype for info in others})), sum(prod(info.shape) for info in others)
        stored = sum(info.nbytes for info in others)
        note = (
            f"{counted(len(others), 'tensor')} of the types {names} are expanded to 16 bits: "
            f"{2 * numbers / 2**30:.2f} instead of {stored / 2**30:.2f} GiB"
        )
        spec = replace(spec, notes=(*spec.notes, note))
    return replace(spec, checkpoint_quantization=BlockTypes("gguf", (), pairs) if pairs else None)
