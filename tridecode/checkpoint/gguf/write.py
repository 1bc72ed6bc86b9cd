"""Writing of a GGUF file as a Hugging Face checkpoint: config.json, generation_config.json and the tensors."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from ...models import gguf_config
from ...models.gguf import read_gguf
from ..config import parse_config
from ..load import read_infos
from ..loader import Loader
from ..shards import Shards
from ..slices import tensor_slices
from .tensors import FLOATS, GGUFInfo, gguf_tensors

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
    values, generation = gguf_config.config_values(gguf, tiled=False), gguf_config.generation_values(gguf)
    spec = parse_config(values, generation, path, path)
    slices = tensor_slices(spec)
    infos = read_infos(path, spec, gguf_tensors(path, tiled=False))
    total, done = sum(info.nbytes for info in infos.values()), 0
    shards = Shards(out)
    with ExitStack() as opened:
        loader = Loader(infos, {}, {}, 0, opened)
        for name, info in sorted(infos.items(), key=lambda item: (item[1].file, item[1].begin)):
            assert isinstance(info, GGUFInfo)
            shards.add({name: _tensor(loader, name, info).view(slices[name].shape)})
            done += info.nbytes
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
    kind = name.replace("Moe", "_moe").lower()
    return f"{kind}_text" if name.startswith("Qwen3_5") else kind


def _tensor(loader: Loader, name: str, info: GGUFInfo) -> torch.Tensor:
    """Return a tensor of the Hugging Face checkpoint, in the dtype of the file or in bf16."""
    dtype = FLOATS.get(info.dtype, torch.bfloat16)
    rows = info.shape[0]
    tensor = torch.empty(info.shape, dtype=dtype)
    step = max(_NUMBERS // (tensor.numel() // rows), 1)
    for first in range(0, rows, step):
        values = loader.read(name, first, min(step, rows - first))
        tensor[first : first + step] = values - info.change.offset if info.change.offset else values
    return tensor
