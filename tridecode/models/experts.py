"""Mixtures of experts: the keys of config.json that the families share."""

from dataclasses import replace
from typing import Any

from ..blocks.moe import MoE
from ..blocks.shared_expert import SharedExpert
from ..blocks.spec import Layer, ModelSpec
from .reader import ConfigReader, is_integer

MAX_EXPERTS = 1024  # Maximum experts of a layer.
MAX_ALL = 2**17  # Maximum experts of a model. The loader lists their tensors before it has seen a file.
MAX_WIDTH = 2**20


def with_experts(read: ConfigReader, spec: ModelSpec, shared: bool, normalize: bool | None = None) -> ModelSpec:
    """Return the specification with experts instead of MLPs. Raises CheckpointError.

    The layers that mlp_only_layers and decoder_sparse_step exclude keep their MLP.

    Args:
        shared: the family has a shared expert. It is stored as one more expert if it has the width of the experts.
        normalize: whether the weights of the chosen experts are divided by their sum. None: norm_topk_prob decides.
    """
    key, most = "num_experts" if "num_experts" in read.values else "num_local_experts", MAX_ALL // spec.num_layers
    count = read.integer(key, 1, min(MAX_EXPERTS, most))
    top_k = read.integer("num_experts_per_tok", 1, MAX_EXPERTS)
    if top_k > count:
        raise read.fail("num_experts_per_tok", f"at most the number of experts ({count})")
    only = read.get("mlp_only_layers", [])
    if not isinstance(only, list) or not all(is_integer(layer) for layer in only):
        raise read.fail("mlp_only_layers", "a list of numbers of layers")
    step = read.integer("decoder_sparse_step", 1, 2**31 - 1, default=1)
    inner = read.integer("moe_intermediate_size", 1, MAX_WIDTH)
    width = read.integer("shared_expert_intermediate_size", 1, MAX_WIDTH) if shared else 0
    common: dict[str, Any] = dict(hidden=spec.hidden_size, eps=spec.eps, norm_offset=spec.norm_offset)
    experts = MoE(
        **common, experts=count, top_k=top_k, intermediate=inner,
        normalize=read.flag("norm_topk_prob") if normalize is None else normalize, shared=width == inner,
        apart=SharedExpert(**common, intermediate=width) if width not in (0, inner) else None,
    )  # fmt: skip
    layers = (
        layer if i in only or (i + 1) % step else Layer(layer.mixer, experts) for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))
