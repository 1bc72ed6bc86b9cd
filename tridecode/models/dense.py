"""Dense decoders: the layers and the keys of config.json that the families share."""

import math
from dataclasses import replace
from typing import Any

from ..arguments import shown
from ..blocks.attention import Attention
from ..blocks.mlp import MLP
from ..blocks.rope import ROPE_KINDS, RopeConfig
from ..blocks.spec import Layer, ModelSpec
from ..errors import CheckpointError, as_json, brief
from ..layout import LATE_TOKEN
from .reader import ConfigReader

DTYPES = ("bfloat16", "float16", "float32")
MISTRAL_WINDOW = 4096  # Default if a Mistral checkpoint lacks the key. null means no window.
NO_SCALING = RopeConfig()
# Keys of rope_parameters that every kind may have. The mrope keys concern images only.
_COMMON_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_DUAL_CHUNKS = "dual_chunk_attention_config"
MAX_GROUP = 16  # Maximum query heads of a K/V head, because a tensor core tile of attention has 16 rows.


def dense_spec(
    family: str,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    max_position: int,
    rms_norm_eps: float = 1e-6,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    rope: RopeConfig = NO_SCALING,
    windows: tuple[int, ...] | None = None,
    **more: Any,
) -> ModelSpec:
    """Return the specification of a decoder in which every layer consists of attention and a gated MLP.

    Args:
        windows: for each layer, the number of positions to which a token attends, or 0 for all. None means all
            positions in every layer.
        more: other fields of ModelSpec.
    """
    layer_windows = windows or (0,) * num_layers
    attention = Attention(
        hidden=hidden_size, eps=rms_norm_eps, heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim, rope=rope,
        qk_norm=qk_norm, bias=qkv_bias,
    )  # fmt: skip
    mixers = {window: replace(attention, window=window) for window in set(layer_windows)}
    mlp = MLP(hidden=hidden_size, eps=rms_norm_eps, intermediate=intermediate_size)
    return ModelSpec(
        family=family,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position=max_position,
        layers=tuple(Layer(mixers[window], mlp) for window in layer_windows),
        eps=rms_norm_eps,
        **more,
    )


def parse_dense(
    read: ConfigReader, family: str, qk_norm: bool = False, qkv_bias: bool = False, windows: str = "none"
) -> ModelSpec:
    """Check the keys of a config.json and return the specification.

    Reads files written by transformers 4 (rope_theta and rope_scaling, torch_dtype) and 5 (rope_parameters, dtype).

    Args:
        qk_norm, qkv_bias: properties of the family that config.json does not contain.
        windows: the layers with a sliding window. "none": no layer. "all": every layer, unless sliding_window is null.
            The others apply if use_sliding_window is true. "used": every layer. "upper": the layers from
            max_window_layers on. "even": the layers below it with even numbers. With the last two, layer_types may list
            other layers.

    Raises:
        CheckpointError: one line with the key and the expected value.
    """
    refuse_other_layers(read)
    sizes = read_sizes(read)
    rope, notes = read_rope(read, sizes)
    sizes["max_position"] = rope.max_position(sizes["max_position"])
    bos = read.token_ids("bos_token_id", sizes["vocab_size"])
    return dense_spec(
        family=family,
        **sizes,
        rms_norm_eps=read.number("rms_norm_eps", 1e-30, 1, default=1e-6),
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        windows=_windows(read, family, windows, sizes["num_layers"], sizes["max_position"]),
        rope=rope,
        dtype=read_dtype(read),
        bos_id=bos[0] if bos else None,
        notes=notes,
    )


