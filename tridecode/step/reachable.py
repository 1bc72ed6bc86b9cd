"""The passes that requests of an engine can use. Their kernels are compiled before the engine is ready."""

from collections.abc import Sequence
from dataclasses import replace

from ..kernels.attention.gather_kv import gather_kv
from ..kernels.attention.torch_attention import torch_attention
from .compiling import Kernel, Progress, compile_kernels, kernels_of
from .graphs import decode_batches, decode_list, idle, launcher
from .model import DecodeModel
from .prompt_graphs import finish_list, first_reads
from .run import Run, forked, launch


def reachable_kernels(model: DecodeModel, sizes: Sequence[int], prompt_attention: str) -> list[Kernel]:
    """Return the kernels of a model's passes that are not loaded.

    Lines whose kernels are loaded run, so the model must be idle.

    Args:
        sizes: rows of decode passes.
        prompt_attention: one of dispatch.PROMPT_ATTENTION.
    """
    batches = decode_batches(model, sizes)
    steps = [decode_list(model, batch) for batch in batches]
    if not model.fixed_chunk:  # With fixed chunks, decode passes sample the first tokens.
        steps += [finish_list(model, batch) for batch in batches if batch.tokens == 1]
    groups = (steps, forked(model, launcher(model))), (first_reads(model), prompt_run(model, prompt_attention))
    return list(dict.fromkeys(kernel for lists, run in groups for kernel in kernels_of(lists, run, model.device)))


def prompt_run(model: DecodeModel, attention: str) -> Run:
    """Return a runner of prompt passes that launches all Triton kernels, but not torch's attention."""
    other = None if attention == "triton" else replace(torch_attention(attention, []), launch=gather_one)
    return forked(model, launch, other)


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
