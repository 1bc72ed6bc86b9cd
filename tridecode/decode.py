"""The token step: the launches, in order, and nothing else.

Five launches a layer, plus embed, lm_head and sampling. Nothing here allocates, synchronises or reads back; what
changes between steps is read from the meta buffer, so the whole step is captured once as a CUDA graph and replayed.
`kind` is compile-time: "greedy", "sample" or "logprobs" (sample, and the most likely tokens reported).
"""

from .kernels.attention import attention
from .kernels.embed import embed, embed_partials
from .kernels.gate_up import gate_up
from .kernels.greedy import greedy
from .kernels.logprobs import logprobs
from .kernels.matvec import matvec_normed, matvec_residual, residual_partials
from .kernels.sample import sample
from .model import DecodeModel

KINDS = ("greedy", "sample", "logprobs")


def step(model: DecodeModel, kind: str) -> None:
    """Launch one token step on the current stream."""
    token_to_hidden(model)
    for layer in range(model.config.num_layers):
        attention_block(model, layer)
        mlp_block(model, layer)
    hidden_to_token(model, kind)


def token_to_hidden(m: DecodeModel) -> None:
    ws, w = m.workspace, m.weights
    embed(ws.meta, ws.tokens, w.embed, w.layers[0].input_norm, ws.hidden, ws.normed, ws.sumsq, pdl=m.pdl)


def attention_block(m: DecodeModel, i: int) -> None:
    ws, kv, layer, eps = m.workspace, m.kv, m.weights.layers[i], m.config.rms_norm_eps
    partials = sumsq_partials(m, after_embed=i == 0)
    matvec_normed(
        ws.meta, ws.normed, layer.qkv, ws.qkv, ws.sumsq, partials, eps, shape=m.shapes.qkv, pdl=m.pdl
    )
    attention(
        ws.meta, kv.page_table, ws.qkv, layer.q_norm, layer.k_norm, m.cos, m.sin, kv.k[i], kv.v[i],
        ws.attn_partial, ws.attn_lse, ws.attn_counter, ws.attn_out, m.scale, eps, m.config.window(i),
        shape=m.shapes.attention, pdl=m.pdl,
    )  # fmt: skip
    matvec_residual(
        ws.meta, ws.attn_out, layer.o_proj, ws.hidden, layer.post_norm, ws.normed, ws.sumsq,
        shape=m.shapes.o_proj, pdl=m.pdl,
    )  # fmt: skip


def mlp_block(m: DecodeModel, i: int) -> None:
    ws, layer, eps = m.workspace, m.weights.layers[i], m.config.rms_norm_eps
    last = i + 1 == m.config.num_layers
    next_norm = m.weights.final_norm if last else m.weights.layers[i + 1].input_norm
    partials = residual_partials(m.config.hidden_size, m.shapes.o_proj)
    gate_up(ws.meta, ws.normed, layer.gate_up, ws.act, ws.sumsq, partials, eps, shape=m.shapes.gate_up, pdl=m.pdl)
    matvec_residual(
        ws.meta, ws.act, layer.down, ws.hidden, next_norm, ws.normed, ws.sumsq, shape=m.shapes.down, pdl=m.pdl
    )


def hidden_to_token(m: DecodeModel, kind: str) -> None:
    ws, eps = m.workspace, m.config.rms_norm_eps
    partials = sumsq_partials(m, after_embed=False)
    matvec_normed(
        ws.meta, ws.normed, m.weights.lm_head, ws.logits, ws.sumsq, partials, eps, shape=m.shapes.lm_head, pdl=m.pdl
    )
    if kind == "greedy":
        greedy(ws.logits, ws.meta, ws.tokens, ws.out, ws.sampler, pdl=m.pdl)
        return
    if kind == "logprobs":
        logprobs(ws.logits, ws.meta, ws.out_logprobs, ws.out_top_ids, ws.sampler, pdl=m.pdl)
    ring = ws.out_logprobs if kind == "logprobs" else None
    sample(
        ws.logits, ws.meta, ws.samp, ws.tokens, ws.counts, ws.bias, ws.out, ws.sampler, logprobs_ring=ring, pdl=m.pdl
    )


def sumsq_partials(m: DecodeModel, after_embed: bool) -> int:
    """Partial sums of squares that the last writer of the residual stream left."""
    hidden = m.config.hidden_size
    return embed_partials(hidden) if after_embed else residual_partials(hidden, m.shapes.down)
