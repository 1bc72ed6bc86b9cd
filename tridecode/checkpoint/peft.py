"""PEFT adapters: adapter_config.json, and the choice of modules and ranks that it makes. A file is not trusted.

Source: LoraConfig, check_target_module_exists and get_pattern_key of the peft library.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..arguments import shown
from ..errors import CheckpointError, as_json
from ..models.files import present
from ..models.reader import ConfigReader, is_integer, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
# Keys that must be absent, null, false or empty -> why.
_UNSUPPORTED = {
    "use_dora": "DoRA is not supported; merge the adapter with peft's merge_and_unload",
    "modules_to_save": "whole modules in an adapter are not supported; merge it with peft's merge_and_unload",
    "lora_bias": "biases of an adapter are not supported; train with lora_bias=False",
    "trainable_token_indices": "trained embeddings are not supported; merge it with peft's merge_and_unload",
    "target_parameters": "adapters of parameters, such as experts, are not supported; merge it with peft",
    "layer_replication": "replicated layers are not supported; save the whole model",
    "fan_in_fan_out": "transposed weights are not supported; save it for a model with torch.nn.Linear",
    "alora_invocation_tokens": "activated LoRA is not supported; train an ordinary adapter",
}
# Initializations that change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PLAIN = re.compile(r"[\w.-]*")  # A pattern of these characters is matched in a short time.
_SECONDS = 5.0  # Maximum time for matching other patterns.
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
json.dump([[re.fullmatch(pattern, name) is not None for name in names] for pattern in patterns], sys.stdout)
"""


