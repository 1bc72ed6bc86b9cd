"""Attention: grouped-query attention with rotary embedding, over K/V pages; optional norms, bias, window and gate."""

from dataclasses import dataclass

from ..kernels.attention.arguments import MAX_SPLITS, Heads, Scratch
from ..kernels.attention.expand_kv import EXPAND_KV
from ..kernels.attention.gate_heads import GATE_HEADS
from ..kernels.attention.prompt_attention import PROMPT_ATTENTION
from ..kernels.attention.rope_write import ROPE_WRITE
from ..kernels.attention.write_kv import WRITE_KV
from ..kernels.linear.project import Normed, Plain
from ..kernels.take_rows import TAKE_ROWS
from .block import Block, DecodeState, LoadedLayer, PromptResidual, PromptState, Residual, Run, add_residual, project
from .declarations import Buffer, Linear, Pages, Part, Weight, norm_weight
from .rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class Attention(Block):
    """Settings of an attention block, and its launches.

    Args:
        heads, kv_heads: number of query heads and of K/V heads.
        head_dim: size of a head.
        rope: settings of the rotary embedding.
        qk_norm: an RMSNorm is applied to q and k of each head.
        bias: q, k and v have biases.
        window: number of positions that a token attends to, 0 for all.
        scale: factor of the scores, None for head_dim ** -0.5.
        gate: the output of each query head is multiplied by the sigmoid of a gate, whose rows follow those of the query
            in q_proj.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    qk_norm: bool = False
    bias: bool = False
    window: int = 0
    scale: float | None = None
    gate: bool = False

    cuts_prompt = True  # If the last layer's attention runs again for a few rows, it writes the same K and V.

    @property
    def q_size(self) -> int:
        """Elements of q in one row."""
        return self.heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Elements of q with its gates, k and v in one row."""
        return self.q_size * (1 + self.gate) + 2 * self.kv_size

    @property
    def kv_size(self) -> int:
        """Elements of k, and of v, in one row."""
        return self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    def linears(self) -> tuple[Linear, ...]:
        """Return qkv, whose rows are q, k and v, and o_proj."""
        q, kv = self.q_size, self.kv_size
        parts = (
            Part("self_attn.q_proj", q * (1 + self.gate)),
            Part("self_attn.k_proj", kv),
            Part("self_attn.v_proj", kv),
        )
        return (
            Linear("qkv", self.qkv_size, self.hidden, parts, "normed", bias=self.bias),
            Linear(
                "o_proj", self.hidden, q, (Part("self_attn.o_proj", self.hidden),), "residual",
                scale=self.residual_scale,
            ),
        )  # fmt: skip

    def weights(self) -> tuple[Weight, ...]:
        """Return the weights of the q and k norms, if the block has them."""
        names = ("q_norm", "k_norm") if self.qk_norm else ()
        return tuple(
            norm_weight(name, f"self_attn.{name}.weight", self.head_dim, self.norm_offset) for name in names
        )  # fmt: skip

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a decode pass: qkv, the output, and the partial results of splits."""
        return (
            Buffer("qkv", (self.qkv_size,), "float32"),
            Buffer("attended", (self.q_size,), tile=True),
            Buffer("partial", (self.heads, MAX_SPLITS, self.head_dim), "float32"),
            Buffer("lse", (self.heads, MAX_SPLITS, 2), "float32"),  # Maximum and sum of each split.
            Buffer("counter", (self.kv_heads,), "int32"),  # The counters are zero between launches.
        )

    def prompt_buffers(self) -> tuple[Buffer, ...]:
        """Return the activations of a prompt pass: qkv, the rotated q, and the output."""
        return (
            Buffer("qkv", (self.qkv_size,), "weights"),
            Buffer("q", (self.heads, self.head_dim), "weights"),  # Queries after the rotary embedding.
            Buffer("attended", (self.q_size,), "weights"),
        )

    def states(self) -> tuple[Pages, ...]:
        """Return the declaration of the K/V pages."""
        return (Pages(self.kv_heads, self.head_dim),)

    def attention_flops(self, start: int, end: int) -> int:
        """Return the floating-point operations of q @ k and p @ v for the tokens at positions start to end - 1."""
        return 4 * self.q_size * (self._pairs(end) - self._pairs(start))

    def decode(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List qkv, attention and o_proj."""
        normed = Normed(residual.sumsq, residual.partials, self.eps)
        project(run, state, layer, "qkv", residual.normed, state.buffers(self)["qkv"], normed)
        return self._attend(run, state, layer, residual)

    def prompt(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> PromptResidual:
        """List qkv, the rotary embedding with the writes of K and V, attention and o_proj."""
        self.prompt_start(run, state, layer, residual)
        state.wait_for_pages(run, layer)
        own, kv, heads = state.buffers(self), state.kv_layer(layer), self._heads()
        if expanded := state.expanded(self, own["q"], kv):
            run("expand_kv", EXPAND_KV, state.chunks, kv, expanded.k, expanded.v)
        run(
            "attention", PROMPT_ATTENTION, state.chunks, own["q"], own["attended"], expanded or kv,
            state.attention_scratch, heads, config=state.attention_config,
        )  # fmt: skip
        if self.gate:
            run("gate", GATE_HEADS, state.chunks, own["qkv"], own["attended"], heads)
        if decoding := state.decoding:
            plan, rope = decoding.attention(self), state.rope(self, layer)
            qkv, out = own["qkv"][: decoding.rows], own["attended"][: decoding.rows]
            scratch = self._scratch(decoding)
            run("decoding", plan.op, decoding.meta, qkv, out, kv, rope, scratch, heads, config=plan.config)
        state.fetch_next_pages(run, layer)
        project(run, state, layer, "o_proj", own["attended"], state.delta, Plain())
        return residual._replace(pending=state.delta)

    def prompt_start(self, run: Run, state: PromptState, layer: LoadedLayer, residual: PromptResidual) -> None:
        """List the launches of qkv, and of the rotary embedding, which also writes K and V."""
        own = state.buffers(self)
        project(run, state, layer, "qkv", residual.normed, own["qkv"], Plain())
        run(
            "rope", ROPE_WRITE, state.chunks, own["qkv"], own["q"], state.kv_layer(layer), state.rope(self, layer),
            self._heads(), followed=state.attention_config.dependent,
        )  # fmt: skip

    def resume(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List the copy of the rows that sample a token, then attention and o_proj in the form of a decode pass."""
        own, read = state.buffers(self), state.prompt.buffers(self)
        run("take_rows", TAKE_ROWS, state.meta, state.prompt.hidden, read["qkv"], residual.hidden, own["qkv"])
        return self._attend(run, state, layer, residual)

    def _attend(self, run: Run, state: DecodeState, layer: LoadedLayer, residual: Residual) -> Residual:
        """List attention and o_proj, preceded by the write of K and V if attention does not write them."""
        own, plan, kv, rope = state.buffers(self), state.attention(self), state.kv_layer(layer), state.rope(self, layer)
        state.wait_for_pages(run, layer)
        if plan.writes_first:  # The rows attend to K and V that other rows of this pass write.
            run("write_kv", WRITE_KV, state.meta, own["qkv"], kv, rope, self._heads(), config=plan.config)
        run(
            "attention", plan.op, state.meta, own["qkv"], own["attended"], kv, rope, self._scratch(state),
            self._heads(), config=plan.config,
        )  # fmt: skip
        state.fetch_next_pages(run, layer)
        return add_residual(run, state, layer, "o_proj", own["attended"], residual)

    def _heads(self) -> Heads:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return Heads(self.heads, self.kv_heads, self.head_dim, scale, self.window, self.gate)

    def _pairs(self, tokens: int) -> int:
        """Return the number of positions to which the first `tokens` tokens attend in total."""
        full = min(tokens, self.window or tokens)
        return full * (full + 1) // 2 + (tokens - full) * self.window

    def _scratch(self, state: DecodeState) -> Scratch:
        own = state.buffers(self)
        return Scratch(own["partial"], own["lse"], own["counter"])
