"""Block: one part of a layer (a mixer or a feed-forward), and the interface between blocks and passes."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch

from ..kernels.attention.arguments import KVLayer, Rope, Scratch
from ..kernels.attention.prompt_attention import PromptAttentionConfig
from ..kernels.delta.arguments import DraftRows, RecordLayer
from ..kernels.delta.delta_chunks import DeltaChunksConfig
from ..kernels.delta.delta_decode import DeltaConfig
from ..kernels.delta.prompt_tables import PromptTables
from ..kernels.linear.adapters import LinearAdapters
from ..kernels.linear.expand import EXPAND
from ..kernels.linear.project import NAMES, AddResidual, Epilogue, LinearKernel, Plain
from ..kernels.linear.shrink import SHRINK, ShrinkConfig
from ..kernels.linear.weight import LoadedLinear
from ..kernels.moe.config import ExpertsConfig
from ..kernels.op import Op
from .declarations import Buffer, Linear, Pages, Recurrent, Weight

if TYPE_CHECKING:
    from .attention import Attention
    from .moe import MoE

Run = Callable[..., None]  # run(role, op, *arguments, **options) executes one launch of a list; see step/run.py.


class Residual(NamedTuple):
    """The residual stream between two blocks of a decode pass.

    Args:
        hidden: fp32 [rows, hidden], the stream itself.
        normed: [rows, hidden], hidden * the weight of the block's norm. The division by the root mean square follows in
            the linear.
        sumsq: fp32 [rows, hidden]. Its first `partials` columns are partial sums of hidden ** 2.
        partials: number of partial sums.
        next_norm: weight of the norm after the block. The loop over blocks sets it.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    sumsq: torch.Tensor
    partials: int = 0
    next_norm: torch.Tensor | None = None


