"""ConfigReader: typed access to the JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any, TypeGuard

from ..arguments import shown
from ..errors import CheckpointError, as_json, brief
from .files import read_file, unique

_JSON_LIMIT = 64 * 2**20  # Maximum bytes of a config or an index. No real file is larger.


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in file `path`. Raises CheckpointError for a duplicate key or anything but an object."""

    def duplicate(key: str) -> CheckpointError:
        return CheckpointError(f"{path}: the key {shown(key)} occurs twice; remove one of the two")

    try:
        value = json.loads(read_file(path, _JSON_LIMIT), object_pairs_hook=unique(duplicate))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({brief(error)}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; download the file again")
    return value


class ConfigReader:
    """The keys of one JSON object. Every error names the source, the key and the expected value.

    Args:
        values: the object.
        source: the file's name, for messages.
        prefix: the path of the object in the file, for example "rope_parameters.".
    """

    def __init__(self, values: dict[str, Any], source: str, prefix: str = ""):
        if not isinstance(values, dict):
            raise CheckpointError(f"{source}: {prefix.rstrip('.')} must be a JSON object, got {as_json(values)}")
        self.values, self.source, self.prefix = values, source, prefix

    def fail(self, key: str, expected: str) -> CheckpointError:
        """Return the error for a key whose value is not `expected`."""
        got = as_json(self.values[key]) if key in self.values else "nothing"
        return CheckpointError(f"{self.source}: {self.prefix}{key} must be {expected}, got {got}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or `default` if the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer from `low` to `high`. Raises CheckpointError."""
        value = self.get(key, default)
        if not is_integer(value) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a number from `low` to `high`. The limits exclude values that become 0, inf or NaN in fp32."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def under(self, key: str) -> "ConfigReader":
        """Return the reader of an object in this one."""
        return ConfigReader(self.get(key, {}), self.source, f"{self.prefix}{key}.")

    def choice(self, key: str, choices: tuple[str, ...], default: str | None) -> str:
        """Return one of `choices`. Raises CheckpointError."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.fail(key, f"one of {', '.join(choices)}")
        return value

    def names(self, key: str) -> list[str]:
        """Return a list of names; empty if the key is absent."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(key, "a list of names")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean. Raises CheckpointError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return a token id, or a list of them, as a tuple; empty if the key is absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(is_integer(token) and 0 <= token < vocab_size for token in ids):
            raise self.fail(key, f"a token id or a list of token ids below vocab_size ({vocab_size})")
        return tuple(ids)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
