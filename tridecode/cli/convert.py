"""`tridecode convert`: write a GGUF file as a Hugging Face checkpoint."""

import json

from ..checkpoint.gguf.write import write_checkpoint
from ..checkpoint.hub import resolve_model
from ..errors import ParameterError
from ..text.gguf_tokenizer import load_gguf_tokenizer
from .outputs import new_directory
from .terminal import Output


def convert(args, output: Output) -> int:
    """Run `tridecode convert`: write config, weights, tokenizer and chat template of a GGUF file."""
    source, out = resolve_model(args.model), new_directory(args.out)
    if not source.is_file():
        raise ParameterError(f"{args.model}: is not a GGUF file; give one, or owner/name:Q4_K_M")
    stored = load_gguf_tokenizer(source)
    out.mkdir(parents=True, exist_ok=True)
    with output.loading() as progress:
        write_checkpoint(source, out, progress.weights)
    stored.tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(settings | stored.special_tokens, indent=2))
    if stored.template is not None:
        (out / "chat_template.jinja").write_text(stored.template)
    output.note(f"{out}: bfloat16 where {source.name} is quantized")
    return 0
