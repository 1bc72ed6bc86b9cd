"""Plan of the passes: which are captured, the attention kernels, and whether passes verify drafts."""

from dataclasses import dataclass

import torch

from ..blocks.spec import ModelSpec
from ..errors import conflict
from ..kernels.device import device_of
from ..layout import NGRAM
from ..options import EngineOptions
from ..step.dispatch import (
    ATTENTION,
    COSTS,
    MAX_PROMPT_GRAPH_TOKENS,
    MODES,
    Support,
    graph_sizes,
    lowered,
    max_queries,
    prompt_mode,
    prompt_sizes,
)
from ..tuning.attention import prompt_tiles_fit

MIN_WEIGHT_BYTES = 2**27  # Unit: bytes. A pass that reads fewer is so short that drafting slows it by more than 2%.
TILES_NEED = "a GPU of compute capability 9.x, bfloat16 or float16, and heads of at most 256"  # See prompt_tiles_fit.


@dataclass(frozen=True)
class GraphPlan:
    """How passes run.

    Args:
        graph: one of MODES.
        sizes: rows of the captured decode passes.
        attention: attention backend of decode passes.
        prompt_sizes: tokens of the captured prompt passes.
        prompt_attention: attention backend of prompt passes.
        captured: whether the device supports captured passes.
        note: a change to the requested options, shown to the user.
    """

    graph: str
    sizes: tuple[int, ...]
    attention: str
    prompt_sizes: tuple[int, ...]
    prompt_attention: str
    captured: bool = False
    note: str | None = None

    @property
    def torch_prompt_attention(self) -> bool:
        """Whether prompt attention needs the K/V of a slot in one contiguous tensor, as torch's backends do."""
        return self.prompt_attention != "triton" or not self.captured


def plan_graphs(
    options: EngineOptions, backend: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> GraphPlan:
    """Plan the passes of a model on a device, for chunks of `options.chunk` tokens. Raises ParameterError."""
    captured = backend != "torch" and device.type == "cuda"
    tiles_fit = captured and prompt_tiles_fit(spec.pages.head_dim, dtype, device_of(device))
    if options.batch_invariant and captured and not tiles_fit:
        why = f" needs prompt_attention triton, and that {TILES_NEED}; or the CPU"
        raise conflict("batch_invariant", why)
    prompt_attention = options.prompt_attention
    if prompt_attention == "auto":
        prompt_attention = "triton" if tiles_fit or not captured else "flash"
    if prompt_attention == "triton" and captured and not tiles_fit:
        raise conflict("prompt_attention", f" triton needs {TILES_NEED}; use flash")
    graph = options.graph if captured else "none"
    below, note = lowered(graph, ATTENTION[options.attention]), None
    if below != graph:
        note = f"graph {graph} becomes {below}: {options.attention} attention cannot be captured"
    sizes = graph_sizes(options.slots, options.graph_sizes)
    prompts = prompt_pass_sizes(options, options.chunk)
    mode = prompt_mode(below, prompt_attention)
    if mode != MODES[below][0] and options.prompt_attention != "auto":
        note = f"graph {graph} becomes {mode} for prompt passes: {prompt_attention} attention cannot be captured"
    return GraphPlan(below, sizes, options.attention, prompts, prompt_attention, captured, note)


def prompt_pass_sizes(options: EngineOptions, chunk: int) -> tuple[int, ...]:
    """Return the tokens of the captured prompt passes for chunks of at most `chunk` tokens."""
    limit = options.prompt_graph_max_tokens or MAX_PROMPT_GRAPH_TOKENS
    if options.batch_invariant:
        return (chunk,) if chunk <= limit else ()
    return prompt_sizes(chunk, limit, options.prompt_graph_sizes)


def plan_drafts(options: EngineOptions, graphs: GraphPlan, weights: int) -> tuple[tuple[int, int] | None, str | None]:
    """Decide whether an engine drafts.

    Args:
        weights: bytes of the weights that a pass of one row reads.

    Returns: The maximum and minimum number of tokens that must match for a draft, or None for no drafts. The second
    result is the reason if the engine decided against drafts, as a phrase that follows "it".

    Raises:
        ParameterError: drafts are requested and impossible.
    """
    why, smallest = options.why_no_drafts, graphs.sizes[0]
    if not why and max_queries(smallest) == 1:
        why = f"verifies in passes of at most {max(COSTS)} requests, and the smallest of graph_sizes is {smallest}"
    if options.speculate == "off":
        return None, None
    if options.requests_drafts:
        if why:
            raise options.no_drafts(why)
        return options.ngram, None
    if not why and (MODES[graphs.graph][1] == "none" or ATTENTION[graphs.attention] < Support.UNIFORM_BATCH):
        why = "pays on a GPU only, where decode passes are captured and attention is Triton's"
    if not why and weights < MIN_WEIGHT_BYTES:
        why = f"pays for models of {MIN_WEIGHT_BYTES >> 20} MiB or more: drafting takes 5 us of each pass"
    return (None, why) if why else (NGRAM, None)
