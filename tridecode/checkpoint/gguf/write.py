"""Writing of a GGUF file as a Hugging Face checkpoint: config.json, generation_config.json and the tensors."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from ...models import gguf_config
from ...models.gguf import read_gguf
from ..config import parse_config, read_config
from ..load import read_infos
from ..loader import Loader
from ..shards import Shards
from ..slices import TensorSlice, runs, tensor_slices
from ..tensor_info import FLOATS, TensorInfo
from .tensors import GGUFInfo, gguf_tensors

_NUMBERS = 2**24  # Maximum elements that are dequantized at once.


def write_checkpoint(path: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write a GGUF file to the directory `out`, without its tokenizer. Quantized tensors are written in bf16.

    Everything that the converter of llama.cpp changed is undone.

    Args:
        progress: called as progress(done, total), with bytes of the file.

    Raises:
        CheckpointError, OSError: the file cannot be read, or the checkpoint cannot be written.
    """
    gguf = read_gguf(path)
    values, generation = gguf_config.config_values(gguf, as_stored=False), gguf_config.generation_values(gguf)
    slices = tensor_slices(parse_config(values, generation, path, path))
    infos = read_infos(path, read_config(path)[0], gguf_tensors(path, as_stored=False))
    total, done = sum(info.nbytes for info in infos.values()), 0
    shards = Shards(out)
    with ExitStack() as opened:
        loader = Loader(infos, {}, {}, 0, opened)
        sources = [(name, _sources(name, infos)) for name in slices]
        for name, stored in sorted(sources, key=lambda item: (infos[item[1][0]].file, infos[item[1][0]].begin)):
            shards.add({name: _joined([_tensor(loader, part, infos[part]) for part in stored], slices[name])})
            done += sum(infos[part].nbytes for part in stored)
            if progress is not None:
                progress(done, total)
    shards.close()
    eos = generation["eos_token_id"]
    config = values | {"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else values
    config |= {"model_type": _model_type(values["architectures"][0])}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2))


def _model_type(architecture: str) -> str:
    """Return the model_type of an architecture, for example "qwen3_5_moe_text" for Qwen3_5MoeForCausalLM."""
    name = architecture.removesuffix("ForCausalLM")
    kind = name.replace("Moe", "_moe").replace("Next", "_next").lower()
    return f"{kind}_text" if name.startswith("Qwen3_5") else kind


def _sources(name: str, infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the keys of `infos` whose tensors contain the rows of tensor `name` of the checkpoint."""
    return [name] if name in infos else [name.replace("in_proj_qkvz", part) for part in ("in_proj_qkv", "in_proj_z")]


def _joined(parts: list[torch.Tensor], tensor_slice: TensorSlice) -> torch.Tensor:
    """Return a tensor of the checkpoint from its parts in the file.

    A file stores in_proj_qkvz as two parts: the rows of q, k and v of all heads, and those of z. The checkpoint stores
    the rows of one head after the other.
    """
    if len(parts) == 1:
        return parts[0].view(tensor_slice.shape)
    rows = torch.cat(parts)
    tensor = torch.empty_like(rows)
    for row, source, count in runs(tensor_slice.groups, 0, tensor_slice.shape[0]):
        tensor[row : row + count] = rows[source : source + count]
    return tensor


def _tensor(loader: Loader, name: str, info: TensorInfo) -> torch.Tensor:
    """Return a tensor of the file by its name in a Hugging Face checkpoint, in the dtype of the file or in bf16."""
    assert isinstance(info, GGUFInfo)
    dtype = FLOATS.get(info.dtype, torch.bfloat16)
    rows = info.shape[0]
    tensor = torch.empty(info.shape, dtype=dtype)
    step = max(_NUMBERS // (tensor.numel() // rows), 1)
    for first in range(0, rows, step):
        values = loader.read(name, first, min(step, rows - first))
        tensor[first : first + step] = values - info.change.offset if info.change.offset else values
    return tensor