class PromptResidual(NamedTuple):
    """The residual stream between two blocks of a prompt pass.

    Args:
        hidden: fp32 [rows, hidden], the stream itself.
        normed: [rows, hidden], the normalized rows.
        pending: the tensor that the next norm adds to hidden, or None.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    pending: torch.Tensor | None = None


@dataclass(frozen=True)
class LoadedLayer:
    """A layer of the model with its tensors.

    Args:
        index: number of the layer.
        linears, weights: the tensors by their declared names.
        pages: index of the layer among the layers that have pages, or None for a layer without pages.
        recurrent: index of the layer among the layers with recurrent state, or None for a layer without it.
    """

    index: int
    linears: Mapping[str, LoadedLinear]
    weights: Mapping[str, torch.Tensor]
    pages: int | None = None
    recurrent: int | None = None

    def __repr__(self) -> str:
        names = ", ".join([*self.weights, *self.linears])
        return f"LoadedLayer(index={self.index}, weights={names}, pages={self.pages})"

    @property
    def page_index(self) -> int:
        """The value of `pages`, for a layer that has pages."""
        assert self.pages is not None
        return self.pages


class AttentionPlan(NamedTuple):
    """The attention kernel of a decode pass. writes_first: a separate launch writes K and V before attention."""

    op: Op
    config: object
    writes_first: bool = False


class AdaptedLinear(NamedTuple):
    """The adapters of a linear in a pass, and the launch config of `shrink`."""

    adapters: LinearAdapters
    config: ShrinkConfig


class Chosen(Protocol):
    """A kernel for a linear and its launch config (tuning/configs.py: Choice)."""

    @property
    def kernel(self) -> LinearKernel:
        """The kernel."""
        ...

    @property
    def config(self) -> object:
        """The launch config of the kernel."""
        ...

    def partials(self, n: int) -> int:
        """Return the number of partial sums of squares that the kernel writes for n rows of the weight."""
        ...


class PassState(Protocol):
    """The view that blocks have of a decode or prompt pass. step/model.py implements it."""

    @property
    def meta(self) -> torch.Tensor:
        """State of the rows."""
        ...

    @property
    def scratch(self) -> object:
        """Scratch buffers of the linears."""
        ...

    def buffers(self, block: "Block") -> Mapping[str, torch.Tensor]:
        """Return the activations that the block declares, by their names."""
        ...

    def choice(self, linear: LoadedLinear, epilogue: str) -> Chosen:
        """Return the kernel and launch config for a linear and an epilogue."""
        ...

    def adapters(self, layer: LoadedLayer, name: str) -> AdaptedLinear | None:
        """Return the adapters of a linear. None in a pass without adapters."""
        ...

    def experts(self, block: "MoE", layer: LoadedLayer) -> ExpertsConfig:
        """Return the launch configs of a mixture of experts in a layer."""
        ...

    def kv_layer(self, layer: LoadedLayer) -> KVLayer:
        """Return the K/V of a layer."""
        ...

    def rope(self, block: "Attention", layer: LoadedLayer) -> Rope:
        """Return the rotary tables and the q/k norms of a layer."""
        ...

    def records(self, layer: LoadedLayer) -> RecordLayer:
        """Return the records of a layer, which store its states."""
        ...

    def wait_for_pages(self, run: Run, layer: LoadedLayer) -> None:
        """If there is a ring, list the wait for the pages of this layer that are copied from host memory."""
        ...

    def fetch_next_pages(self, run: Run, layer: LoadedLayer) -> None:
        """If there is a ring, list a fetch into the ring buffer that this layer has finished reading."""
        ...


class PromptRows(Protocol):
    """The activations of a prompt pass that `Block.resume` reads."""

    @property
    def hidden(self) -> torch.Tensor:
        """The residual stream, fp32 [rows, hidden]."""
        ...

    def buffers(self, block: "Block") -> Mapping[str, torch.Tensor]:
        """Return the activations that the block declares, by their names."""
        ...


class DecodeState(PassState, Protocol):
    """The view that blocks have of a decode pass."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def prompt(self) -> PromptRows:
        """The prompt pass whose last layer `Block.resume` completes."""
        ...

    def attention(self, block: "Attention") -> AttentionPlan:
        """Return the attention kernel for the rows of this pass."""
        ...

    def draft_rows(self, layer: LoadedLayer) -> DraftRows | None:
        """Return the buffers for updates of a layer's recurrent state by drafts. None if the engine has no drafts."""
        ...

    @property
    def delta_config(self) -> DeltaConfig:
        """The launch config of gated delta net layers."""
        ...


class PromptState(PassState, Protocol):
    """Tensors and settings of a prompt pass that blocks read."""

    @property
    def chunks(self) -> torch.Tensor:
        """The table of chunks, int32."""
        ...

    @property
    def delta(self) -> torch.Tensor:
        """The output of a block, [rows, hidden], which the next norm adds to the residual stream."""
        ...

    @property
    def decoding(self) -> DecodeState | None:
        """The decode pass of the first rows. None if no rows decode."""
        ...

    @property
    def attention_config(self) -> PromptAttentionConfig:
        """The launch config of prompt attention."""
        ...

    @property
    def attention_scratch(self) -> Scratch:
        """Scratch buffers of prompt attention."""
        ...

    @property
    def tables(self) -> PromptTables:
        """The tables that layers with recurrent state read in this pass."""
        ...

    @property
    def delta_configs(self) -> tuple[DeltaChunksConfig, DeltaChunksConfig]:
        """The launch configs of delta_chunks and delta_scan."""
        ...

    def expanded(self, block: "Attention", q: torch.Tensor, kv: KVLayer) -> KVLayer | None:
        """Return buffers for fp8 K/V expanded to 16 bits, or None if attention reads `kv` itself."""
        ...


