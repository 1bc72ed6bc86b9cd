"""`tridecode quantize`: a checkpoint in fewer bits, in a form that others read too."""

from pathlib import Path

from ..errors import ParameterError
from ..model.checkpoint import load_config
from ..model.formats.quantise import rules
from ..model.formats.write import write
from ..model.hub import resolve_model
from ..placement import to_quantise
from .terminal import Output


def quantize(args, output: Output) -> int:
    source, out = resolve_model(args.model), Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ParameterError(f"{out}: must be a new or an empty directory")
    config = to_quantise(load_config(source), args.to, args.head)  # refused before anything is written
    if config.tie_word_embeddings and args.head != "keep":
        raise ParameterError(f"--head {args.head}: the LM head is the embedding, which stays as it is; use --head keep")
    out.mkdir(parents=True, exist_ok=True)
    with output.loading() as progress:
        write(source, out, rules(args.to, args.head), progress)
    output.note(f"{out}: {args.to}, LM head {args.head}")
    return 0
