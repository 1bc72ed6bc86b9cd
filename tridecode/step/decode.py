"""The list of launches of a decode pass, in order.

Each block lists its own launches (blocks/attention.py, blocks/mlp.py). Embedding, LM head and sampling are here. No
launch allocates, synchronizes or reads back. Kernels read the values that change between passes from the meta buffer,
so the whole pass is captured once as a CUDA graph and replayed. The argument `run` launches, captures or records a
line, or runs its reference (run.py). In a pass of a model made by `with_adapters`, launches before the embedding
find the adapters of the rows, and a launch before each linear computes A x (kernels/linear/adapters.py).

`kind` and `masked` are fixed in a captured pass. `kind` is "greedy", "sample" or "logprobs" (sample, and report the
most likely tokens). `masked` means that some rows may sample only the tokens that their masks allow. A model made by
`for_queries` also verifies drafts: DRAFT proposes tokens that followed an earlier occurrence of the last tokens,
EXPAND_DRAFTS gives each draft a row, and ACCEPT keeps the drafts up to the first that differs from the sampled token.
"""

from ..blocks.block import Residual, Run
from ..kernels.adapter_rows import ADAPTER_ROWS
from ..kernels.embed import EMBED, embed_partials
from ..kernels.linear.project import Normed
from ..kernels.sampling.accept import ACCEPT
from ..kernels.sampling.draft import DRAFT
from ..kernels.sampling.expand_drafts import EXPAND_DRAFTS
from ..kernels.sampling.greedy import GREEDY
from ..kernels.sampling.logprobs import LOGPROBS
from ..kernels.sampling.mask import MASK
from ..kernels.sampling.sample import SAMPLE
from .hosted import fetch_first, next_weights, weights_fetched
from .model import DecodeModel
from .workspace import Workspace

KINDS = ("greedy", "sample", "logprobs")


def decode_pass(run: Run, m: DecodeModel, kind: str, masked: bool = False) -> None:
    """List one decode pass. For a model made by for_queries, the pass also proposes and verifies drafts."""
    fetch_first(run, m, m.meta, m.spec.page_layers)
    if m.requests is not None:
        draft(run, m, m.requests)
    find_adapters(run, m)
    residual = embed(run, m)
    for layer, declared in zip(m.layers, m.spec.layers):
        weights_fetched(run, m, layer.index)
        for block, next_norm in zip(declared.blocks, m.next_norms(layer.index)):
            residual = block.decode(run, m, layer, residual._replace(next_norm=next_norm))
        next_weights(run, m, m.meta, layer.index)
    sample(run, m, residual, kind, masked)


def draft(run: Run, m: DecodeModel, own: Workspace) -> None:
    """List the launches that propose drafts and give each a row. own: the workspace with a row for each request."""
    ws = m.workspace
    max_drafts = max(m.queries - 1, 1)
    run("draft", DRAFT, own.meta, own.tokens, own.draft_keys, own.draft_counter, max_drafts, m.ngram)
    if m.queries > 1:
        run("expand_drafts", EXPAND_DRAFTS, own.meta, own.samp, ws.meta, ws.samp)


def find_adapters(run: Run, m: DecodeModel) -> None:
    """List the op that finds the adapters of the rows and sorts the rows by them, if the pass has adapters."""
    if m.adapting and m.pool is not None:
        run("adapters", ADAPTER_ROWS, m.meta, None, *m.pool.rows(m.rows, False))


def embed(run: Run, m: DecodeModel) -> Residual:
    """List the embedding of the current tokens. Return the residual stream."""
    ws, first_norm = m.workspace, m.norms(0)[0]
    run("embed", EMBED, ws.meta, ws.tokens, m.weights.embed, first_norm, ws.hidden, ws.normed, ws.sumsq)
    return Residual(ws.hidden, ws.normed, ws.sumsq, embed_partials(m.spec.hidden_size))


def sample(run: Run, m: DecodeModel, residual: Residual, kind: str, masked: bool) -> None:
    """List the LM head and the sampler."""
    ws, head = m.workspace, m.weights.lm_head
    choice, normed = m.choice(head, "normed"), Normed(residual.sumsq, residual.partials, m.spec.eps)
    run(
        "lm_head", choice.kernel.op, ws.meta, residual.normed, head, ws.logits, normed, m.scratch,
        config=choice.config,
    )  # fmt: skip
    ring = None
    if kind == "logprobs":  # The log-probabilities must be reported before masks and filters change the logits.
        ring = ws.out_logprobs
        run("logprobs", LOGPROBS, ws.logits, ws.meta, ring, ws.out_top_ids, ws.sampler)
    if masked:
        run("mask", MASK, ws.logits, ws.meta, ws.mask, ws.mask_stamp, ws.sampler)
    own, counts = m.requests, None
    sampled = None if own is None else ws.sampled
    if kind == "greedy":
        run("greedy", GREEDY, ws.logits, ws.meta, ws.tokens, ws.out, ws.sampler, masked, sampled)
    else:
        counts = ws.counts
        run(
            "sample", SAMPLE, ws.logits, ws.meta, ws.samp, ws.tokens, counts, ws.bias, ws.out, ws.sampler, ring, masked,
            sampled, m.queries,
        )  # fmt: skip
    if own is not None:
        run("accept", ACCEPT, sampled, own.meta, ws.tokens, counts, ws.out, ws.logits, ws.sampler.lse, ring)
