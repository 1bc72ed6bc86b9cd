"""SharedExpert: the gated feed-forward that every row uses in addition to a mixture of experts."""

from dataclasses import dataclass

from ..kernels.linear.project import Gated, Normed, Plain
from ..kernels.row_gate import ROW_GATE
from ..kernels.silu_mul import SILU_MUL
from .block import DecodeState, LoadedLayer, PromptResidual, PromptState, Residual, Run, add_residual, project
from .declarations import Weight
from .mlp import MLP


@dataclass(frozen=True, kw_only=True)
class SharedExpert(MLP):
    """A shared expert with linears of its own. A sigmoid of the row multiplies its output."""

    module = "mlp.shared_expert"
    role = "shared_"

    def weights(self) -> tuple[Weight, ...]:
        """Return the gate, whose product with a row is the argument of the sigmoid."""
        return (Weight("shared_gate", "mlp.shared_expert_gate.weight", (1, self.hidden)),)

    def decode(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List gate_up with the activation, the multiplication by the sigmoid, and down."""
        act = state.buffers(self)["act"]
        sums = residual.sumsq, residual.partials, self.eps
        project(run, state, layer, "shared_gate_up", residual.normed, act, Gated(*sums))
        run("shared_gate", ROW_GATE, state.meta, residual.normed, layer.weights["shared_gate"], Normed(*sums), act)
        return add_residual(run, state, layer, "shared_down", act, residual)

    def prompt(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> PromptResidual:
        """List gate_up, the activation, the multiplication by the sigmoid, and down."""
        own = state.buffers(self)
        project(run, state, layer, "shared_gate_up", residual.normed, own["gate_up"], Plain())
        run("silu_mul", SILU_MUL, own["gate_up"], own["act"])
        run("shared_gate", ROW_GATE, None, residual.normed, layer.weights["shared_gate"], None, own["act"])
        project(run, state, layer, "shared_down", own["act"], state.delta, Plain())
        return residual._replace(pending=state.delta)
