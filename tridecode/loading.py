"""Loaded: a model on its device, from a checkpoint or from weights, and the plan that it was built by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from .arguments import function, shown
from .blocks.spec import ModelSpec
from .blocks.weights import Weights
from .checkpoint.hub import BUNDLED, fetch_weights, resolve_model
from .checkpoint.load import load_config, load_weights
from .errors import EngineClosed
from .layout import NGRAM
from .options import EngineOptions
from .plan import threads
from .plan.device import find_device
from .plan.graphs import GraphPlan
from .plan.memory import allocating
from .plan.resolve import EnginePlan, resolve
from .serve.policy import Policy
from .step.model import DecodeModel, make_model
from .tensors import short_repr
from .text.tokenizer import Tokenizer
from .tuning.configs import PassConfigs


@dataclass
class Loaded:
    """What an engine is before it runs a pass: a model, and the plan of its passes."""

    model: DecodeModel
    tokenizer: Tokenizer | None
    plan: EnginePlan
    name: str
    notes: list[str] = field(default_factory=list)
    threads: int | None = None  # of the CPU; None: the user has chosen

    @classmethod
    def load(
        cls, model: str | Path | None = None, *, progress: Callable[[int, int], None] | None = None, **options
    ) -> Self:
        """Load a checkpoint.

        Args:
            model: a directory or a Hugging Face id. None is the bundled model, and so is "bundled" unless there is a
                directory of that name.
            progress: called with (bytes done, bytes in all) while weights load.
            options: the fields of EngineOptions.

        On a CPU the engine sets PyTorch's number of threads: one for a tiny model, else the number of free cores. A
        number from OMP_NUM_THREADS or torch.set_num_threads stays.

        Raises:
            CheckpointError: the checkpoint cannot be used.
            DeviceError: the device is absent, or the model does not fit.
            ParameterError: an option is wrong, or contradicts another one, the model or the device.
        """
        function("progress", progress)
        requested = EngineOptions(**{name: named(value) for name, value in options.items()})
        device = find_device(requested)
        path = resolve_model(model, weights=False)
        plan = resolve(requested, load_config(path), device)
        plan.check()
        fetch_weights(model, path)
        tokenizer = Tokenizer.load(path)
        cores = threads.FreeCores()
        weights = load_weights(path, plan.spec, device, plan.dtype, progress, plan.host_layers)
        engine = cls.build(plan, weights, tokenizer, BUNDLED.name if model is None else str(model))
        engine.threads = threads.choose(plan.memory.weights, cores) if device.type == "cpu" else None
        return engine

    @classmethod
    def build(
        cls,
        plan: EnginePlan,
        weights: Weights,
        tokenizer: Tokenizer | None = None,
        name: str = "",
        configs: Mapping[int, PassConfigs] | None = None,
    ) -> Self:
        """Build an engine from weights that are on their device already. configs: launch configs by rows, by default
        those chosen for the GPU."""
        options = plan.options
        with allocating(plan.capacity, plan.device):
            model = make_model(
                plan.spec, weights, plan.capacity, plan.slots, plan.page or plan.capacity, configs, plan.pages,
                plan.rows, plan.chunk, batch_invariant=options.batch_invariant, offload=plan.offload,
                speculate=plan.ngram is not None, ngram=plan.ngram or NGRAM, one_piece=plan.graphs.one_piece,
            )  # fmt: skip
        return cls(model, tokenizer, plan, name, list(plan.notes))

    def __repr__(self) -> str:
        if self.model is None:
            return f"Engine(name={shown(self.name)}, closed)"
        facts = {"name": shown(self.name), "family": self.config.family, "backend": self.backend}
        return short_repr(self, self.model.weights.embed, **facts, graph=self.graph, capacity=self.capacity)

    @property
    def backend(self) -> str:
        return self.plan.backend

    @property
    def graphs(self) -> GraphPlan:
        return self.plan.graphs

    @property
    def graph(self) -> str:
        """How passes run: one of dispatch.MODES."""
        return self.plan.graphs.graph

    @property
    def policy(self) -> Policy:
        """How requests share the passes."""
        options = self.plan.options
        return Policy(self.plan.chunk, options.max_queue, options.prompt_ms, options.prefix_sharing)

    @property
    def config(self) -> ModelSpec:
        return self._open().spec

    @property
    def device(self) -> torch.device:
        return self._open().device

    @property
    def capacity(self) -> int:
        """Positions of a request's context: prompt and output together."""
        return self._open().kv.capacity

    @property
    def slots(self) -> int:
        """Requests that run at a time."""
        return len(self._open().workspace.tokens)

    @property
    def kv_tokens(self) -> int:
        """K/V positions of all requests together on the device."""
        return self._open().kv.positions

    def _open(self) -> DecodeModel:
        if self.model is None:
            raise EngineClosed
        return self.model


def named(value):
    """Return the name of a torch dtype or device, and other values as they are."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value
