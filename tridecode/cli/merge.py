"""`tridecode merge`: write a checkpoint with an adapter merged into its weights."""

import torch

from ..checkpoint.adapters import load_adapter
from ..checkpoint.hub import resolve_model
from ..checkpoint.load import load_config
from ..checkpoint.merge import merge as write
from ..checkpoint.names import repository
from ..errors import ParameterError
from .outputs import new_directory
from .quantize import files_of
from .terminal import Output


def merge(args, output: Output) -> int:
    """Run `tridecode merge`. Return the exit code."""
    source, out = resolve_model(args.model), new_directory(args.out)
    if source.is_file():
        raise ParameterError(f"{args.model}: is a GGUF file; write it as a directory first: tridecode convert FILE DIR")
    spec = load_config(source)
    if spec.checkpoint_quantization is not None:
        raise ParameterError(f"{args.model}: its weights are quantized; merge into the original checkpoint")
    adapter = load_adapter("adapter", args.adapter, spec, torch.float32)
    files = files_of(source, spec)
    out.mkdir(parents=True, exist_ok=True)
    repo = repository(args.model)
    with output.loading() as progress:
        write(source, out, spec, files, adapter, progress.weights, repo and repo.id)
    output.note(f"{out}: {args.model} with {args.adapter}, rank {adapter.rank}")
    return 0