def refuse_other_layers(read: ConfigReader) -> None:
    """Raise CheckpointError for activations and biases that no block computes."""
    if (activation := read.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(
            f'{read.source}: hidden_act must be "silu", got {as_json(activation)}: this model\'s MLP is not supported'
        )
    for key, where in (("attention_bias", "o_proj"), ("mlp_bias", "the MLP's projections")):
        if read.flag(key):
            raise CheckpointError(f"{read.source}: {key} must be false, got true: a bias on {where} is not supported")


def read_sizes(read: ConfigReader) -> dict[str, int]:
    """Return the sizes of the model, as arguments of `dense_spec`."""
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
        raise read.fail(
            "head_dim", f"given, since hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    head_dim = read.integer("head_dim", 1, 2**16, default=hidden // heads)
    if head_dim % 16 or head_dim > 256:
        raise CheckpointError(
            f"{read.source}: head_dim (hidden_size / num_attention_heads where absent) must be a multiple of 16 "
            f"up to 256, got {head_dim}"
        )
    sizes["head_dim"] = head_dim
    return sizes


def _windows(read: ConfigReader, family: str, windows: str, num_layers: int, max_position: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 for full attention.

    A window that covers the whole context also counts as full attention.
    """
    window, sliding = None, range(0)
    if windows == "all" and read.values.get("sliding_window", MISTRAL_WINDOW) is not None:
        window, sliding = read.integer("sliding_window", 1, 2**31 - 1, default=MISTRAL_WINDOW), range(num_layers)
    if windows in ("used", "upper", "even") and read.flag("use_sliding_window"):
        window = read.integer("sliding_window", 1, 2**31 - 1)
        first = read.integer("max_window_layers", 0, 2**31 - 1, default=28)
        chosen = {"used": range(num_layers), "upper": range(first, num_layers), "even": range(0, first, 2)}
        sliding = chosen[windows]
    types = tuple("sliding_attention" if i in sliding else "full_attention" for i in range(num_layers))
    if (kinds := read.get("layer_types")) is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise read.fail("layer_types", f"a list of {num_layers} (num_hidden_layers) out of {', '.join(known)}")
        if windows not in ("upper", "even") and tuple(kinds) != types:
            raise CheckpointError(
                f"{read.source}: layer_types must be all {types[0]} in a {family} model with sliding_window "
                f"{as_json(window)}; remove the key"
            )
        if "sliding_attention" in kinds and window is None:
            raise read.fail("sliding_window", "set, with use_sliding_window true, since layer_types has sliding layers")
        types = tuple(kinds)
    if window is None or window >= max_position or "sliding_attention" not in types:
        return (0,) * num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def read_rope(read: ConfigReader, sizes: dict[str, int], partial: float = 1.0) -> tuple[RopeConfig, tuple[str, ...]]:
    """Return the settings in rope_parameters, or in rope_scaling and rope_theta, and notes for the user.

    A note names the keys without effect.

    Args:
        sizes: as `read_sizes` returns them.
        partial: default of partial_rotary_factor. If it is 1, other values are refused.
    """
    keys = [key for key in ("rope_parameters", "rope_scaling") if read.get(key) is not None]
    if len(keys) == 2 and read.values[keys[0]] != read.values[keys[1]]:
        raise CheckpointError(
            f"{read.source}: rope_parameters and rope_scaling contradict each other; remove rope_scaling, "
            "and put its keys into rope_parameters, next to rope_theta"
        )
    key = keys[0] if keys else "rope_parameters"
    rope = read.under(key)
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise CheckpointError(
                f"{read.source}: {key} holds an object, {shown(name)}: "
                "rotary embeddings that differ between layers are not supported"
            )
    kinds = [rope.values[name] for name in ("rope_type", "type") if name in rope.values]
    kind = kinds[0] if kinds else "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{read.source}: {rope.prefix}rope_type must be one of {', '.join(ROPE_KINDS)}, got {as_json(kind)}: "
            "other rotary embeddings are not supported"
        )
    for reader in (read, rope):
        if (share := reader.get("partial_rotary_factor", partial)) != 1 and partial == 1:
            raise CheckpointError(
                f"{read.source}: {reader.prefix}partial_rotary_factor must be 1, got {as_json(share)}: "
                "partial rotary embeddings are not supported in this family"
            )
    share = rope.number("partial_rotary_factor", 0.01, 1, default=read.get("partial_rotary_factor", partial))
    if (columns := int(sizes["head_dim"] * share)) % 2 or columns < 4:
        expected = f"a share of head_dim ({sizes['head_dim']}) that has an even number of columns, at least 4"
        raise rope.fail("partial_rotary_factor", expected)
    owner = rope if "rope_theta" in rope.values else read
    # The value null is an error.
    theta = owner.number("rope_theta", 1, 1e30) if "rope_theta" in owner.values else 10000.0
    if kind == "yarn" and theta == 1:
        raise owner.fail("rope_theta", "above 1 with rope_type yarn")
    config = RopeConfig(theta=theta, kind=kind, partial=share, **_scaling(read, rope, kind, sizes["max_position"]))
    known = (*_COMMON_ROPE_KEYS, *ROPE_KINDS[kind])
    unknown = [(name, value) for name, value in rope.values.items() if name not in known and value is not None]
    named = ", ".join(f"{shown(name)} {as_json(value)}" for name, value in unknown)
    unused = [f"{key}: {brief(named)}"] if named else []
    if read.get(_DUAL_CHUNKS):
        unused.append(_DUAL_CHUNKS)
    text = "without effect, as in transformers; answers may differ from those of other programs"
    return config, tuple(f"{read.source}: {read.prefix}{each}: {text}" for each in unused)


def _scaling(read: ConfigReader, rope: ConfigReader, kind: str, max_position: int) -> dict[str, Any]:
    """Return the fields of RopeConfig that describe how the context is extended."""
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": rope.number("factor", 1, 1e5), "original_max_position": max_position}
    owner = read if read.get("original_max_position_embeddings") is not None else rope  # As in transformers.
    original = owner.integer("original_max_position_embeddings", 1, 2**31 - 1, default=max_position)
    low_key, high_key = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    low = rope.number(low_key, 1e-4, 1e4, default=1.0 if kind == "yarn" else None)
    high = rope.number(high_key, 1e-4, 1e4, default=32.0 if kind == "yarn" else None)
    if high <= low:
        raise rope.fail(high_key, f"above {low_key} ({low:g})")
    implied = max(max_position / original, 1.0) if kind == "yarn" and "factor" in rope.values else None
    factor = rope.number("factor", 1, 1e5, default=implied)  # null means `implied`.
    fields = dict(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original)
    if kind == "yarn":
        fields |= dict(attention_factor=_attention_factor(rope, factor), truncate=rope.flag("truncate", default=True))
    return fields


def _attention_factor(rope: ConfigReader, factor: float) -> float:
    """Return the factor of cosines and sines of "yarn": attention_factor, or else the one of the YaRN paper."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor", 1e-4, 1e4)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    mscale, of_all = (rope.number(name, 0, 1e4, default=0.0) for name in ("mscale", "mscale_all_dim"))
    return magnitude(mscale) / magnitude(of_all) if mscale and of_all else magnitude(1.0)


def read_dtype(read: ConfigReader) -> str:
    """Return the dtype of the checkpoint."""
    key = "dtype" if read.get("dtype") is not None else "torch_dtype"
    name = read.get(key, "bfloat16")
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in DTYPES:
        raise read.fail(key, f"one of {', '.join(DTYPES)}")
    return name
