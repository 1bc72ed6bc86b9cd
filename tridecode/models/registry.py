"""The families: mappings from architecture and model_type in config.json to the function that parses it."""

from ..blocks.spec import ModelSpec
from . import llama, mistral, qwen2, qwen2_moe, qwen3, qwen3_5, qwen3_moe, qwen3_next
from .reader import ConfigReader

FAMILIES = {
    "Qwen3ForCausalLM": qwen3.parse,
    "LlamaForCausalLM": llama.parse,
    "MistralForCausalLM": mistral.parse,
    "Qwen2ForCausalLM": qwen2.parse,
    "Qwen2MoeForCausalLM": qwen2_moe.parse,
    "Qwen3MoeForCausalLM": qwen3_moe.parse,
    "Qwen3NextForCausalLM": qwen3_next.parse,
    "Qwen3_5ForConditionalGeneration": qwen3_5.parse,
    "Qwen3_5ForCausalLM": qwen3_5.parse,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5.parse,
    "Qwen3_5MoeForCausalLM": qwen3_5.parse,
}
MODEL_TYPES = {
    "qwen3": qwen3.parse,
    "llama": llama.parse,
    "mistral": mistral.parse,
    "qwen2": qwen2.parse,
    "qwen3_5": qwen3_5.parse,
    "qwen3_5_text": qwen3_5.parse,
    "qwen2_moe": qwen2_moe.parse,
    "qwen3_moe": qwen3_moe.parse,
    "qwen3_next": qwen3_next.parse,
    "qwen3_5_moe": qwen3_5.parse,
    "qwen3_5_moe_text": qwen3_5.parse,
}


def parse_model(read: ConfigReader) -> ModelSpec:
    """Return the specification of the checkpoint whose config.json `read` holds.

    Without architectures, model_type decides, and also for a checkpoint that was saved as a model without LM head
    (Qwen3Model).

    Raises:
        CheckpointError: the architecture is not supported.
    """
    names, kind = read.get("architectures", []), read.get("model_type")
    is_list = isinstance(names, list) and len(names) <= 1
    if is_list and kind is not None and (not names or str(names[0]).endswith("Model")):
        return MODEL_TYPES[read.choice("model_type", tuple(MODEL_TYPES), None)](read)
    if not is_list or not names or str(names[0]) not in FAMILIES:
        raise read.fail("architectures", f"a list of one of {', '.join(FAMILIES)}")
    return FAMILIES[names[0]](read)
