"""Directories without config.json or weights: advice that depends on the other files in them."""

from pathlib import Path

from ..arguments import shown
from ..models.reader import read_json
from .names import repository

NOT_A_MODEL = "which is not a whole model; give its base model with --model, and it with --adapter NAME=PATH"
# Pattern of a file -> the text of the message.
_KINDS = {
    "*.gguf": "it holds several GGUF models; give the file of one",
    "pytorch_model*.bin": ".bin files are not read; convert them with transformers' save_pretrained",
    "*.pth": ".pth files are not read; give the same model in Hugging Face's format",
    "consolidated*.safetensors": "it is in Mistral's own format; give the same model in Hugging Face's format",
    "model_index.json": "it holds a pipeline of the diffusers library, which is no language model",
}


def adapter(path: Path) -> str | None:
    """Return a description of the LoRA adapter in directory `path`, None if there is none. Raises CheckpointError."""
    file = path / "adapter_config.json"
    if not file.is_file():
        return None
    base = read_json(file).get("base_model_name_or_path")
    return f"a LoRA adapter of {shown(base)}" if isinstance(base, str) and base else "a LoRA adapter"


def advice(path: Path, otherwise: str) -> str:
    """Return advice for the directory `path`, which lacks config.json or weights.

    Args:
        otherwise: the advice if the other files show no reason.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if lora := adapter(path):
        return f"it holds {lora}, {NOT_A_MODEL}"
    for pattern, text in _KINDS.items():
        if any(path.glob(pattern)):
            return text
    if path.parent.name == "snapshots" and (cached := repository(path.parents[1].name)):
        return f"this copy in the cache is not complete; give the id {cached}, which downloads the rest"
    if inner := sorted(file.parent for file in path.glob("*/config.json")):
        return f"give a directory in it, like {inner[-1]}"
    return otherwise
