"""Checkpoint with random weights, for scripts that need a checkpoint. It requires transformers."""

import json
import shutil
from pathlib import Path

import torch

from benchmarks.peers import peer_model
from tridecode.checkpoint.hub import BUNDLED
from tridecode.models.presets import PRESETS as SHAPES

PRESETS = [name for name in SHAPES if name.startswith("qwen3")]


def write_checkpoint(folder: str, preset: str) -> None:
    """Write random weights in the shape of a Qwen3 preset, and the bundled tokenizer with a vocabulary of its size."""
    path, shape = Path(folder), SHAPES[preset]
    torch.manual_seed(0)
    model = peer_model(shape, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    model.config.eos_token_id = 2  # The stop token of the bundled tokenizer.
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, path)
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    # Ġ is a space, and Ċ is a newline. The words form paragraphs of about 25 words.
    for token in range(len(vocabulary), shape.vocab_size):
        vocabulary[f"Ġword{token}" + (".ĊĊ" if token % 25 == 0 else "")] = token
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
