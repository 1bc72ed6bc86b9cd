"""The prompt pass: its operations, in order, over chunks of prompts and the rows that decode beside them.

Two lists. `read` takes all rows through the layers up to the last one's K and V, which are left where the token step
reads them; products are torch's. `finish` takes the rows that want a token (those that decode, and those whose prompt
ends) through the rest, which is the token step's own: so there is one LM head and one sampler, and the first token
comes out of the pass that has read the prompt. What changes between passes is read from the table of chunks and from
meta, so both lists are captured as CUDA graphs (prompt_graphs.py).
"""

from collections.abc import Sequence

import torch

from ..kernels.add_norm import ADD_NORM
from ..kernels.attention.expand_kv import EXPAND_KV
from ..kernels.attention.prompt_attention import PROMPT_ATTENTION
from ..kernels.attention.rope_write import ROPE_WRITE
from ..kernels.embed_rows import EMBED_ROWS
from ..kernels.silu_mul import SILU_MUL
from ..kernels.take_rows import TAKE_ROWS
from ..kernels.torch_ops import LINEAR
from ..layout import Chunk
from . import decode, hosted
from .model import DecodeModel
from .run import Run, launch, refer

CHUNK = 2048


def read(run: Run, m: DecodeModel, rows: int, decoding: int = 0) -> None:
    """`rows` rows, of which the first `decoding` are those of a decode pass. The residual stream is fp32, products in
    the weights' dtype."""
    ws, p, kv, c, eps = m.workspace, m.prompt.first(rows), m.kv, m.config, m.config.rms_norm_eps
    layers = c.num_layers - 1  # the last one's attention is for the rows that want a token
    hosted.fetch_first(run, m, None, layers)
    run("embed", EMBED_ROWS, p.chunks, ws.meta, ws.tokens, m.weights.embed, p.hidden, decoding)
    for i, layer in enumerate(m.weights.layers):
        run("input_norm", ADD_NORM, p.hidden, p.delta if i else None, layer.input_norm, p.x, eps)
        hosted.weights_fetched(run, m, i)
        run("qkv", LINEAR, p.x, layer.qkv, p.qkv, p.dequantised)
        run(
            "rope", ROPE_WRITE, p.chunks, kv.tables[i], p.qkv, layer.q_norm, layer.k_norm, m.cos, m.sin, p.q, kv.k[i],
            kv.v[i], eps, followed=m.prompt_shape.dependent,
        )  # fmt: skip
        if i == layers:
            return
        hosted.pages_fetched(run, m, i)
        keys, values = kv.k[i], kv.v[i]
        if m.expands(p.q, i):
            keys, values = p.kv.unbind(1)
            run("expand_kv", EXPAND_KV, p.chunks, kv.tables[i], kv.k[i], kv.v[i], keys, values)
        run(
            "attention", PROMPT_ATTENTION, p.chunks, kv.tables[i], p.q, keys, values, p.partial, p.lse, p.counter,
            p.attended, c.window(i), m.scale, config=m.prompt_shape,
        )  # fmt: skip
        if decoding:
            d = m.of_rows(decoding)
            run(
                "decoding", d.attention, d.workspace.meta, kv.tables[i], p.qkv[:decoding], layer.q_norm, layer.k_norm,
                m.cos, m.sin, kv.k[i], kv.v[i], d.workspace.attn_partial, d.workspace.attn_lse,
                d.workspace.attn_counter, p.attended[:decoding], m.scale, eps, c.window(i), config=d.shapes.attention,
            )  # fmt: skip
        hosted.next_pages(run, m, None, i, layers)
        run("o_proj", LINEAR, p.attended, layer.o_proj, p.delta, p.dequantised)
        run("post_norm", ADD_NORM, p.hidden, p.delta, layer.post_norm, p.x, eps)
        run("gate_up", LINEAR, p.x, layer.gate_up, p.gate_up, p.dequantised)
        run("silu_mul", SILU_MUL, p.gate_up, p.act)
        run("down", LINEAR, p.act, layer.down, p.delta, p.dequantised)
        hosted.next_weights(run, m, None, i)


def finish(run: Run, m: DecodeModel, kind: str, masked: bool = False) -> None:
    """The rest of the last layer, and the token, of the model's rows: each goes on where meta's SOURCE says."""
    ws, last = m.workspace, m.config.num_layers - 1
    hosted.fetch_pages(run, m, ws.meta, last)
    run("take_rows", TAKE_ROWS, ws.meta, m.prompt.hidden, m.prompt.qkv, ws.hidden, ws.qkv)
    decode.attention_block(run, m, last)
    decode.mlp_block(run, m, last)
    decode.hidden_to_token(run, m, kind, masked)


@torch.inference_mode()
def prefill(model: DecodeModel, start: int, end: int, slot: int = 0, chunk: int = CHUNK) -> None:
    """Write K/V of a slot's tokens at positions start to end - 1, launched one by one, for benchmarks and tests;
    earlier ones must be filled already, and no request may run."""
    run = launch if model.device.type == "cuda" else refer
    chunk = min(chunk, model.prompt.rows)
    for first in range(start, end, chunk):
        count = min(chunk, end - first)
        write_chunks(model, [Chunk(slot, 0, count, first)])
        read(run, model, count)


def write_chunks(model: DecodeModel, chunks: Sequence[Chunk]) -> None:
    """Put the chunks of the next pass where it finds them, in stream order. It may wait: see Slots.write_chunks."""
    table = model.prompt.chunks
    rows = torch.zeros(table.shape, dtype=table.dtype)
    rows[: len(chunks)] = torch.tensor(chunks, dtype=table.dtype)
    table.copy_(rows)
