"""ModelSpec: a model as data. Families and checkpoints differ in it; the rest of the engine reads it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .block import Block
from .declarations import Linear, Pages, Part, Weight

if TYPE_CHECKING:
    from ..checkpoint.formats.scheme import Quantization

NORM_NAMES = ("mixer_norm", "ffn_norm")  # of the norms before the two blocks of a layer


@dataclass(frozen=True)
class Layer:
    """One decoder layer. mixer: a block that mixes positions, such as attention; ffn: a feed-forward block, or None."""

    mixer: Block
    ffn: Block | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.mixer,) if self.ffn is None else (self.mixer, self.ffn)

    def declarations(self) -> tuple[Linear | Weight, ...]:
        """The norms before the blocks, and the blocks' linears and weights, in the order in which a pass reads them."""
        found: list[Linear | Weight] = []
        for name, block in zip(NORM_NAMES, self.blocks):
            last = [linear for linear in block.linears() if linear.epilogue == "residual"]
            first = [linear for linear in block.linears() if linear not in last]
            found += [Weight(name, f"{block.norm}.weight", (block.hidden,)), *first, *block.weights(), *last]
        return tuple(found)

    def linears(self) -> tuple[Linear, ...]:
        return tuple(each for each in self.declarations() if isinstance(each, Linear))

    def weights(self) -> tuple[Weight, ...]:
        """The norms before the blocks, and the blocks' own tensors."""
        return tuple(each for each in self.declarations() if isinstance(each, Weight))

    def pages(self) -> Pages | None:
        states = [state for block in self.blocks for state in block.states()]
        return states[0] if states else None


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model.

    max_position: the longest context. eps: of the final norm. prefix: of all tensor names but the LM head's.
    logits_scale: a factor of the logits, which the loader multiplies into the final norm's weight. dtype: the
    checkpoint's own, "bfloat16", "float16" or "float32". stop_ids: the tokens that end an answer, by config.json and
    generation_config.json. generation_defaults: pairs of a SamplingParams field and its value. quantization: of the
    checkpoint's weights. quantize: what the other weights become while they are loaded. fp8_kv: K and V have 8 bits,
    else the weights' dtype.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[Layer, ...]
    eps: float = 1e-6
    tie_word_embeddings: bool = False
    prefix: str = "model."
    logits_scale: float = 1.0
    dtype: str = "bfloat16"
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    generation_defaults: tuple[tuple[str, float], ...] = ()
    quantization: "Quantization | None" = None
    quantize: "Quantization | None" = None
    fp8_kv: bool = False

    @property
    def embed(self) -> Weight:
        return Weight("embed", f"{self.prefix}embed_tokens.weight", (self.vocab_size, self.hidden_size))

    @property
    def final_norm(self) -> Weight:
        return Weight("final_norm", f"{self.prefix}norm.weight", (self.hidden_size,), self.logits_scale)

    @property
    def lm_head(self) -> Linear:
        parts = () if self.tie_word_embeddings else (Part("lm_head", self.vocab_size),)
        return Linear("lm_head", self.vocab_size, self.hidden_size, parts, "normed")

    def layer_prefix(self, index: int) -> str:
        """What the names of a layer's tensors begin with in the checkpoint."""
        return f"{self.prefix}layers.{index}."

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def blocks(self) -> tuple[Block, ...]:
        """Return the distinct blocks in the order of the layers, each before the blocks inside it."""
        return tuple(dict.fromkeys(each for layer in self.layers for b in layer.blocks for each in (b, *b.inner())))

    def linears(self) -> Iterator[Linear]:
        """Yield the linears of all layers, then the LM head."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.lm_head

    @cached_property
    def pages(self) -> Pages:
        """The pages that all layers with K and V share in form."""
        found = {pages for layer in self.layers if (pages := layer.pages())}
        assert len(found) == 1, f"layers with pages of one form are supported, got {len(found)}"
        return found.pop()

    @cached_property
    def page_layers(self) -> int:
        """Layers that have pages. The lists of passes read it in every layer."""
        return sum(layer.pages() is not None for layer in self.layers)

    @property
    def few_bits(self) -> str | None:
        """The method by which weights are quantized, or None."""
        which = self.quantization or self.quantize
        return which and which.method
