"""Block: what a layer consists of, and the contract between blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from ..kernels.attention.arguments import KVLayer, Rope
from ..kernels.linear.project import NAMES, AddResidual, Epilogue, LinearKernel
from ..kernels.linear.weight import LoadedLinear
from ..kernels.op import Op
from .declarations import Buffer, Linear, Pages, Weight

Run = Callable[..., None]  # run(role, op, *arguments, **how): executes one line of a list (step/run.py)


class Residual(NamedTuple):
    """The residual stream between two blocks.

    hidden: fp32 [rows, hidden], the stream itself. normed: [rows, hidden]: in a decode pass hidden * weight of the
    block's norm, in a prompt pass the normalized rows. sumsq: fp32 [rows, hidden], in a decode pass `partials` partial
    sums of the squares of hidden: readers divide by their root mean square. next_norm: the weight of the norm behind
    the block; the loop over blocks sets it. pending: in a prompt pass what the next norm adds to hidden, or None.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    sumsq: torch.Tensor | None = None
    partials: int = 0
    next_norm: torch.Tensor | None = None
    pending: torch.Tensor | None = None


@dataclass(frozen=True)
class LoadedLayer:
    """A layer of the model with its tensors.

    weights: name of each declared linear and weight -> its tensors. pages: which of the layers that have pages it is.
    """

    index: int
    weights: Mapping[str, LoadedLinear | torch.Tensor]
    pages: int | None = None

    def __repr__(self) -> str:
        return f"LoadedLayer(index={self.index}, weights={', '.join(self.weights)}, pages={self.pages})"


class AttentionPlan(NamedTuple):
    """How a decode pass attends. writes_first: K and V enter the cache in a launch of their own, before attention."""

    op: Op
    config: object
    writes_first: bool = False


class Chosen(Protocol):
    """A kernel for a linear and its launch config (tuning/configs.py: Choice)."""

    kernel: LinearKernel
    config: object

    def partials(self, n: int) -> int: ...


class PassState(Protocol):
    """What blocks see of a pass, be it a decode or a prompt pass; step/model.py implements it.

    meta: the state of its rows, None in a prompt pass. scratch: of its linears.
    """

    meta: torch.Tensor | None
    scratch: object

    def buffers(self, block: "Block") -> Mapping[str, torch.Tensor]: ...

    def choice(self, linear: LoadedLinear, epilogue: str) -> Chosen: ...

    def kv_layer(self, layer: LoadedLayer) -> KVLayer: ...

    def rope(self, block: "Block", layer: LoadedLayer) -> Rope: ...

    def wait_for_pages(self, run: Run, layer: LoadedLayer) -> None: ...

    def fetch_next_pages(self, run: Run, layer: LoadedLayer) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Block:
    """Settings of one block of a layer, and its launches. A kind of block is a subclass in a file of its own.

    hidden: size of the residual stream. eps: of the norm before the block, and norm: that norm's module in the
    checkpoint. residual_scale: a factor of what the block adds to the residual stream; the loader multiplies it in.
    """

    hidden: int
    eps: float = 1e-6
    norm: str = "input_layernorm"
    residual_scale: float = 1.0

    # Whether the prompt pass may leave the last layer after `prompt_start`: then `resume` ends the layer in decode
    # form, for the rows that want a token. A block whose state a second run would change runs whole.
    cuts_prompt: ClassVar[bool] = False

    def inner(self) -> tuple["Block", ...]:
        """Blocks whose launches and buffers this one uses; it declares their linears, weights and states as its own."""
        return ()

    def linears(self) -> tuple[Linear, ...]:
        return ()

    def weights(self) -> tuple[Weight, ...]:
        """The tensors beside the linears, without the norm before the block."""
        return ()

    def buffers(self) -> tuple[Buffer, ...]:
        """Activations of a decode pass."""
        return ()

    def prompt_buffers(self) -> tuple[Buffer, ...]:
        """Activations of a prompt pass."""
        return ()

    def states(self) -> tuple[Pages, ...]:
        """State of a request that outlasts the pass."""
        return ()

    def pair_flops(self) -> int:
        """Floating point operations of one pair of a token and a position before it."""
        return 0

    def decode(self, run: Run, state: PassState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List the block's launches in a decode pass."""
        raise NotImplementedError

    def prompt(self, run: Run, state: PassState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List the block's launches in a prompt pass."""
        raise NotImplementedError


def project(
    run: Run, state: PassState, layer: LoadedLayer, name: str, x: torch.Tensor, out: torch.Tensor, epilogue: Epilogue
) -> None:
    """Multiply x by the layer's linear `name`, into out."""
    linear = layer.weights[name]
    choice = state.choice(linear, NAMES[type(epilogue)])
    run(name, choice.kernel.op, state.meta, x, linear, out, epilogue, state.scratch, config=choice.config)


def add_residual(
    run: Run, state: PassState, layer: LoadedLayer, name: str, x: torch.Tensor, residual: Residual
) -> Residual:
    """Add the product of x and the layer's linear `name` to the residual stream, and prepare the next norm."""
    linear = layer.weights[name]
    epilogue = AddResidual(residual.next_norm, residual.normed, residual.sumsq)
    project(run, state, layer, name, x, residual.hidden, epilogue)
    return residual._replace(partials=state.choice(linear, NAMES[type(epilogue)]).partials(linear.out_features))