@dataclass(frozen=True)
class PeftConfig:
    """The checked contents of adapter_config.json.

    Args:
        source: the name of the file, for messages.
        rank, alpha: of modules that no pattern names.
        rslora: the factor is alpha / sqrt(rank) instead of alpha / rank.
        targets, excluded: names of modules, a regular expression, or None for any module.
        layers: numbers of the layers, or None for all.
        layer_lists: patterns of the list that contains the layers.
        ranks, alphas: pattern of a module -> its rank or alpha.
    """

    source: str
    rank: int
    alpha: float
    rslora: bool
    targets: Sequence[str] | str | None
    excluded: Sequence[str] | str
    layers: Sequence[int] | None
    layer_lists: Sequence[str]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @property
    def largest_rank(self) -> int:
        """The largest rank that a module may have."""
        return max(self.rank, *self.ranks.values()) if self.ranks else self.rank

    def matching(self, modules: Sequence[str]) -> set[str]:
        """Return the modules that the adapter changes, of those with a linear. Raises CheckpointError."""
        selected = set(modules) if self.targets is None else self._chosen("target_modules", self.targets, modules)
        if isinstance(self.targets, str) and self.targets.lower() == "all-linear":
            selected = set(modules)
        selected -= self._chosen("exclude_modules", self.excluded, modules)
        if self.layers is not None and not isinstance(self.targets, str):
            own = self._numbered(modules)
            exact = set(self.targets or ())
            selected = {module for module in selected if module in exact or own.get(module) in self.layers}
        return selected

    def scales(self, modules: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Return rank and factor of each module. Raises CheckpointError."""
        ranks = self._by_pattern("rank_pattern", self.ranks, modules)
        alphas = self._by_pattern("alpha_pattern", self.alphas, modules)
        scales = {}
        for module in modules:
            rank, alpha = int(ranks.get(module, self.rank)), alphas.get(module, self.alpha)
            scales[module] = rank, alpha / (rank**0.5 if self.rslora else rank)
        return scales

    def _chosen(self, key: str, selection: Sequence[str] | str, modules: Sequence[str]) -> set[str]:
        """Return the modules that a list of names or a regular expression selects."""
        if isinstance(selection, str):
            (matched,) = self._match(key, [selection], modules) if selection else ([],)
            return {module for module, hit in zip(modules, matched) if hit}
        ends = tuple(f".{name}" for name in selection)
        return {module for module in modules if module in selection or module.endswith(ends)}

    def _numbered(self, modules: Sequence[str]) -> dict[str, int]:
        """Return the number of the layer of each module in a list that layers_pattern names."""
        patterns = [rf".*\.({name})\.(?:\d+)\..*" for name in self.layer_lists]
        hits = [[True] * len(modules)]
        if patterns:
            hits = self._match("layers_pattern", patterns, modules, self.layer_lists)
        numbers = {}
        for place, module in enumerate(modules):
            number = re.match(r".*\.[^.]*\.(\d+)\.", module)
            if number and any(hit[place] for hit in hits):
                numbers[module] = int(number[1])
        return numbers

    def _by_pattern(self, key: str, values: Mapping[str, float], modules: Sequence[str]) -> dict[str, float]:
        """Return the value of each module that a pattern matches. The first pattern wins."""
        if not values:
            return {}
        hits = self._match(key, [rf"(.*\.)?({pattern})" for pattern in values], modules, list(values))
        selected: dict[str, float] = {}
        for value, hit in zip(values.values(), hits):
            for module, matched in zip(modules, hit):
                if matched:
                    selected.setdefault(module, value)
        return selected

    def _match(
        self, key: str, patterns: Sequence[str], names: Sequence[str], written: Sequence[str] | None = None
    ) -> list[list[bool]]:
        """Return for each regular expression which names it matches completely.

        Unless all of them are plain names, a child process with a time limit matches them, because a regular expression
        may take years.

        Args:
            written: the part of each pattern that comes from the file; by default all of it.
        """
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(
                    f"{self.source}: {key} has {shown(pattern)}, which is not a regular expression ({error})"
                ) from None
        if all(_PLAIN.fullmatch(pattern) for pattern in written or patterns):
            return [[re.fullmatch(pattern, name) is not None for name in names] for pattern in patterns]
        command = [sys.executable, "-I", "-S", "-c", _MATCH]
        try:
            done = subprocess.run(
                command,
                input=json.dumps([patterns, names]),
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=True,
            )
        except subprocess.TimeoutExpired:
            reason = f"takes more than {_SECONDS:g} s to match; write the names of the modules"
            raise CheckpointError(f"{self.source}: {key} {reason}") from None
        except (subprocess.CalledProcessError, OSError) as error:
            raise CheckpointError(f"{self.source}: {key} cannot be matched ({error})") from None
        return json.loads(done.stdout)


def read_peft_config(path: Path, layers: int | None = None) -> PeftConfig:
    """Read and check the adapter_config.json in directory `path`. Raises CheckpointError.

    Args:
        layers: number of layers of the model.
    """
    source = path / CONFIG
    if not present(source):
        raise CheckpointError(f"{path}: no {CONFIG}; give the directory of an adapter that peft has saved")
    read = ConfigReader(read_json(source), str(source))
    if str(read.get("peft_type", "LORA")).upper() != "LORA":
        raise read.fail("peft_type", "LORA; other kinds of adapters are not supported")
    for key, why in _UNSUPPORTED.items():
        if read.get(key):
            raise CheckpointError(f"{source}: {key}: {why}")
    for key, value in read.values.items():
        if key.startswith("use_") and key != "use_rslora" and value:
            raise CheckpointError(f"{source}: {key}: this variant of LoRA is not supported; merge it with peft")
    if read.get("bias", "none") != "none":
        raise read.fail("bias", '"none": trained biases are not supported; merge it with peft\'s merge_and_unload')
    start = read.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        fix = "save it with peft's path_initial_model_for_weight_conversion"
        raise CheckpointError(f"{source}: init_lora_weights {as_json(start)} changes the base model; {fix}")
    return PeftConfig(
        source=str(source),
        rank=read.integer("r", 1, MAX_RANK, 8),
        alpha=read.number("lora_alpha", -1e6, 1e6, 8),
        rslora=read.flag("use_rslora"),
        targets=_modules(read, "target_modules"),
        excluded=_modules(read, "exclude_modules") or (),
        layers=_layers(read, layers),
        layer_lists=_patterns(read, "layers_pattern"),
        ranks=_numbers(read, "rank_pattern", lambda reader, key: reader.integer(key, 1, MAX_RANK)),
        alphas=_numbers(read, "alpha_pattern", lambda reader, key: reader.number(key, -1e6, 1e6)),
    )


def _modules(read: ConfigReader, key: str) -> tuple[str, ...] | str | None:
    """Return names of modules or a regular expression; None if the key is absent."""
    value = read.get(key)
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise read.fail(key, "a list of names of modules, a regular expression or all-linear")
    return tuple(value)


def _patterns(read: ConfigReader, key: str) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple."""
    value = _modules(read, key) or ()
    return (value,) if isinstance(value, str) else value


def _layers(read: ConfigReader, count: int | None) -> tuple[int, ...] | None:
    """Return layers_to_transform, None for all layers."""
    value = read.get("layers_to_transform")
    numbers = [value] if is_integer(value) else value
    if numbers is None or numbers == []:
        return None
    limit = count if count is not None else 2**31
    if not isinstance(numbers, list) or not all(is_integer(number) and 0 <= number < limit for number in numbers):
        raise read.fail("layers_to_transform", f"a layer or a list of layers from 0 to {limit - 1}")
    return tuple(numbers)


def _numbers(read: ConfigReader, key: str, checked) -> dict:
    """Return an object of numbers, each checked by checked(reader, key)."""
    reader = read.under(key)
    if any(value is None for value in reader.values.values()):
        raise read.fail(key, "an object of numbers")
    return {name: checked(reader, name) for name in reader.values}


def module_names(names: Iterable[str], source: str) -> dict[str, tuple[str, str]]:
    """Return for each tensor of an adapter its module in the base model, and "A" or "B". Raises CheckpointError."""
    selected = {}
    for name in names:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if not match:
            reason = "only base_model.model.MODULE.lora_A.weight and lora_B.weight are supported"
            raise CheckpointError(f"{source}: has the tensor {shown(name)}; {reason}")
        selected[name] = match[1], match[2]
    return selected
