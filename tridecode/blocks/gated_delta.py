"""GatedDelta: a gated delta net, which keeps a matrix for each head instead of K and V for each position."""

from dataclasses import dataclass

from ..kernels.delta.arguments import DeltaHeads, DeltaWeights
from ..kernels.delta.delta_chunks import DELTA_CHUNKS
from ..kernels.delta.delta_conv import DELTA_CONV
from ..kernels.delta.delta_decode import DELTA_DECODE
from ..kernels.delta.delta_gates import DELTA_GATES
from ..kernels.delta.delta_scan import DELTA_SCAN
from ..kernels.delta.gated_norm import GATED_NORM
from ..kernels.linear.project import Normed, Plain
from ..layout import SCAN
from .block import Block, DecodeState, LoadedLayer, PromptResidual, PromptState, Residual, Run, add_residual, project
from .declarations import Buffer, Linear, Part, Recurrent, Weight


@dataclass(frozen=True, kw_only=True)
class GatedDelta(Block):
    """Settings of a gated delta net block, and its launches.

    Args:
        key_heads: number of heads of q and k.
        value_heads: number of V heads, a multiple of key_heads.
        key_dim, value_dim: sizes of a head; powers of two.
        width: positions that the convolution reads.
        sigmoid: the gate of the output is sigmoid(z) instead of silu(z).
        tiled: V heads that share a head of q and k are not adjacent: V head h uses head h % key_heads.
        grouped_qkvz: the checkpoint stores q, k, v and z of each head of q and k together, in in_proj_qkvz.
        grouped_ba: likewise b and a, in in_proj_ba.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    sigmoid: bool = False
    tiled: bool = False
    grouped_qkvz: bool = False
    grouped_ba: bool = False

    @property
    def reordered(self) -> bool:
        """Whether the rows have another order than in a Hugging Face checkpoint, which no part describes."""
        return self.tiled

    @property
    def sizes(self) -> DeltaHeads:
        """The sizes as kernels take them."""
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        return DeltaHeads(*sizes, self.eps, self.sigmoid, self.tiled)

    def linears(self) -> tuple[Linear, ...]:
        """Return in_proj, whose rows are q, k, v and z, and out_proj."""
        channels, size = self.sizes.channels, self.sizes.value_size
        parts: tuple[Part, ...] = Part("linear_attn.in_proj_qkv", channels), Part("linear_attn.in_proj_z", size)
        if self.grouped_qkvz:
            groups = (self.key_dim, self.key_dim, size // self.key_heads, size // self.key_heads)
            parts = (Part("linear_attn.in_proj_qkvz", channels + size, groups=groups),)
        return (
            Linear("in_proj", channels + size, self.hidden, parts, "normed"),
            Linear(
                "out_proj", self.hidden, size, (Part("linear_attn.out_proj", self.hidden),), "residual",
                scale=self.residual_scale,
            ),
        )  # fmt: skip

    def weights(self) -> tuple[Weight, ...]:
        """Return the convolution, the projections of the gates and their constants, and the norm of the output."""
        heads = self.value_heads
        gates: tuple[Weight, ...] = (
            Weight("b", "linear_attn.in_proj_b.weight", (heads, self.hidden)),
            Weight("a", "linear_attn.in_proj_a.weight", (heads, self.hidden)),
        )
        if self.grouped_ba:
            groups = (heads // self.key_heads,) * 2
            gates = (Weight("ba", "linear_attn.in_proj_ba.weight", (2 * heads, self.hidden), groups=groups),)
        return (
            Weight(
                "conv",
                "linear_attn.conv1d.weight",
                (self.sizes.channels, 1, self.width),
                transposed=True,
            ),  # fmt: skip
            *gates,
            Weight("a_log", "linear_attn.A_log", (heads,), dtype="float32"),
            Weight("dt_bias", "linear_attn.dt_bias", (heads,), dtype="float32"),
            Weight("delta_norm", "linear_attn.norm.weight", (self.value_dim,), dtype="float32"),
        )

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a decode pass: q, k, v and z, and the output."""
        sizes = self.sizes
        return (
            Buffer("qkvz", (sizes.channels + sizes.value_size,), "float32"),
            Buffer("delta_out", (sizes.value_size,), tile=True),
        )

    def prompt_buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a prompt pass: the inputs and outputs of the ops of kernels/delta."""
        sizes, heads = self.sizes, self.value_heads
        return (
            Buffer("qkvz", (sizes.channels + sizes.value_size,), "weights"),
            Buffer("b", (heads,), "weights"),
            Buffer("a", (heads,), "weights"),
            Buffer("mixed", (sizes.channels,), "weights"),
            Buffer("rates", (2, heads), "float32"),
            Buffer("u", (sizes.value_size,), "weights"),
            Buffer("w", (heads * self.key_dim,), "weights"),
            Buffer("p", (heads * SCAN,), "weights"),
            Buffer("delta_out", (sizes.value_size,), "weights"),
        )

    def states(self) -> tuple[Recurrent, ...]:
        """Return the declaration of the recurrent state."""
        return (Recurrent(self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.sizes.channels),)

    def decode(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List in_proj, the update and the read of the state, and out_proj."""
        own, normed = state.buffers(self), Normed(residual.sumsq, residual.partials, self.eps)
        project(run, state, layer, "in_proj", residual.normed, own["qkvz"], normed)
        run(
            "delta", DELTA_DECODE, state.meta, own["qkvz"], residual.normed, normed, own["delta_out"], _weights(layer),
            state.records(layer), state.draft_rows(layer), self.sizes, config=state.delta_config,
        )  # fmt: skip
        return add_residual(run, state, layer, "out_proj", own["delta_out"], residual)

    def prompt(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> PromptResidual:
        """List in_proj, the gates, the scan with the ops before and after it, and out_proj."""
        own, sizes, weights, records = state.buffers(self), self.sizes, _weights(layer), state.records(layer)
        qkvz, mixed, rates, u, w, p = (own[name] for name in ("qkvz", "mixed", "rates", "u", "w", "p"))
        chunks_config, scan_config = state.delta_configs
        project(run, state, layer, "in_proj", residual.normed, qkvz, Plain())
        run("gates", DELTA_GATES, residual.normed, weights, own["b"], own["a"])
        run("conv", DELTA_CONV, state.tables, qkvz, own["b"], own["a"], mixed, rates, weights, records, sizes)
        run("blocks", DELTA_CHUNKS, state.chunks, mixed, rates, u, w, p, sizes, config=chunks_config)
        run("scan", DELTA_SCAN, state.tables, mixed, rates, u, w, p, records, sizes, config=scan_config)
        run("gated_norm", GATED_NORM, state.chunks, u, qkvz, own["delta_out"], weights.norm, sizes)
        if decoding := state.decoding:
            rows = decoding.rows
            run(
                "decoding", DELTA_DECODE, decoding.meta, qkvz[:rows], residual.normed[:rows], None,
                own["delta_out"][:rows], weights, records, decoding.draft_rows(layer), sizes,
                config=decoding.delta_config,
            )  # fmt: skip
        project(run, state, layer, "out_proj", own["delta_out"], state.delta, Plain())
        return residual._replace(pending=state.delta)


def _weights(layer: LoadedLayer) -> DeltaWeights:
    own = layer.weights
    b, a = own["ba"].chunk(2) if "ba" in own else (own["b"], own["a"])
    return DeltaWeights(own["conv"], b, a, own["a_log"], own["dt_bias"], own["delta_norm"])
