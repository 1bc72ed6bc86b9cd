"""ModelSpec: the description of a model. A family creates it from config.json, and the rest of the engine reads it."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .block import Block
from .declarations import Linear, Pages, Part, Recurrent, Weight, norm_weight

if TYPE_CHECKING:
    from ..checkpoint.quantization.scheme import Quantization

NORM_NAMES = ("mixer_norm", "ffn_norm")  # The norms before the two blocks of a layer.


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Args:
        mixer: the block that mixes positions, such as attention.
        ffn: the feed-forward block, or None.
    """

    mixer: Block
    ffn: Block | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the layer: the mixer, then the feed-forward block if there is one."""
        return (self.mixer,) if self.ffn is None else (self.mixer, self.ffn)

    def declarations(self) -> tuple[Linear | Weight, ...]:
        """Return the norms, linears and weights of the layer in the order in which a pass reads them."""
        declared: list[Linear | Weight] = []
        for name, block in zip(NORM_NAMES, self.blocks):
            last = [linear for linear in block.linears() if linear.epilogue == "residual"]
            first = [linear for linear in block.linears() if linear not in last]
            norm = norm_weight(name, f"{block.norm}.weight", block.hidden, block.norm_offset)
            declared += [norm, *first, *block.weights(), *last]
        return tuple(declared)

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears of the layer."""
        return tuple(each for each in self.declarations() if isinstance(each, Linear))

    def weights(self) -> tuple[Weight, ...]:
        """Return the weights of the norms and the other tensors that are not linears."""
        return tuple(each for each in self.declarations() if isinstance(each, Weight))

    def pages(self) -> Pages | None:
        """Return the declaration of the layer's pages, or None."""
        return next((state for state in self._states() if isinstance(state, Pages)), None)

    def recurrent(self) -> Recurrent | None:
        """Return the declaration of the layer's recurrent state, or None."""
        return next((state for state in self._states() if isinstance(state, Recurrent)), None)

    def _states(self) -> "Iterator[Pages | Recurrent]":
        return (state for block in self.blocks for state in block.states())


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model.

    Args:
        max_position: longest context, in tokens.
        layers: the layers in order.
        eps: epsilon of the final norm.
        prefix: prefix of every tensor name except the LM head's.
        embed_tensor: name of the embedding's tensor. "" means embed_tokens.weight with the prefix.
        logits_scale: factor of the logits. The loader multiplies it into the weight of the final norm.
        dtype: dtype of the checkpoint: "bfloat16", "float16" or "float32".
        stop_ids: tokens that end an answer, from config.json and generation_config.json. The engine adds that of the
            tokenizer.
        generation_defaults: pairs of a SamplingParams field and its value.
        notes: messages for the user about the checkpoint.
        checkpoint_quantization: the schemes in which the checkpoint stores its weights, from config.json, or None.
        load_quantization: the schemes in which the loader quantizes weights, from `--quantize`, or None.
        fp8_kv: K and V are stored in fp8 instead of the dtype of the weights.
        fp16_state: matrices of recurrent state are stored in fp16 instead of fp32.
        norm_offset: number that the loader adds to the weight of the final norm.
        skipped: prefixes of tensors of the checkpoint that the model does not use.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_position: int
    layers: tuple[Layer, ...]
    eps: float = 1e-6
    tie_word_embeddings: bool = False
    prefix: str = "model."
    embed_tensor: str = ""
    logits_scale: float = 1.0
    dtype: str = "bfloat16"
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    generation_defaults: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    checkpoint_quantization: "Quantization | None" = None
    load_quantization: "Quantization | None" = None
    fp8_kv: bool = False
    fp16_state: bool = False
    norm_offset: float = 0.0
    skipped: tuple[str, ...] = ()

    @property
    def embed(self) -> Weight:
        """Declaration of the embedding."""
        name = self.embed_tensor or f"{self.prefix}embed_tokens.weight"
        return Weight("embed", name, (self.vocab_size, self.hidden_size))

    @property
    def final_norm(self) -> Weight:
        """Declaration of the norm before the LM head."""
        name = f"{self.prefix}norm.weight"
        return norm_weight("final_norm", name, self.hidden_size, self.norm_offset, self.logits_scale)

    @property
    def lm_head(self) -> Linear:
        """Declaration of the LM head. It has no parts if it is tied to the embedding."""
        parts = () if self.tie_word_embeddings else (Part("lm_head", self.vocab_size),)
        return Linear("lm_head", self.vocab_size, self.hidden_size, parts, "normed")

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the tensor names of a layer in the checkpoint."""
        return f"{self.prefix}layers.{index}."

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(linear.experts for block in self.blocks() for linear in block.linears())

    @property
    def active_share(self) -> float:
        """Share of the linears' weights that a row uses: less than 1 if there are experts."""
        linears = [*self.linears()]
        idle = sum(each.n * each.k * (each.experts - each.active) // each.experts for each in linears if each.experts)
        return 1 - idle / sum(each.n * each.k for each in linears)

    def stored_as(self, tensors: Container[str]) -> "ModelSpec":
        """Return the specification of the same model whose blocks name the tensors that a checkpoint has."""
        return self._with_blocks(lambda block, prefix: block.stored_as(tensors, prefix))

    def quantized_as(self, scheme: Callable[[str], object]) -> "ModelSpec":
        """Return the specification of the same model whose blocks suit the schemes of a checkpoint's modules."""
        return self._with_blocks(lambda block, prefix: block.quantized_as(scheme, prefix))

    def _with_blocks(self, changed: Callable[[Block, str], Block]) -> "ModelSpec":
        """Return the specification with changed blocks. `changed` gets a block and the prefix of its layer."""
        layers = [
            Layer(*(changed(block, self.layer_prefix(i)) for block in layer.blocks))
            for i, layer in enumerate(self.layers)
        ]
        equal: dict[Layer, Layer] = {}  # Equal layers are one object, because blocks keep their declarations.
        return replace(self, layers=tuple(equal.setdefault(layer, layer) for layer in layers))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def blocks(self) -> tuple[Block, ...]:
        """Return the distinct blocks in the order of the layers. A block precedes the blocks that it contains."""
        return tuple(dict.fromkeys(each for layer in self.layers for b in layer.blocks for each in (b, *b.inner())))

    def linears(self) -> Iterator[Linear]:
        """Yield the linears of all layers, then the LM head."""
        for layer in self.layers:
            yield from layer.linears()
        yield self.lm_head

    @cached_property
    def pages(self) -> Pages:
        """The layout of a page, which is the same in all layers with K and V."""
        forms = {pages for layer in self.layers if (pages := layer.pages())}
        assert len(forms) == 1, f"only layers with equal pages are supported, got {len(forms)} forms of pages"
        return forms.pop()

    @cached_property
    def page_layers(self) -> int:
        """Number of layers that have pages. It is cached because passes read it in every layer."""
        return sum(layer.pages() is not None for layer in self.layers)

    @cached_property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """The recurrent state of the layers that have one, in their order."""
        return tuple(state for layer in self.layers if (state := layer.recurrent()))

    @property
    def quantization(self) -> "Quantization | None":
        """The schemes of the weights on the device, or None if no weight is quantized."""
        return self.checkpoint_quantization or self.load_quantization
