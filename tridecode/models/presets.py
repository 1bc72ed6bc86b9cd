"""Sizes of public models, for benchmarks with random weights. Source: each model's published config.json."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..blocks.spec import ModelSpec

Fields = dict[str, Any]  # Arguments of dense_spec or RopeConfig.

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


class Presets(Mapping[str, "ModelSpec"]):
    """Mapping from name to ModelSpec. Listing the names does not import torch, so `--help` is fast."""

    def __getitem__(self, name: str) -> "ModelSpec":
        return _spec(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PRESETS)

    def __len__(self) -> int:
        return len(_PRESETS)


@cache
def _spec(name: str) -> "ModelSpec":
    """Build a preset."""
    from ..blocks.rope import RopeConfig
    from .dense import dense_spec

    fields = _PRESETS[name]
    return dense_spec(**fields | {"rope": RopeConfig(**fields["rope"])})


PRESETS = Presets()
