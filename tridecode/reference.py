"""The token step in torch: the same order over the same buffers. The CPU backend, and the oracle of the tests."""

import torch

from .kernels.attention import attention_ref
from .kernels.embed import embed_partials, embed_ref
from .kernels.gate_up import gate_up_ref
from .kernels.greedy import greedy_ref
from .kernels.logprobs import logprobs_ref
from .kernels.matvec import matvec_normed_ref, matvec_residual_ref
from .kernels.sample import sample_ref
from .model import DecodeModel


@torch.inference_mode()
def step(m: DecodeModel, kind: str) -> None:
    """Run one token step; see decode.step."""
    ws, kv, w, eps = m.workspace, m.kv, m.weights, m.config.rms_norm_eps
    partials = embed_partials(m.config.hidden_size)
    embed_ref(ws.meta, ws.tokens, w.embed, w.layers[0].input_norm, ws.hidden, ws.normed, ws.sumsq)
    next_norms = [layer.input_norm for layer in w.layers[1:]] + [w.final_norm]
    for i, (layer, next_norm) in enumerate(zip(w.layers, next_norms)):
        matvec_normed_ref(ws.meta, ws.normed, layer.qkv, ws.qkv, ws.sumsq, partials, eps)
        attention_ref(
            ws.meta, kv.page_table, ws.qkv, layer.q_norm, layer.k_norm, m.cos, m.sin, kv.k[i], kv.v[i],
            ws.attn_partial, ws.attn_lse, ws.attn_counter, ws.attn_out, m.scale, eps, m.config.window(i),
        )  # fmt: skip
        matvec_residual_ref(ws.meta, ws.attn_out, layer.o_proj, ws.hidden, layer.post_norm, ws.normed, ws.sumsq)
        partials = 1
        gate_up_ref(ws.meta, ws.normed, layer.gate_up, ws.act, ws.sumsq, partials, eps)
        matvec_residual_ref(ws.meta, ws.act, layer.down, ws.hidden, next_norm, ws.normed, ws.sumsq)
    matvec_normed_ref(ws.meta, ws.normed, w.lm_head, ws.logits, ws.sumsq, partials, eps)
    if kind == "greedy":
        greedy_ref(ws.logits, ws.meta, ws.tokens, ws.out, ws.sampler)
        return
    if kind == "logprobs":
        logprobs_ref(ws.logits, ws.meta, ws.out_logprobs, ws.out_top_ids, ws.sampler)
    ring = ws.out_logprobs if kind == "logprobs" else None
    sample_ref(ws.logits, ws.meta, ws.samp, ws.tokens, ws.counts, ws.bias, ws.out, ws.sampler, logprobs_ring=ring)
