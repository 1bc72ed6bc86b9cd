"""Sizes of public models, for benchmarks with random weights. Source: each model's published config.json."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..blocks.spec import ModelSpec

GGUF_TYPES = ("q4_k_m", "q8_0")  # Types of GGUF files that random weights can have.
Fields = dict[str, Any]  # Arguments of dense_spec or RopeConfig, or keys of config.json.

_ROPE = dict(theta=1e6)
_LLAMA3 = dict(family="llama", vocab_size=128256, rms_norm_eps=1e-5, max_position=131072)
_QWEN3 = dict(
    family="qwen3", vocab_size=151936, qk_norm=True, head_dim=128, num_kv_heads=8, max_position=40960, rope=_ROPE
)
_QWEN2 = dict(family="qwen2", qkv_bias=True, max_position=32768, rope=_ROPE)
_MISTRAL = dict(family="mistral", vocab_size=32768, rms_norm_eps=1e-5, max_position=32768, rope=_ROPE)


def _rope3(factor: float) -> Fields:
    """Return the rotary settings of Llama 3.1 and later."""
    return dict(theta=500000.0, kind="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)


def _sizes(base: Fields, hidden: int, inter: int, layers: int, heads: int, **more: Any) -> Fields:
    """Return the fields of a preset."""
    return base | dict(hidden_size=hidden, intermediate_size=inter, num_layers=layers, num_heads=heads) | more


_PRESETS = {
    "qwen3-0.6b": _sizes(_QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _sizes(_QWEN3, 2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _sizes(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _sizes(_QWEN3, 4096, 12288, 36, 32),
    "qwen3-14b": _sizes(_QWEN3, 5120, 17408, 40, 40),
    "llama-3.2-1b": _sizes(
        _LLAMA3, 2048, 8192, 16, 32, num_kv_heads=8, head_dim=64, rope=_rope3(32.0), tie_word_embeddings=True
    ),
    "llama-3.2-3b": _sizes(
        _LLAMA3, 3072, 8192, 28, 24, num_kv_heads=8, head_dim=128, rope=_rope3(32.0), tie_word_embeddings=True
    ),
    "llama-3.1-8b": _sizes(_LLAMA3, 4096, 14336, 32, 32, num_kv_heads=8, head_dim=128, rope=_rope3(8.0)),
    "qwen2.5-0.5b": _sizes(
        _QWEN2, 896, 4864, 24, 14, num_kv_heads=2, head_dim=64, vocab_size=151936, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _sizes(_QWEN2, 3584, 18944, 28, 28, num_kv_heads=4, head_dim=128, vocab_size=152064),
    "mistral-7b": _sizes(_MISTRAL, 4096, 14336, 32, 32, num_kv_heads=8, head_dim=128),
}


_QWEN3_5 = dict(
    vocab_size=248320, head_dim=256, max_position_embeddings=262144,
    rope_parameters=dict(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25),
)  # fmt: skip


def _hybrid(
    hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, tied: bool = False, **more: Any
) -> Fields:
    """Return the config.json of a Qwen3.5 model."""
    text = _QWEN3_5 | dict(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
    )  # fmt: skip
    kind = "Qwen3_5Moe" if "num_experts" in more else "Qwen3_5"
    return dict(architectures=[f"{kind}ForConditionalGeneration"], text_config=text | more, tie_word_embeddings=tied)


def _qwen3_moe(positions: int, theta: float) -> Fields:
    """Return the config.json of a Qwen3 model of 30B parameters with experts."""
    return dict(
        architectures=["Qwen3MoeForCausalLM"], vocab_size=151936, hidden_size=2048, intermediate_size=6144,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        max_position_embeddings=positions, rope_theta=theta, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True,
    )  # fmt: skip


# Each value has the form of a config.json.
_CONFIGS = {
    "qwen3.5-0.8b": _hybrid(1024, 24, 8, 2, 16, tied=True, intermediate_size=3584),
    "qwen3.5-2b": _hybrid(2048, 24, 8, 2, 16, tied=True, intermediate_size=6144),
    "qwen3.5-4b": _hybrid(2560, 32, 16, 4, 32, tied=True, intermediate_size=9216),
    "qwen3.5-9b": _hybrid(4096, 32, 16, 4, 32, intermediate_size=12288),
    "qwen3.5-27b": _hybrid(5120, 64, 24, 4, 48, intermediate_size=17408),
    "qwen3-30b-a3b": _qwen3_moe(40960, 1e6),
    "qwen3-coder-30b-a3b": _qwen3_moe(262144, 1e7),
    "qwen3.6-35b-a3b": _hybrid(
        2048, 40, 16, 2, 32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "qwen3-next-80b-a3b": dict(
        architectures=["Qwen3NextForCausalLM"], vocab_size=151936, hidden_size=2048, intermediate_size=5120,
        num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        max_position_embeddings=262144, rope_theta=1e7, partial_rotary_factor=0.25, linear_num_value_heads=32,
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        norm_topk_prob=True,
    ),
}  # fmt: skip


class Presets(Mapping[str, "ModelSpec"]):
    """Mapping from name to ModelSpec. Listing the names does not import torch, so `--help` is fast."""

    def __getitem__(self, name: str) -> "ModelSpec":
        return _spec(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*_PRESETS, *_CONFIGS))

    def __len__(self) -> int:
        return len(_PRESETS) + len(_CONFIGS)


@cache
def _spec(name: str) -> "ModelSpec":
    """Build a preset."""
    from ..blocks.rope import RopeConfig
    from .dense import dense_spec
    from .reader import ConfigReader
    from .registry import parse_model

    if name in _CONFIGS:
        return parse_model(ConfigReader(dict(_CONFIGS[name]), name))
    fields = _PRESETS[name]
    return dense_spec(**fields | {"rope": RopeConfig(**fields["rope"])})


PRESETS = Presets()
