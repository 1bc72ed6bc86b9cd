"""The families: a mapping from the architecture name in config.json to the function that parses it."""

from ..blocks.spec import ModelSpec
from . import llama, mistral, qwen2, qwen3, qwen3_5
from .reader import ConfigReader

FAMILIES = {
    "Qwen3ForCausalLM": qwen3.parse,
    "LlamaForCausalLM": llama.parse,
    "MistralForCausalLM": mistral.parse,
    "Qwen2ForCausalLM": qwen2.parse,
    "Qwen3_5ForConditionalGeneration": qwen3_5.parse,
    "Qwen3_5ForCausalLM": qwen3_5.parse,
}


def parse_model(read: ConfigReader) -> ModelSpec:
    """Return the specification of the checkpoint whose config.json `read` holds. Raises CheckpointError."""
    names = read.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        raise read.fail("architectures", f"a list of one of {', '.join(FAMILIES)}")
    return FAMILIES[names[0]](read)
