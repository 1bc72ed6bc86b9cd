"""Shards: reading and writing of all tensors in the safetensors files of a checkpoint."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointError, brief

SHARD = 4 * 2**30  # A file ends when it has this number of bytes. Its last tensor may exceed the limit.


def read_tensors(
    files: dict[Path, list[str]], progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of each tensor in `files`, one after the other.

    Args:
        files: each file -> the names of its tensors to read.
        progress: called as progress(done, total) after the caller has processed a tensor, with bytes of the files.
    """
    total, done = sum(file.stat().st_size for file in files), 0
    for file, names in files.items():
        with safe_open(file, framework="pt", device="cpu") as opened:
            stored_names = {*opened.keys()}
            for name in names:
                # The name in the file may lack the prefix.
                tensor = opened.get_tensor(name if name in stored_names else name.removeprefix("model."))
                yield name, tensor
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)


class Shards:
    """A writer of tensors to files in the directory `out`, with an index."""

    def __init__(self, out: Path):
        self._out, self._size, self._count = out, 0, 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: dict[str, str] = {}

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors to the same file. Raises CheckpointError, OSError."""
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._size += sum(tensor.nbytes for tensor in tensors.values())
        if self._size >= SHARD:
            self._flush()

    def close(self) -> None:
        """Write the last file and the index. Raises CheckpointError, OSError."""
        self._flush()
        index = self._out / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": self._places}, indent=1))
        for name in set(self._places.values()):  # safetensors makes files that only their owner can read.
            shutil.copymode(index, self._out / name)

    def _flush(self) -> None:
        if not self._tensors:
            return
        self._count += 1
        name = f"model-{self._count:05}.safetensors"
        try:
            save_file(self._tensors, self._out / name, metadata={"format": "pt"})
        except SafetensorError as error:  # For example, the disk is full.
            raise CheckpointError(f"{self._out / name}: cannot be written ({brief(error)})") from None
        self._places |= dict.fromkeys(self._tensors, name)
        self._tensors, self._size = {}, 0
