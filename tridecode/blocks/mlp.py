"""MLP: a gated feed-forward with SiLU."""

from dataclasses import dataclass
from typing import ClassVar

from ..kernels.linear.project import Gated, Plain
from ..kernels.silu_mul import SILU_MUL
from .block import Block, DecodeState, LoadedLayer, PromptResidual, PromptState, Residual, Run, add_residual, project
from .declarations import Buffer, Linear, Part


@dataclass(frozen=True, kw_only=True)
class MLP(Block):
    """Settings of a gated feed-forward block with SiLU, and its launches.

    Args:
        intermediate: width of gate, of up and of their product.
    """

    norm: str = "post_attention_layernorm"
    intermediate: int
    module: ClassVar[str] = "mlp"  # Prefix of the modules in the checkpoint.
    role: ClassVar[str] = ""  # Prefix of the names of the linears.

    def linears(self) -> tuple[Linear, ...]:
        """Return gate_up, whose rows are gate and up, and down."""
        inner, module, role = self.intermediate, self.module, self.role
        halves = (Part(f"{module}.gate_proj", inner), Part(f"{module}.up_proj", inner))
        return (
            Linear(f"{role}gate_up", 2 * inner, self.hidden, halves, "gated"),
            Linear(
                f"{role}down", self.hidden, inner, (Part(f"{module}.down_proj", self.hidden),), "residual",
                scale=self.residual_scale,
            ),
        )  # fmt: skip

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the activation of a decode pass: silu(gate) * up."""
        return (Buffer("act", (self.intermediate,), tile=True),)

    def prompt_buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a prompt pass: gate and up, and silu(gate) * up."""
        return (
            Buffer("gate_up", (2 * self.intermediate,), "weights"),
            Buffer("act", (self.intermediate,), "weights"),
        )

    def decode(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List gate_up with the activation, and down."""
        own = state.buffers(self)
        gated = Gated(residual.sumsq, residual.partials, self.eps)
        project(run, state, layer, "gate_up", residual.normed, own["act"], gated)
        return add_residual(run, state, layer, "down", own["act"], residual)

    def prompt(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> PromptResidual:
        """List gate_up, the activation, and down."""
        own = state.buffers(self)
        project(run, state, layer, "gate_up", residual.normed, own["gate_up"], Plain())
        run("silu_mul", SILU_MUL, own["gate_up"], own["act"])
        project(run, state, layer, "down", own["act"], state.delta, Plain())
        return residual._replace(pending=state.delta)