@dataclass(frozen=True, kw_only=True)
class Block:
    """Settings of one block of a layer, and its launches. A kind of block is a subclass in a file of its own.

    Args:
        hidden: size of the residual stream.
        eps: epsilon of the norm before the block.
        norm: module of that norm in the checkpoint.
        residual_scale: factor of the block's output. The loader multiplies it into the weights.
        norm_offset: number that the loader adds to the weights of the block's norms: 1 if they are zero-centered.
    """

    hidden: int
    eps: float = 1e-6
    norm: str = "input_layernorm"
    residual_scale: float = 1.0
    norm_offset: float = 0.0

    # Whether a prompt pass may stop in the last layer after `prompt_start`. Then `resume` completes the layer in the
    # form
    # of a decode pass, for the rows whose next token is sampled. A block whose state would change in a second run must
    # set this to False.
    cuts_prompt: ClassVar[bool] = False

    @property
    def reordered(self) -> bool:
        """Whether rows or columns have another order than in a Hugging Face checkpoint, which no part describes."""
        return False

    def stored_as(self, tensors: Container[str], prefix: str) -> "Block":
        """Return the block that names the tensors of a checkpoint, for blocks that are stored in several ways."""
        return self

    def quantized_as(self, scheme: Callable[[str], object], prefix: str) -> "Block":
        """Return the block that suits the schemes of its modules in a checkpoint. prefix: the layer's prefix there."""
        return self

    def inner(self) -> tuple["Block", ...]:
        """Return the blocks that this block calls. It declares their linears, weights and states as its own."""
        return ()

    def linears(self) -> tuple[Linear, ...]:
        """Return the block's linears."""
        return ()

    def weights(self) -> tuple[Weight, ...]:
        """Return the tensors that are not linears, without the norm before the block."""
        return ()

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a decode pass."""
        return ()

    def prompt_buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a prompt pass."""
        return ()

    def states(self) -> tuple[Pages | Recurrent, ...]:
        """Return the declarations of the state that a request keeps between passes."""
        return ()

    def attention_flops(self, start: int, end: int) -> int:
        """Return the floating-point operations in which the tokens at positions start to end - 1 attend to others."""
        return 0

    def decode(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List the block's launches in a decode pass."""
        raise NotImplementedError

    def prompt(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> PromptResidual:
        """List the block's launches in a prompt pass."""
        raise NotImplementedError

    def prompt_start(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> None:
        """List the launches of a prompt pass up to the K and V of this layer.

        Only blocks with `cuts_prompt` have this.
        """
        raise NotImplementedError

    def resume(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List the rest of the block after `prompt_start`, as in a decode pass, for the rows that sample a token."""
        raise NotImplementedError


def project(
    run: Run, state: PassState, layer: LoadedLayer, name: str, x: torch.Tensor, out: torch.Tensor, epilogue: Epilogue
) -> None:
    """Multiply x by the layer's linear `name`, into out. In a pass with adapters, add those of the rows."""
    linear = layer.linears[name]
    choice = state.choice(linear, NAMES[type(epilogue)])
    arguments: tuple[object, ...] = (state.meta, x, linear, out, epilogue, state.scratch)
    adapted = state.adapters(layer, name)
    if adapted is None:
        run(name, choice.kernel.op, *arguments, config=choice.config)
        return
    run(f"{name}_shrink", SHRINK, x, adapted.adapters, config=adapted.config)
    if choice.kernel.adapts(choice.config):
        run(name, choice.kernel.op, *arguments, adapted.adapters, config=choice.config)
    else:
        assert isinstance(epilogue, Plain), f"{choice.kernel.name} cannot add adapters before its epilogue"
        run(name, choice.kernel.op, *arguments, config=choice.config)
        run(f"{name}_expand", EXPAND, out, adapted.adapters)


def add_residual(
    run: Run, state: PassState, layer: LoadedLayer, name: str, x: torch.Tensor, residual: Residual
) -> Residual:
    """Add the product of x and the layer's linear `name` to the residual stream, and prepare the next norm."""
    linear = layer.linears[name]
    assert residual.next_norm is not None
    epilogue = AddResidual(residual.next_norm, residual.normed, residual.sumsq)
    project(run, state, layer, name, x, residual.hidden, epilogue)
    return residual._replace(partials=state.choice(linear, NAMES[type(epilogue)]).partials(linear.out_features))
