"""Merging of an adapter into the weights of a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from ..blocks.adapter import Adapter
from ..blocks.spec import ModelSpec
from .quantization.write import copy_others, with_code
from .shards import Shards, read_tensors
from .slices import runs


def changes(adapter: Adapter, spec: ModelSpec) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return for each module that an adapter changes the matrices B and A of its weight in the checkpoint, in fp32."""
    matrices = {}
    for (index, name), (a, b) in adapter.linears.items():
        linear = next(each for each in spec.layers[index].linears() if each.name == name)
        start = 0
        for part, own in zip(linear.parts, a, strict=True):
            rows = torch.empty(part.rows, b.shape[1])
            for row, target, count in runs(part.groups, start, part.rows):
                # The loader multiplies the weight by the scale.
                rows[row : row + count] = b[target : target + count].float() / linear.scale
            if rows.any():
                matrices[spec.layer_prefix(index) + part.module] = rows, own.float()
            start += part.rows
    return matrices


def merge(
    source: Path,
    out: Path,
    spec: ModelSpec,
    files: dict[Path, list[str]],
    adapter: Adapter,
    progress: Callable[[int, int], None] | None = None,
    repo: str | None = None,
) -> None:
    """Write the checkpoint in `source` to the empty directory `out`, with an adapter merged into its weights.

    The sums are rounded once, to the dtype of the checkpoint.

    Args:
        files: each file of the checkpoint -> the names of its tensors to write.
        adapter: its matrices are in fp32.
        repo: the repository on the Hugging Face hub, if the checkpoint came from there.

    Raises:
        CheckpointError, OSError: the checkpoint cannot be written.
    """
    values, _ = (with_code(source, out, name, repo) for name in ("config.json", "tokenizer_config.json"))
    changed, shards = changes(adapter, spec), Shards(out)
    for name, tensor in read_tensors(files, progress):
        if change := changed.get(name.removesuffix(".weight")):
            b, a = change
            tensor = (tensor.float() + b @ a).to(tensor.dtype)
        shards.add({name: tensor})
    shards.close()
    copy_others(source, out)
    (out / "config.json").write_text(json.dumps(values, indent=2))
