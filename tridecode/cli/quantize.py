"""`tridecode quantize`: write a quantized checkpoint that other programs can read too."""

from pathlib import Path

from ..blocks.spec import ModelSpec
from ..checkpoint.hub import resolve_model
from ..checkpoint.load import load_config, stored_tensors
from ..checkpoint.names import repository
from ..checkpoint.quantization.quantize import rules
from ..checkpoint.quantization.write import write
from ..checkpoint.slices import linear_modules
from ..errors import ParameterError
from ..options import EngineOptions
from ..plan.device import quantized
from .outputs import new_directory
from .terminal import Output


def quantize(args, output: Output) -> int:
    """Run `tridecode quantize`: write a quantized copy of a checkpoint. Return the exit code."""
    source, out = resolve_model(args.model), new_directory(args.out)
    if source.is_file():
        raise ParameterError(f"{args.model}: is a GGUF file; write it as a directory first: tridecode convert FILE DIR")
    plain = load_config(source)
    options = EngineOptions(quantize=args.to, quantize_head=args.head)
    config = quantized(options, plain)  # A wrong option raises an error before anything is written.
    if config.tie_word_embeddings and args.head != "keep":
        raise ParameterError(f"--head {args.head}: the LM head is the embedding, which stays as it is; use --head keep")
    files = files_of(source, plain)
    out.mkdir(parents=True, exist_ok=True)
    repo = repository(args.model)
    with output.loading() as progress:
        write(source, out, files, rules(args.to, args.head), linear_modules(plain), progress.weights, repo and repo.id)
    output.note(f"{out}: {args.to}, LM head {args.head}")
    return 0


def files_of(source: Path, spec: ModelSpec) -> dict[Path, list[str]]:
    """Return each file of a checkpoint and the names of its tensors, in the order of the file."""
    files: dict[Path, list[str]] = {}
    for name, info in sorted(stored_tensors(source, spec).items(), key=lambda item: (item[1].file, item[1].begin)):
        files.setdefault(info.file, []).append(name)
    return files
