"""ModelConfig: what a checkpoint's config.json says, as frozen data. Families differ in flags, not in classes."""

from dataclasses import dataclass


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
    """One decoder-only model. Sizes are element counts; `layer_types` has one entry a layer."""

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
