"""Reads config.json and generation_config.json of a checkpoint into a ModelSpec."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from ..layout import MAX_STOP_IDS
from ..models import gguf_config
from ..models.files import present
from ..models.generation import generation_defaults
from ..models.gguf import read_gguf
from ..models.reader import ConfigReader, read_json
from .contents import advice

if TYPE_CHECKING:
    from ..blocks.spec import ModelSpec


def read_config(path: Path) -> "tuple[ModelSpec, dict]":
    """Read the checkpoint `path`; return its specification and config.json. Raises CheckpointError."""
    if path.is_file():
        gguf = read_gguf(path)
        values = gguf_config.config_values(gguf)
        return parse_config(values, gguf_config.generation_values(gguf), path, path), values
    source, generation = path / "config.json", path / "generation_config.json"
    if not present(source):
        fix = advice(path, "give the directory of a Hugging Face checkpoint")
        raise CheckpointError(f"{path}: no config.json; {fix}")
    values = read_json(source)
    return parse_config(values, read_json(generation) if present(generation) else None, source), values


def parse_config(
    config_json: dict, generation_json: dict | None = None, source="config.json", generation_source=None
) -> "ModelSpec":
    """Check a config.json, and generation_config.json if there is one, and return the specification.

    Args:
        config_json: the object in config.json.
        generation_json: the object in generation_config.json, or None.
        source: the name of config.json, for messages.
        generation_source: the name of generation_config.json, or None if it is next to config.json.

    Raises:
        CheckpointError: one line with the key and the expected value.
    """
    from ..models.registry import parse_model  # The import loads torch, which `--help` does not need.

    read = ConfigReader(config_json, str(source))
    spec = parse_model(read)
    generation_source = str(generation_source or Path(source).with_name("generation_config.json"))
    generation = read if generation_json is None else ConfigReader(generation_json, generation_source)
    defaults, notes = generation_defaults(generation, spec.vocab_size, spec.max_position)
    readers = read, read.under("text_config"), generation
    stops: tuple[int, ...] = ()
    for each in readers:
        try:
            stops += each.token_ids("eos_token_id", spec.vocab_size)
        except CheckpointError as error:
            if each is not generation or each is read:
                raise
            ids = each.values["eos_token_id"]
            valid = [id for id in ids if type(id) is int and 0 <= id < spec.vocab_size] if isinstance(ids, list) else []
            stops += tuple(valid)
            notes += (f"{error}; {f'only {valid} are used' if valid else 'it is ignored'}, correct it there",)
    stops = tuple(dict.fromkeys(stops))
    if len(stops) > MAX_STOP_IDS:
        raise CheckpointError(
            f"{source}: eos_token_id, with {generation_source}, names {len(stops)} tokens; "
            f"at most {MAX_STOP_IDS} can stop a generation: remove some"
        )
    return replace(
        spec, checkpoint_quantization=_quantization(read), stop_ids=stops, generation_defaults=defaults,
        notes=spec.notes + notes,
    )  # fmt: skip


def _quantization(read: ConfigReader):
    """Return the rules of quantization_config, or None if there is no such key."""
    if read.get("quantization_config") is None:
        return None
    from .quantization import methods

    return methods.parse(read.under("quantization_config"))
