"""Writing of the weights of an unquantized checkpoint as compressed-tensors, one module at a time."""

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ...kernels.linear.packed import QuantizedWeight
from ...models.reader import read_json
from .. import custom_code
from ..shards import Shards, read_tensors
from .quantize import fitted, quantize
from .scheme import Quantization, Scheme

# Patterns, in lower case, of files to copy: tokenizer, chat template, sampling defaults, license and model card.
COPIED = (
    "generation_config.json", "tokenizer*.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "chat_template.*", "licen[cs]e*", "notice*", "copying*",
    "use_policy*", "readme*", "model_card*",
)  # fmt: skip

MAX_LISTED = 1000  # Maximum number of modules that a group lists by name.


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [n, k] into int32 words [n, k * bits / 32].

    A word has neighboring columns, the first in its lowest bits.
    """
    parts = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits))).view(len(codes), -1, 32 // bits)
    words = torch.zeros(parts.shape[:2], dtype=torch.int32)
    for place in range(32 // bits):
        words |= parts[:, :, place].to(torch.int32) << (place * bits)
    return words


def tensors_of(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight, by their suffixes."""
    if weight.codes.dtype == torch.float8_e4m3fn:
        return {"weight": weight.codes, "weight_scale": weight.scale}
    return {
        "weight_packed": pack_words(weight.codes, weight.bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.codes.shape),
    }


def described(schemes: dict[str, Scheme], ignored: list[str], others: list[str]) -> dict:
    """Return the quantization_config for config.json.

    Args:
        schemes: the scheme of each quantized module.
        ignored: modules that are not quantized.
        others: further modules that are not quantized. They need no entry if the targets are listed by name.
    """
    by_scheme: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        by_scheme.setdefault(scheme, []).append(module)
    largest = max(by_scheme, key=lambda scheme: len(by_scheme[scheme]), default=None)
    if largest and len(by_scheme[largest]) > MAX_LISTED:  # The last group has all modules that no other rule names.
        del by_scheme[largest]
        by_scheme[largest], ignored = ["Linear"], [*ignored, *others]
    groups = {}
    for i, (scheme, modules) in enumerate(by_scheme.items()):
        format_name = "float-quantized" if scheme.floating else "pack-quantized"
        weights = {
            "num_bits": scheme.bits, "type": "float" if scheme.floating else "int", "symmetric": True,
            "strategy": "group" if scheme.group else "channel", "group_size": scheme.group or None, "dynamic": False,
        }  # fmt: skip
        groups[f"group_{i}"] = {"targets": modules, "weights": weights, "format": format_name}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed", "config_groups": groups, "ignore": ignored,
    }  # fmt: skip


def matrices(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a weight as matrices by their names. A tensor of all experts becomes the weights of each expert."""
    if tensor.ndim != 3:
        return {name: tensor}
    owner, _, kind = name.rpartition(".")
    weights: dict[str, torch.Tensor] = {}
    for expert, matrix in enumerate(tensor):
        parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        weights |= {f"{owner}.{expert}.{part}.weight": rows for part, rows in zip(names, parts, strict=True)}
    return weights


def write(
    source: Path,
    out: Path,
    files: dict[Path, list[str]],
    rules: Quantization,
    modules: set[str],
    progress: Callable[[int, int], None] | None = None,
    repo: str | None = None,
) -> None:
    """Write the checkpoint in `source` to the empty directory `out`, with the weights of `modules` quantized.

    Args:
        files: each file of the checkpoint -> the names of its tensors to write.
        rules: the rules that choose a scheme for each module.
        repo: the repository on the Hugging Face hub, if the checkpoint came from there.

    Raises:
        CheckpointError, OSError: the checkpoint cannot be written.
    """
    values, tokenizer = (with_code(source, out, name, repo) for name in ("config.json", "tokenizer_config.json"))
    shards, schemes = Shards(out), {}
    ignored: list[str] = []
    others: list[str] = []
    for name, whole in read_tensors(files, progress):
        linear = name.removesuffix(".weight") in modules
        for weight, tensor in (matrices(name, whole) if linear else {name: whole}).items():
            module = weight.removesuffix(".weight")
            scheme = rules.scheme(module) if linear else None
            if scheme is None:
                if tensor.ndim == 2:
                    (ignored if module == "lm_head" else others).append(module)
                shards.add({weight: tensor})
                continue
            schemes[module] = scheme = fitted(scheme, tensor.shape[1])
            parts = tensors_of(quantize(tensor, scheme))
            shards.add({f"{module}.{part}": value for part, value in parts.items()})
    shards.close()
    copy_others(source, out)
    if repo and custom_code.KEY in tokenizer:
        (out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    tied = "lm_head" not in modules
    for keys in (values, values.get("text_config")):
        if keys and "tie_word_embeddings" in keys:
            keys["tie_word_embeddings"] = tied
    config = values | {"quantization_config": described(schemes, ["lm_head"] if tied else ignored, others)}
    (out / "config.json").write_text(json.dumps(config, indent=2))


def copy_others(source: Path, out: Path) -> None:
    """Copy the files of a checkpoint that are neither weights nor code, such as the tokenizer's."""
    for other in source.iterdir():
        if other.is_file() and any(fnmatchcase(other.name.lower(), pattern) for pattern in COPIED):
            shutil.copyfile(other, out / other.name)


def with_code(source: Path, out: Path, name: str, repo: str | None) -> dict:
    """Return the object in a configuration file. Copy the Python files that it names, or add `repo` to the names."""
    values = read_json(source / name) if (source / name).exists() else {}
    if repo:
        return custom_code.refer_to_repository(values, repo)
    for file in custom_code.code_files(source, values):
        shutil.copyfile(file, out / file.name)
    return values
