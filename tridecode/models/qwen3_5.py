"""Qwen3.5, 3.6 and 3.8: layers with a gated delta net, and every few layers full attention with a gated output.

Only the text model is built: the vision model and the layer that predicts several tokens are skipped.
"""

from dataclasses import replace
from typing import Any

from ..blocks.attention import Attention
from ..blocks.block import Block
from ..blocks.gated_delta import GatedDelta
from ..blocks.mlp import MLP
from ..blocks.spec import Layer, ModelSpec
from .dense import read_dtype, read_rope, read_sizes, refuse_other_layers
from .experts import with_experts
from .reader import ConfigReader

SKIPPED = ("model.visual.", "mtp.")
KINDS = ("linear_attention", "full_attention")
PARTIAL = 0.25  # default share of the columns that are rotated
MATRIX = 128 * 128  # largest matrix of a head that the kernels keep in registers


def parse(read: ConfigReader) -> ModelSpec:
    """Return the specification that a config.json describes. Raises CheckpointError.

    The keys of the text model are under text_config, or, in a checkpoint without a vision model, at the top.
    """
    whole, nested = read, read.get("text_config") is not None
    if nested:
        above = {key: value for key, value in read.values.items() if key in ("dtype", "torch_dtype")}
        text = {**above, **read.under("text_config").values}
        read = ConfigReader(text, read.source, "text_config.")
    if experts := "num_experts" in read.values:
        read.values.setdefault("intermediate_size", 1)  # There is no MLP.
    spec = parse_hybrid(read, "qwen3_5_moe" if experts else "qwen3_5")
    spec = with_experts(read, spec, shared=True, normalize=True) if experts else spec
    return replace(
        spec,
        tie_word_embeddings=whole.flag("tie_word_embeddings") or spec.tie_word_embeddings,
        prefix="model.language_model." if nested else spec.prefix,
    )


def parse_hybrid(read: ConfigReader, family: str, **grouped: bool) -> ModelSpec:
    """Return the specification with an MLP in every layer. Raises CheckpointError.

    Args:
        grouped: grouped_qkvz and grouped_ba of GatedDelta.
    """
    refuse_other_layers(read)
    read.values.setdefault("head_dim", 256)
    sizes = read_sizes(read)
    rope, notes = read_rope(read, sizes, PARTIAL)
    eps = read.number("rms_norm_eps", 1e-30, 1, default=1e-6)
    common: dict[str, Any] = dict(hidden=sizes["hidden_size"], eps=eps, norm_offset=1.0)
    attention = Attention(
        **common, heads=sizes["num_heads"], kv_heads=sizes["num_kv_heads"], head_dim=sizes["head_dim"],
        rope=rope, qk_norm=True, gate=read.flag("attn_output_gate", default=True),
    )  # fmt: skip
    mixers: dict[str, Block] = {"full_attention": attention, "linear_attention": _delta(read, common | grouped)}
    mlp = MLP(**common, intermediate=sizes["intermediate_size"])
    bos = read.token_ids("bos_token_id", sizes["vocab_size"])
    return ModelSpec(
        family=family,
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        max_position=rope.max_position(sizes["max_position"]),
        layers=tuple(Layer(mixers[kind], mlp) for kind in _kinds(read, sizes["num_layers"])),
        eps=eps,
        tie_word_embeddings=read.flag("tie_word_embeddings"),
        dtype=read_dtype(read),
        bos_id=bos[0] if bos else None,
        notes=notes,
        norm_offset=1.0,
        skipped=SKIPPED,
    )


def _kinds(read: ConfigReader, layers: int) -> list[str]:
    """Return the kind of each layer."""
    if (kinds := read.get("layer_types")) is None:
        interval = read.integer("full_attention_interval", 1, 2**31 - 1, default=4)
        kinds = [KINDS[(i + 1) % interval == 0] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in KINDS for kind in kinds):
        raise read.fail("layer_types", f"a list of {layers} (num_hidden_layers) out of {', '.join(KINDS)}")
    if "full_attention" not in kinds:
        raise read.fail("layer_types", "a list with at least one full_attention")
    return kinds


def _delta(read: ConfigReader, common: dict[str, Any]) -> GatedDelta:
    """Return the block of the layers without full attention."""
    keys = read.integer("linear_num_key_heads", 1, 4096, default=16)
    values = read.integer("linear_num_value_heads", 1, 4096, default=32)
    if values % keys:
        raise read.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({keys})")
    key_dim, value_dim = _power(read, "linear_key_head_dim"), _power(read, "linear_value_head_dim")
    if key_dim * value_dim > MATRIX:
        raise read.fail("linear_value_head_dim", f"at most {MATRIX // key_dim} with linear_key_head_dim {key_dim}")
    read.choice("mamba_ssm_dtype", ("float32",), "float32")
    gate = read.choice("output_gate_type", ("swish", "sigmoid"), "swish")
    return GatedDelta(
        **common, key_heads=keys, value_heads=values, key_dim=key_dim, value_dim=value_dim,
        width=read.integer("linear_conv_kernel_dim", 2, 8, default=4), sigmoid=gate == "sigmoid",
        tiled=read.flag("linear_value_heads_tiled"),  # No config.json has this key; gguf_config.py sets it.
    )  # fmt: skip


def _power(read: ConfigReader, key: str) -> int:
    """Return the size of a head."""
    size = read.integer(key, 16, 1024, default=128)
    if size & (size - 1):
        raise read.fail(key, "a power of two")
    return size
