"""The token step: the launches, in order, and nothing else.

Five launches a layer, plus embed, lm_head and sampling. Nothing here allocates, synchronises or reads back; what
changes between steps is read from the meta buffer, so the whole step is captured once as a CUDA graph and replayed.
`run` says what becomes of a line (run.py): it is launched, captured, recorded, or its torch reference runs instead.
`kind` is compile-time: "greedy", "sample" or "logprobs" (sample, and the most likely tokens reported); so is `masked`:
some rows may draw only what their masks allow. A model of_queries also guesses what comes next, from its own text, and
verifies as many guesses as it has rows for: drafts are spread to rows of their own before, and accepted after.
"""

from ..kernels.attention.write_kv import WRITE_KV
from ..kernels.embed import EMBED, embed_partials
from ..kernels.sampling.accept import ACCEPT
from ..kernels.sampling.draft import DRAFT
from ..kernels.sampling.greedy import GREEDY
from ..kernels.sampling.logprobs import LOGPROBS
from ..kernels.sampling.mask import MASK
from ..kernels.sampling.sample import SAMPLE
from ..kernels.sampling.spread import SPREAD
from ..tuning.products import products
from .hosted import fetch_first, next_pages, next_weights, pages_fetched, weights_fetched
from .model import DecodeModel
from .run import Run

KINDS = ("greedy", "sample", "logprobs")


def step(run: Run, model: DecodeModel, kind: str, masked: bool = False) -> None:
    """Run one token step; of a model of_queries as many as its guesses are right."""
    meta, layers = model.workspace.meta, model.config.num_layers
    fetch_first(run, model, meta, layers)
    if model.requests is not None:
        guess(run, model)
    token_to_hidden(run, model)
    for layer in range(layers):
        weights_fetched(run, model, layer)
        qkv_product(run, model, layer)
        attention_block(run, model, layer)
        mlp_block(run, model, layer)
        next_weights(run, model, meta, layer)
    hidden_to_token(run, model, kind, masked)


def guess(run: Run, m: DecodeModel) -> None:
    ws, own = m.workspace, m.requests
    most = max(m.queries - 1, 1)
    run("draft", DRAFT, own.meta, own.tokens, own.draft_keys, own.draft_counter, most, m.ngram)
    if m.queries > 1:
        run("spread", SPREAD, own.meta, own.samp, ws.meta, ws.samp)


def token_to_hidden(run: Run, m: DecodeModel) -> None:
    ws, w = m.workspace, m.weights
    run("embed", EMBED, ws.meta, ws.tokens, w.embed, w.layers[0].input_norm, ws.hidden, ws.normed, ws.sumsq)


def qkv_product(run: Run, m: DecodeModel, i: int) -> None:
    ws, eps = m.workspace, m.config.rms_norm_eps
    partials = sumsq_partials(m, after_embed=i == 0)
    run(
        "qkv", products(m.shapes.qkv).normed, ws.meta, ws.normed, m.weights.layers[i].qkv, ws.qkv, ws.sumsq, partials,
        eps, ws.split, config=m.shapes.qkv,
    )  # fmt: skip


def attention_block(run: Run, m: DecodeModel, i: int) -> None:
    ws, kv, layer, eps = m.workspace, m.kv, m.weights.layers[i], m.config.rms_norm_eps
    pages_fetched(run, m, i)
    if m.writes_first:  # rows attend to what others of this pass write
        run(
            "write_kv", WRITE_KV, ws.meta, kv.tables[i], ws.qkv, layer.k_norm, m.cos, m.sin, kv.k[i], kv.v[i], eps,
            config=m.shapes.attention,
        )  # fmt: skip
    run(
        "attention", m.attention, ws.meta, kv.tables[i], ws.qkv, layer.q_norm, layer.k_norm, m.cos, m.sin,
        kv.k[i], kv.v[i], ws.attn_partial, ws.attn_lse, ws.attn_counter, ws.attn_out, m.scale, eps, m.config.window(i),
        config=m.shapes.attention,
    )  # fmt: skip
    next_pages(run, m, ws.meta, i, m.config.num_layers)
    run(
        "o_proj", products(m.shapes.o_proj).residual, ws.meta, ws.attn_out, layer.o_proj, ws.hidden, layer.post_norm,
        ws.normed, ws.sumsq, ws.split, config=m.shapes.o_proj,
    )  # fmt: skip


def mlp_block(run: Run, m: DecodeModel, i: int) -> None:
    ws, layer, eps = m.workspace, m.weights.layers[i], m.config.rms_norm_eps
    last = i + 1 == m.config.num_layers
    next_norm = m.weights.final_norm if last else m.weights.layers[i + 1].input_norm
    partials = products(m.shapes.o_proj).partials(m.config.hidden_size, m.shapes.o_proj)
    run(
        "gate_up", products(m.shapes.gate_up).gate_up, ws.meta, ws.normed, layer.gate_up, ws.act, ws.sumsq, partials,
        eps, ws.split, config=m.shapes.gate_up,
    )  # fmt: skip
    run(
        "down", products(m.shapes.down).residual, ws.meta, ws.act, layer.down, ws.hidden, next_norm, ws.normed,
        ws.sumsq, ws.split, config=m.shapes.down,
    )  # fmt: skip


def hidden_to_token(run: Run, m: DecodeModel, kind: str, masked: bool) -> None:
    ws, head, eps = m.workspace, m.weights.lm_head, m.config.rms_norm_eps
    partials = sumsq_partials(m, after_embed=False)
    run(
        "lm_head", products(m.shapes.lm_head).normed, ws.meta, ws.normed, head, ws.logits, ws.sumsq, partials, eps,
        ws.split, config=m.shapes.lm_head,
    )  # fmt: skip
    ring = None
    if kind == "logprobs":  # of the raw logits
        ring = ws.out_logprobs
        run("logprobs", LOGPROBS, ws.logits, ws.meta, ring, ws.out_top_ids, ws.sampler)
    if masked:
        run("mask", MASK, ws.logits, ws.meta, ws.mask, ws.mask_stamp, ws.sampler)
    own, counts, drawn = m.requests, None, None if m.requests is None else ws.drawn
    if kind == "greedy":
        run("greedy", GREEDY, ws.logits, ws.meta, ws.tokens, ws.out, ws.sampler, masked, drawn)
    else:
        counts = ws.counts
        run(
            "sample", SAMPLE, ws.logits, ws.meta, ws.samp, ws.tokens, counts, ws.bias, ws.out, ws.sampler, ring, masked,
            drawn, m.queries,
        )  # fmt: skip
    if own is not None:
        run("accept", ACCEPT, drawn, own.meta, ws.tokens, counts, ws.out, ws.logits, ws.sampler.lse, ring)


def sumsq_partials(m: DecodeModel, after_embed: bool) -> int:
    """Partial sums of squares that the last writer of the residual stream left."""
    hidden = m.config.hidden_size
    return embed_partials(hidden) if after_embed else products(m.shapes.down).partials(hidden, m.shapes.down)
