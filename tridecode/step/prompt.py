"""The prompt pass: its launches, in order. Its rows are chunks of prompts, and the next tokens of decoding requests.

There are two lists. `read` runs all rows through the layers, with torch's matrix products. `finish` computes a token
for every decoding row and for the last row of every finished prompt. It uses the LM head and the sampler of the decode
pass, so the pass that reads the end of a prompt also returns the first token.

If the mixer of the last layer allows it, `read` stops after it has written the K and V of that layer, and `finish` runs
the rest of the layer for its few rows. The kernels read all values that change between passes from device buffers: the
table of chunks, and `meta`, the state of each row (layout.py). So both lists can be captured as CUDA graphs
(prompt_graphs.py).
"""

from collections.abc import Sequence

import torch

from ..blocks.block import PromptResidual, Residual, Run
from ..blocks.spec import NORM_NAMES
from ..kernels.adapter_rows import ADAPTER_ROWS
from ..kernels.add_norm import ADD_NORM
from ..kernels.embed_rows import EMBED_ROWS
from ..kernels.take_residual import TAKE_RESIDUAL
from ..layout import Chunk
from ..state.records import records_of
from . import decode, hosted
from .model import DecodeModel, PromptState
from .run import launch, run_reference

CHUNK = 2048


def read(run: Run, m: DecodeModel, rows: int, decoding: int = 0) -> None:
    """List the launches of a prompt pass of `rows` rows. The first `decoding` rows are decoding rows.

    The residual stream is fp32. The linears compute in the dtype of the weights.
    """
    cut = m.spec.layers[-1].mixer.cuts_prompt
    own, last = m.prompt.first(rows), m.layers[-1] if cut else None
    fetched = m.spec.page_layers - cut  # If the last layer is cut, `finish` fetches its pages.
    state = PromptState(m, own, m.for_rows(decoding) if decoding else None, fetched)
    hosted.fetch_first(run, m, None, fetched)
    if m.adapting and m.pool is not None:
        meta = m.meta[:decoding] if decoding else None
        run("adapters", ADAPTER_ROWS, meta, own.chunks, *m.pool.rows(rows, True))
    run("embed", EMBED_ROWS, own.chunks, m.meta, m.workspace.tokens, m.weights.embed, own.hidden, decoding)
    residual = PromptResidual(own.hidden, own.x)
    for layer, declared in zip(m.layers, m.spec.layers):
        for name, norm, block in zip(NORM_NAMES, m.norms(layer.index), declared.blocks):
            run(name, ADD_NORM, residual.hidden, residual.pending, norm, residual.normed, block.eps)
            if block is declared.mixer:
                hosted.weights_fetched(run, m, layer.index)
            if layer is last:
                block.prompt_start(run, state, layer, residual)
                return
            residual = block.prompt(run, state, layer, residual._replace(pending=None))
        hosted.next_weights(run, m, None, layer.index)


def finish(run: Run, m: DecodeModel, kind: str, masked: bool = False) -> None:
    """List the launches that sample the next tokens: the last layer, if it was cut, then norm, LM head and sampler.

    They run for the rows of the model. Each row continues the row of the prompt pass that meta's SOURCE selects.
    """
    ws, layer, declared = m.workspace, m.layers[-1], m.spec.layers[-1]
    residual = Residual(ws.hidden, ws.normed, ws.sumsq)
    decode.find_adapters(run, m)
    if not declared.mixer.cuts_prompt:
        norm = m.weights.final_norm
        run("take_rows", TAKE_RESIDUAL, ws.meta, m.prompt.hidden, m.prompt.delta, norm, *residual[:3])
        decode.sample(run, m, residual._replace(partials=1), kind, masked)
        return
    hosted.fetch_pages(run, m, ws.meta, m.spec.page_layers - 1)
    steps = [declared.mixer.resume, *(block.decode for block in declared.blocks[1:])]
    for step, next_norm in zip(steps, m.next_norms(layer.index)):
        residual = step(run, m, layer, residual._replace(next_norm=next_norm))
    decode.sample(run, m, residual, kind, masked)


@torch.inference_mode()
def prefill(model: DecodeModel, start: int, end: int, slot: int = 0, chunk: int = CHUNK) -> None:
    """Write K/V of a slot's tokens at positions start to end - 1, for benchmarks and tests. No graph is used.

    Earlier positions must be filled already, and no request may run.
    """
    run = launch if model.device.type == "cuda" else run_reference
    chunk = min(chunk, model.prompt.rows)
    for number, first in enumerate(range(start, end, chunk)):
        count = min(chunk, end - first)
        write_chunks(model, [Chunk(slot, 0, count, first)], number)
        read(run, model, count)


def write_chunks(model: DecodeModel, chunks: Sequence[Chunk], number: int = 0) -> None:
    """Write the tables of the next pass, in stream order. The call may wait; see Slots.write_chunks.

    Args:
        number: number of passes that have read earlier chunks of the same slots. Each pass reads one of two records and
            writes the other.
    """
    prompt = model.prompt
    records = [records_of(chunk.slot, number) for chunk in chunks]
    prompt.snapshots.zero_()
    for table, rows in ((prompt.chunks, chunks), (prompt.records, records)):
        if len(table):
            filled = torch.zeros(table.shape, dtype=table.dtype)
            filled[: len(rows)] = torch.tensor(rows, dtype=table.dtype)
            table.copy_(filled)
