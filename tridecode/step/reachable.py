"""The passes that requests of an engine can reach, whose kernels are compiled before the engine is ready."""

from collections.abc import Sequence
from dataclasses import replace

from ..kernels.attention.gather_kv import gather_kv
from ..kernels.attention.torch_attention import torch_attention
from .compiling import Kernel, Progress, compile_kernels, kernels_of
from .dispatch import QUERIES, BatchDescriptor, most_queries
from .graphs import first_batches, idle, launcher, list_of
from .model import DecodeModel
from .prompt_graphs import end_of, first_reads
from .run import forked, launch


def decode_batches(model: DecodeModel, sizes: Sequence[int]) -> list[BatchDescriptor]:
    """Return the decode passes of all kinds and `sizes`: with masks, without, and those that verify drafts."""
    found = []
    for batch in first_batches(sizes):
        queries = [tokens for tokens in QUERIES[1:] if model.verify and tokens <= most_queries(batch.rows)]
        found += [batch, replace(batch, masked=True), *(replace(batch, tokens=tokens) for tokens in queries)]
    return found


def reachable_kernels(model: DecodeModel, sizes: Sequence[int], prompt_attention: str) -> list[Kernel]:
    """Return the kernels that passes of a model lack. Lines whose kernels are loaded run, so the model must be idle.

    Args:
        sizes: rows of decode passes.
        prompt_attention: one of dispatch.PROMPT_ATTENTION.
    """
    batches = decode_batches(model, sizes)
    steps = [list_of(model, batch) for batch in batches]
    if not model.fixed_chunk:  # with fixed chunks, decode passes draw the first tokens
        steps += [end_of(model, batch) for batch in batches if batch.tokens == 1]
    other = None if prompt_attention == "triton" else replace(torch_attention(prompt_attention, []), launch=gather_one)
    groups = (steps, forked(model, launcher(model))), (first_reads(model), forked(model, launch, other))
    return list(dict.fromkeys(kernel for lists, run in groups for kernel in kernels_of(lists, run, model.device)))


def gather_one(chunks, q, out, kv, scratch, heads) -> None:
    """Launch the kernels of torch's prompt attention for one position."""
    keys, values = q.new_empty(2, heads.kv, 1, heads.dim)
    gather_kv(kv.table[0], kv.k, kv.v, 1, keys, values)


def compile_passes(
    model: DecodeModel, sizes: Sequence[int], prompt_attention: str, progress: Progress | None = None
) -> int:
    """Compile the kernels of all passes. Return the number of kernels that Triton's cache lacked."""
    with idle(model):
        return compile_kernels(reachable_kernels(model, sizes, prompt_attention), model.device, progress)
