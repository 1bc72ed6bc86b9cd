"""Record `tridecode info` for a model that fits and for one that does not fit: python docs/record_info.py.

It writes two blocks of docs/info.md: those for a CPU, or on a machine with a GPU those for a GPU. The checkpoints have
the
tensors of the public models, but no contents: `info` reads headers only. It requires transformers.
"""

import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from benchmarks.peers import peer_model  # noqa: E402
from tridecode.checkpoint.hub import BUNDLED  # noqa: E402
from tridecode.models.presets import PRESETS  # noqa: E402

# Name of a block in docs/info.md, preset, name of the folder, options.
CASES = {
    "cpu": [("fits", "qwen3-0.6b", "Qwen3-0.6B", []), ("does not fit", "qwen3-4b", "Qwen3-4B", [])],
    "gpu": [
        ("fits", "qwen3-4b", "Qwen3-4B", []),
        ("does not fit", "qwen3-8b", "Qwen3-8B", ["--slots", "64", "--max-seq-len", "32000", "--kv-tokens", "2048000"]),
    ],
}


def write_headers(folder: Path, preset: str) -> None:
    """Write config.json, the tokenizer and a safetensors file.

    Its tensors are a hole in the file, so it needs no disk space.
    """
    import json
    import shutil

    model = peer_model(PRESETS[preset], "meta", torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16"})
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, folder)
    tensors, end = {}, 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        begin, end = end, end + 2 * tensor.numel()
        tensors[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(tensors).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def main() -> None:
    device = "gpu" if torch.cuda.is_available() else "cpu"
    page = DOCS / "info.md"
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as root:
        for name, preset, model, options in CASES[device]:
            write_headers(Path(root) / model, preset)
            command = ["info", "--model", model, *options]
            run = subprocess.run(
                [sys.executable, DOCS.parent / "cli.py", *command], cwd=root, capture_output=True, text=True
            )
            output = run.stdout or sys.exit(run.stderr)
            block = f"```\n$ python cli.py {' '.join(command)}\n{output}```\n"
            begin, end = f"<!-- {device} {name}:begin -->\n", f"<!-- {device} {name}:end -->\n"
            text = re.sub(f"(?s){begin}.*?{end}", lambda _, b=begin + block + end: b, text)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
