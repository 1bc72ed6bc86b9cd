"""ModelConfig: what a checkpoint's config.json says, as frozen data. Families differ in flags, not in classes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import shown
from ..errors import CheckpointError, ParameterError, as_json
from ..layout import LATE_TOKEN, MAX_STOP_IDS
from ..sampling import SamplingParams
from .files import present, read_file, unique

if TYPE_CHECKING:
    from ..checkpoint.formats.scheme import Quantisation

DTYPES = ("bfloat16", "float16", "float32")
_JSON_LIMIT = 64 * 2**20  # bytes; a larger config or index is not one
MISTRAL_WINDOW = 4096  # where the key is absent; null is none
MAX_GROUP = 16  # query heads a K/V head: rows of one tensor-core tile in attention


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is "default" or "llama3"; the last four fields are used by "llama3" only."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are element counts; `layer_types` has one entry a layer.

    `dtype` is the checkpoint's own, "bfloat16", "float16" or "float32". `stop_ids` is the union of what config.json
    and generation_config.json call eos. `generation_defaults` holds (SamplingParams field, value) pairs.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope: RopeConfig = RopeConfig()
    dtype: str = "bfloat16"
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    generation_defaults: tuple[tuple[str, float], ...] = ()
    quantisation: "Quantisation | None" = None  # of the checkpoint's weights
    quantise: "Quantisation | None" = None  # what the other weights become while they are loaded
    fp8_kv: bool = False  # K/V in 8 bits, else in the weights' dtype

    @property
    def few_bits(self) -> str | None:
        """The method by which weights have fewer bits, or None."""
        which = self.quantisation or self.quantise
        return which and which.method

    @property
    def group_size(self) -> int:
        """Query heads that share one K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Number of most recent positions layer `layer` attends to; 0 means all."""
        return (self.sliding_window or 0) if self.layer_types[layer] == "sliding_attention" else 0


@dataclass(frozen=True)
class Family:
    """What an architecture name implies beyond the numbers of its config.json.

    windows: which layers slide. "none"; "all", unless sliding_window is null; "upper", those from max_window_layers on,
    where use_sliding_window is true, unless layer_types says otherwise.
    """

    name: str
    qk_norm: bool = False
    qkv_bias: bool = False
    windows: str = "none"


FAMILIES = {
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, windows="upper"),
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", windows="all"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows="upper"),
}

# SamplingParams fields that generation_config.json may set
_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_json(path: Path) -> dict:
    """The JSON object in file `path`; a key given twice, or anything that is no JSON object, is a CheckpointError."""

    def twice(key: str) -> CheckpointError:
        return CheckpointError(f"{path}: the key {shown(key)} is given twice; keep one of the two")

    try:
        value = json.loads(read_file(path, _JSON_LIMIT), object_pairs_hook=unique(twice))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; download the file again")
    return value


def read_config(path: Path) -> tuple[ModelConfig, dict]:
    """The configuration of the checkpoint in directory `path`, and config.json as it stands; raises CheckpointError."""
    source, generation = path / "config.json", path / "generation_config.json"
    if not present(source):
        raise CheckpointError(f"{path}: no config.json; give the directory of a Hugging Face checkpoint")
    values = read_json(source)
    return parse_config(values, read_json(generation) if present(generation) else None, source), values


class _Reader:
    """Typed access to the keys of one JSON object; every complaint names source and key."""

    def __init__(self, values: dict, source: str, prefix: str = ""):
        if not isinstance(values, dict):
            raise CheckpointError(f"{source}: {prefix.rstrip('.')} must be a JSON object, got {as_json(values)}")
        self.values, self.source, self.prefix = values, source, prefix

    def fail(self, key: str, expected: str) -> CheckpointError:
        got = as_json(self.values[key]) if key in self.values else "nothing"
        return CheckpointError(f"{self.source}: {self.prefix}{key} must be {expected}, got {got}")

    def get(self, key: str, default=None):
        """The value; `default` where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if not _is_integer(value) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number from `low` to `high`: in fp32 what is far beyond the published ones is 0, infinite or NaN."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def under(self, key: str) -> "_Reader":
        """The reader of an object in this one."""
        return _Reader(self.get(key, {}), self.source, f"{self.prefix}{key}.")

    def choice(self, key: str, choices: tuple[str, ...], default: str | None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.fail(key, f"one of {', '.join(choices)}")
        return value

    def names(self, key: str) -> list[str]:
        """A list of names, or nothing."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.fail(key, "a list of names")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, a list of them or nothing."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(_is_integer(token) and 0 <= token < vocab_size for token in ids):
            raise self.fail(key, f"a token id or a list of token ids below vocab_size ({vocab_size})")
        return tuple(ids)


def parse_config(config_json: dict, generation_json: dict | None = None, source="config.json") -> ModelConfig:
    """Check a config.json (and generation_config.json, where there is one) and make a ModelConfig of it.

    Reads files written by transformers 4 (rope_theta and rope_scaling, torch_dtype) and 5 (rope_parameters, dtype).
    `source` names config_json in messages. Raises CheckpointError: one line that names the key and what it must be.
    """
    read = _Reader(config_json, str(source))
    family = _family(read)
    sizes = _sizes(read)
    layer_types, sliding_window = _layer_types(read, family, sizes["num_layers"], sizes["max_position"])
    generation_source = str(Path(source).with_name("generation_config.json"))
    generation = _Reader(generation_json or {}, generation_source)
    stops = read.token_ids("eos_token_id", sizes["vocab_size"])
    stops += generation.token_ids("eos_token_id", sizes["vocab_size"])
    stops = tuple(dict.fromkeys(stops))
    if len(stops) > MAX_STOP_IDS:
        raise CheckpointError(
            f"{source}: eos_token_id, with {generation_source}, names {len(stops)} tokens; "
            f"at most {MAX_STOP_IDS} can stop a generation: remove some"
        )
    bos = read.token_ids("bos_token_id", sizes["vocab_size"])
    return ModelConfig(
        family=family.name,
        **sizes,
        rms_norm_eps=read.number("rms_norm_eps", 1e-30, 1, default=1e-6),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        layer_types=layer_types,
        sliding_window=sliding_window,
        rope=_rope(read, sizes["max_position"]),
        dtype=_dtype(read),
        quantisation=_quantisation(read),
        bos_id=bos[0] if bos else None,
        stop_ids=stops,
        generation_defaults=_generation_defaults(generation),
    )


def _family(read: _Reader) -> Family:
    """Choose the family, and refuse what no family here computes."""
    names = read.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        raise read.fail("architectures", f"a list of one of {', '.join(FAMILIES)}")
    if (activation := read.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(
            f"{read.source}: hidden_act must be \"silu\", got {as_json(activation)}: this model's MLP is not supported"
        )
    for key, where in (("attention_bias", "o_proj"), ("mlp_bias", "the MLP's projections")):
        if read.flag(key):
            raise CheckpointError(f"{read.source}: {key} must be false, got true: a bias on {where} is not supported")
    return FAMILIES[names[0]]


def _sizes(read: _Reader) -> dict[str, int]:
    sizes = {
        "hidden_size": read.integer("hidden_size", 1, 2**20),
        "intermediate_size": read.integer("intermediate_size", 1, 2**20),
        "num_layers": read.integer("num_hidden_layers", 1, 4096),
        "num_heads": read.integer("num_attention_heads", 1, 4096),
        "vocab_size": read.integer("vocab_size", 2, LATE_TOKEN),
        "max_position": read.integer("max_position_embeddings", 1, 2**31 - 1),
    }
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    sizes["num_kv_heads"] = kv_heads = read.integer("num_key_value_heads", 1, 4096, default=heads)
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise read.fail(
            "num_key_value_heads", f"a divisor of num_attention_heads ({heads}), at least a {MAX_GROUP}th of it"
        )
    if read.get("head_dim") is None and hidden % heads:
        raise read.fail("head_dim", f"given, since hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = read.integer("head_dim", 1, 2**16, default=hidden // heads)
    if head_dim % 16 or head_dim > 256:
        raise CheckpointError(
            f"{read.source}: head_dim (hidden_size / num_attention_heads where absent) must be a multiple of 16 "
            f"up to 256, got {head_dim}"
        )
    sizes["head_dim"] = head_dim
    return sizes


def _layer_types(read: _Reader, family: Family, num_layers: int, max_position: int):
    """The kind of each layer, and the window of those that slide or None. A window no prompt can outgrow is none."""
    window, first = None, num_layers
    if family.windows == "all" and read.values.get("sliding_window", MISTRAL_WINDOW) is not None:
        window, first = read.integer("sliding_window", 1, 2**31 - 1, default=MISTRAL_WINDOW), 0
    if family.windows == "upper" and read.flag("use_sliding_window"):
        window = read.integer("sliding_window", 1, 2**31 - 1)
        first = read.integer("max_window_layers", 0, 2**31 - 1, default=28)
    types = tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))
    if (given := read.get("layer_types")) is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(given, list) or len(given) != num_layers or not all(kind in known for kind in given):
            raise read.fail("layer_types", f"a list of {num_layers} (num_hidden_layers) out of {', '.join(known)}")
        if family.windows != "upper" and tuple(given) != types:
            raise CheckpointError(
                f"{read.source}: layer_types must be all {types[0]} in a {family.name} model with sliding_window "
                f"{as_json(window)}; remove the key"
            )
        if "sliding_attention" in given and window is None:
            raise read.fail("sliding_window", "set, with use_sliding_window true, since layer_types has sliding layers")
        types = tuple(given)
    if window is None or window >= max_position or "sliding_attention" not in types:
        return ("full_attention",) * num_layers, None
    return types, window


def _rope(read: _Reader, max_position: int) -> RopeConfig:
    """From rope_parameters, or from rope_scaling with rope_theta beside it."""
    given = [key for key in ("rope_parameters", "rope_scaling") if read.get(key) is not None]
    if len(given) == 2 and read.values[given[0]] != read.values[given[1]]:
        raise CheckpointError(f"{read.source}: rope_parameters and rope_scaling contradict each other; remove one")
    key = given[0] if given else "rope_parameters"
    rope = _Reader(read.get(key, {}), read.source, f"{key}.")
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise CheckpointError(
                f"{read.source}: {key} holds an object, {shown(name)}: "
                "rotary embeddings that differ between layers are not supported"
            )
    kinds = [rope.values[name] for name in ("rope_type", "type") if name in rope.values]
    kind = kinds[0] if kinds else "default"
    if kind not in ("default", "llama3"):
        raise CheckpointError(
            f'{read.source}: {key}.rope_type must be "default" or "llama3", got {as_json(kind)}: '
            "other rotary embeddings are not supported"
        )
    for reader in (read, rope):
        if (partial := reader.get("partial_rotary_factor", 1)) != 1:
            raise CheckpointError(
                f"{read.source}: {reader.prefix}partial_rotary_factor must be 1, got {as_json(partial)}: "
                "partial rotary embeddings are not supported"
            )
    owner = rope if "rope_theta" in rope.values else read
    theta = owner.number("rope_theta", 1, 1e30) if "rope_theta" in owner.values else 10000.0  # null is no number
    if kind == "default":
        return RopeConfig(theta=theta)
    low, high = rope.number("low_freq_factor", 1e-4, 1e4), rope.number("high_freq_factor", 1e-4, 1e4)
    if high <= low:
        raise rope.fail("high_freq_factor", f"above low_freq_factor ({low:g})")
    original = rope.integer("original_max_position_embeddings", 1, 2**31 - 1, default=max_position)
    return RopeConfig(theta, kind, rope.number("factor", 1, 1e5), low, high, original)


def _quantisation(read: _Reader) -> "Quantisation | None":
    if read.get("quantization_config") is None:
        return None
    from ..checkpoint.formats import methods

    return methods.parse(read.under("quantization_config"))


def _dtype(read: _Reader) -> str:
    key = "dtype" if read.get("dtype") is not None else "torch_dtype"
    name = read.get(key, "bfloat16")
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in DTYPES:
        raise read.fail(key, f"one of {', '.join(DTYPES)}")
    return name


def _generation_defaults(read: _Reader) -> tuple[tuple[str, float], ...]:
    found = {key: value for key in _GENERATION_FIELDS if (value := read.get(key)) is not None}
    try:
        SamplingParams(**found)
    except ParameterError as error:
        raise CheckpointError(f"{read.source}: {error}; correct it there") from None
    if not read.flag("do_sample", default=True):  # absent: the author said nothing about it
        found["temperature"] = 0.0
    return tuple(found.items())


def _is_integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
