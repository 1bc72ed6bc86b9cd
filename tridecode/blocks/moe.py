"""MoE: a feed-forward of many experts, which are gated MLPs. A router chooses a few of them for each row."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..kernels.linear.packed import Packed
from ..kernels.linear.project import AddResidual, Gated, Normed
from ..kernels.linear.weight import LoadedLinear
from ..kernels.moe.add_experts import ADD_EXPERTS
from ..kernels.moe.arguments import ExpertSizes, Router, Routes
from ..kernels.moe.config import OPS
from ..kernels.moe.route import ROUTE
from ..kernels.sort_pairs import SORT_PAIRS, TILE_FIELDS, PairTiles
from .block import Block, DecodeState, LoadedLayer, PassState, PromptResidual, PromptState, Residual, Run
from .declarations import Buffer, Linear, Part, Weight
from .shared_expert import SharedExpert

STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # tensors that contain the weights of all experts


@dataclass(frozen=True, kw_only=True)
class MoE(Block):
    """Settings of a mixture of experts, and its launches.

    Args:
        experts: number of experts, without the shared one.
        top_k: number of experts that the router chooses for a row.
        intermediate: width of gate, of up and of their product, in each expert.
        normalize: the weights of the chosen experts are divided by their sum.
        shared: there is a shared expert of the same width, which is stored as one more expert. Every row uses it, with
            the sigmoid of a gate as its weight.
        apart: the shared expert, if it has another width or is quantized in another way, and therefore linears of its
            own; `shared` is then false.
        stacked: the checkpoint stores the weights of all experts in one tensor.
    """

    norm: str = "post_attention_layernorm"
    experts: int
    top_k: int
    intermediate: int
    normalize: bool = True
    shared: bool = False
    apart: SharedExpert | None = None
    stacked: bool = False

    @property
    def sizes(self) -> ExpertSizes:
        """The sizes as kernels take them."""
        return ExpertSizes(self.experts, self.top_k, self.intermediate, self.normalize, self.shared)

    def stored_as(self, tensors: Container[str], prefix: str) -> "MoE":
        """Return the block that names the tensors of a checkpoint: one for each expert, or one for all experts."""
        stacked = prefix + STACKED[0] in tensors
        return self if stacked == self.stacked else replace(self, stacked=stacked)

    def quantized_as(self, scheme: Callable[[str], object], prefix: str) -> "MoE":
        """Return the block whose shared expert has linears of its own if its schemes are not those of the experts.

        Published checkpoints often leave only the shared expert in 16 bits.
        """
        own, experts = (
            [scheme(f"{prefix}{module}.{part}_proj") for part in ("gate", "up", "down")]
            for module in (SharedExpert.module, "mlp.experts.0")
        )
        if not self.shared or own == experts:
            return self
        apart = SharedExpert(
            hidden=self.hidden, eps=self.eps, norm=self.norm, residual_scale=self.residual_scale,
            norm_offset=self.norm_offset, intermediate=self.intermediate,
        )  # fmt: skip
        return replace(self, shared=False, apart=apart)

    def inner(self) -> tuple[Block, ...]:
        """Return the shared expert if it has linears of its own."""
        return () if self.apart is None else (self.apart,)

    def linears(self) -> tuple[Linear, ...]:
        """Return gate_up and down, with the rows of one expert after the other, then the linears of `apart`.

        A shared expert of the width of the experts is the last expert.
        """
        return self._linears

    @cached_property
    def _linears(self) -> tuple[Linear, ...]:  # Cached, because they have hundreds of parts.
        count, used, inner, hidden = self.sizes.stored, self.sizes.used, self.intermediate, self.hidden
        gate_up: list[Part] = []
        down: list[Part] = []
        modules = [f"mlp.experts.{expert}" for expert in range(self.experts)]
        if self.stacked:
            gate_up.append(Part(STACKED[0], 2 * inner * self.experts, self.experts))
            down.append(Part(STACKED[1], hidden * self.experts, self.experts))
            modules = []
        if self.shared:
            modules.append(SharedExpert.module)
        for module in modules:
            gate_up += (Part(f"{module}.gate_proj", inner), Part(f"{module}.up_proj", inner))
            down.append(Part(f"{module}.down_proj", hidden))
        return (
            Linear(
                "experts_gate_up", 2 * inner * count, hidden, tuple(gate_up), "gated", experts=count, active=used,
                always=int(self.shared),
            ),
            Linear(
                "experts_down", hidden * count, inner, tuple(down), "residual", scale=self.residual_scale,
                experts=count, active=used, always=int(self.shared),
            ),
            *(linear for block in self.inner() for linear in block.linears()),
        )  # fmt: skip

    def packed(self, layer: LoadedLayer) -> tuple[Packed | None, Packed | None]:
        """Return the descriptions of the packed weights of gate_up and down in a layer, None for dense weights.

        Raises:
            ValueError: a scale belongs to rows of several experts.
        """
        gate_up, down = _loaded(layer)
        for name, linear, rows in (("gate_up", gate_up, 2 * self.intermediate), ("down", down, self.hidden)):
            if linear.packed and rows % linear.packed.rows:
                raise ValueError(f"blocks of {linear.packed.rows} rows do not divide the {rows} rows of {name}")
        return gate_up.packed, down.packed

    def weights(self) -> tuple[Weight, ...]:
        """Return the router, and the gate of the shared expert."""
        router = Weight("router", "mlp.gate.weight", (self.experts, self.hidden))
        gate = Weight("shared_gate", "mlp.shared_expert_gate.weight", (1, self.hidden))
        return (router, gate) if self.shared or self.apart else (router,)

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a decode pass."""
        return self._buffers("activation", "float32")

    def prompt_buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a prompt pass."""
        return self._buffers("weights", "weights")

    def _buffers(self, act: str, outs: str) -> tuple[Buffer, ...]:
        """Return the buffers of a pass: the experts of each row, the order of the pairs, and the products.

        Args:
            act: dtype of silu(gate) * up, as in `Buffer`.
            outs: dtype of the products with down.
        """
        used = self.sizes.used
        return (
            Buffer("router_logits", (self.sizes.stored,), "float32"),
            Buffer("expert_ids", (used,), "int32"),
            Buffer("expert_weights", (used,), "float32"),
            Buffer("route_counter", (1,), "int32"),
            Buffer("pairs", (used,), "int32"),
            Buffer("pair_tiles", (used, TILE_FIELDS), "int32"),
            Buffer("tile_count", (1,), "int32"),
            Buffer("pair_counts", (2 * used,), "int32"),
            Buffer("experts_act", (used * self.intermediate,), act),
            Buffer("experts_out", (used * self.hidden,), outs),
        )

    def decode(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List route, gate_up and down. Without `rows` in the configs, sort_pairs and add_experts are listed too."""
        own, sizes, configs, meta = state.buffers(self), self.sizes, state.experts(self, layer), state.meta
        assert residual.next_norm is not None
        normed = Normed(residual.sumsq, residual.partials, self.eps)
        add = AddResidual(residual.next_norm, residual.normed, residual.sumsq)
        routes = self._route(run, state, layer, meta, None, residual.normed, normed)
        if configs.rows is None:
            self._experts(run, state, layer, residual.normed, normed, routes, meta)
            self._shared(run, state, layer, residual)
            run("add_experts", ADD_EXPERTS, meta, own["experts_out"], routes, residual.hidden, add, sizes)
            return residual._replace(partials=1)
        (gate_up, down), (up_config, down_config) = _loaded(layer), configs.rows
        run(
            "experts_gate_up", OPS[type(up_config)].gate_up, meta, residual.normed, gate_up, routes,
            own["experts_act"], Gated(*normed), sizes, config=up_config,
        )  # fmt: skip
        self._shared(run, state, layer, residual)
        run(
            "experts_down", OPS[type(down_config)].down, meta, own["experts_act"], down, routes, residual.hidden, add,
            sizes, config=down_config,
        )  # fmt: skip
        return residual._replace(partials=down_config.programs(self.hidden))

    def prompt(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> PromptResidual:
        """List the router, the order of the pairs, gate_up with the activation, down, and the sum of the experts."""
        own = state.buffers(self)
        meta = None if state.decoding is None else state.decoding.meta
        routes = self._route(run, state, layer, meta, state.chunks, residual.normed, None)
        self._experts(run, state, layer, residual.normed, None, routes, None)
        shared = None if self.apart is None else self.apart.prompt(run, state, layer, residual).pending
        run("add_experts", ADD_EXPERTS, None, own["experts_out"], routes, state.delta, None, self.sizes, shared)
        return residual._replace(pending=state.delta)

    def _shared(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> None:
        """List the shared expert, if it has linears of its own. It adds its output to the residual stream.

        `shared_down` overwrites residual.normed, which route and gate_up read. So it is listed after them.
        """
        if self.apart is not None:
            self.apart.decode(run, state, layer, residual)

    def _route(
        self, run: Run, state: PassState, layer: LoadedLayer, meta: torch.Tensor | None, chunks: torch.Tensor | None,
        x: torch.Tensor, normed: Normed | None,
    ) -> Routes:  # fmt: skip
        """List the router. Return the experts of the rows.

        Args:
            meta, chunks, x, normed: see `route`.
        """
        own = state.buffers(self)
        routes = Routes(own["router_logits"], own["expert_ids"], own["expert_weights"])
        router = Router(layer.weights["router"], layer.weights["shared_gate"] if self.shared else None)
        run(
            "route", ROUTE, meta, chunks, x, router, normed, routes, own["route_counter"], self.sizes,
            config=state.experts(self, layer).route,
        )  # fmt: skip
        return routes

    def _experts(
        self, run: Run, state: PassState, layer: LoadedLayer, x: torch.Tensor, normed: Normed | None, routes: Routes,
        meta: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """List the order of the pairs and their products in tiles, which are written to experts_out.

        Args:
            x, normed: see `gate_up_tiles`.
            meta: see `sort_pairs`.
        """
        own, sizes, configs = state.buffers(self), self.sizes, state.experts(self, layer)
        tiles, (gate_up, down) = PairTiles(own["pairs"], own["pair_tiles"], own["tile_count"]), _loaded(layer)
        up_config, down_config = configs.tiles
        run("sort_pairs", SORT_PAIRS, meta, routes.ids, tiles, sizes.stored, up_config.tile, own["pair_counts"])
        run(
            "experts_gate_up", OPS[type(up_config)].gate_up, x, gate_up, tiles, routes, own["experts_act"], normed,
            sizes, config=up_config,
        )  # fmt: skip
        run(
            "experts_down", OPS[type(down_config)].down, own["experts_act"], down, tiles, routes, own["experts_out"],
            sizes, config=down_config,
        )  # fmt: skip


def _loaded(layer: LoadedLayer) -> tuple[LoadedLinear, LoadedLinear]:
    """Return the loaded weights of gate_up and down."""
    return layer.linears["experts_gate_up"], layer.linears["experts_down"]
