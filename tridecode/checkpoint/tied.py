"""Tied embeddings: check whether the files of a checkpoint agree with tie_word_embeddings in config.json."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ..blocks.spec import ModelSpec
from .loader import Loader
from .tensor_info import FLOATS

if TYPE_CHECKING:
    from .tensor_info import TensorInfo

log = logging.getLogger("tridecode")
HEAD_TENSOR = "lm_head.weight"
_NUMBERS = 2**24  # Maximum elements of a tensor that are compared at once.


def follow_files(spec: ModelSpec, tensors: "dict[str, TensorInfo]") -> ModelSpec:
    """Return the specification with the embedding and the LM head of the files, as transformers chooses them.

    If config.json ties the two and the files have both, they are tied only if their values are equal. If the files have
    only the LM head, it is the embedding too.

    Args:
        tensors: the tensors of the files by name.
    """
    if spec.has_experts and tensors:
        spec = spec.stored_as(tensors)
    if not spec.tie_word_embeddings or HEAD_TENSOR not in tensors:
        return spec
    if spec.embed.tensor not in tensors:
        return replace(spec, embed_tensor=HEAD_TENSOR)
    pair = tensors[spec.embed.tensor], tensors[HEAD_TENSOR]
    changed = tuple(info.file.stat().st_mtime_ns for info in pair)
    return spec if _equal(*pair, getattr(torch, spec.dtype), changed) else replace(spec, tie_word_embeddings=False)


@lru_cache(maxsize=8)  # A process reads the configuration of a checkpoint several times.
def _equal(embed: "TensorInfo", head: "TensorInfo", dtype: torch.dtype, changed: tuple[int, ...]) -> bool:
    """Return whether two tensors have equal values. Log it if they differ.

    Args:
        dtype: the dtype in which tensors of different dtypes are compared.
        changed: when the files were last changed.
    """
    same = embed.shape == head.shape and embed.dtype in FLOATS and head.dtype in FLOATS
    if same:
        rows, columns = embed.shape
        step = max(_NUMBERS // columns, 1)
        parts = ((first, min(step, rows - first)) for first in range(0, rows, step))
        with ExitStack() as opened:
            loader = Loader({"embed": embed, "head": head}, {}, {}, 0, opened)
            pairs = ((loader.read("embed", *part), loader.read("head", *part)) for part in parts)
            if embed.dtype != head.dtype:
                pairs = ((one.to(dtype), other.to(dtype)) for one, other in pairs)
            same = all(torch.equal(one, other) for one, other in pairs)
    if not same:
        log.warning(
            "%s: %s differs from the embedding, so it is used, although config.json sets tie_word_embeddings to true; "
            "set it to false there", head.file, HEAD_TENSOR,
        )  # fmt: skip
    return same
