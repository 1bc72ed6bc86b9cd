"""Loading of an engine from command-line options, and the switch of a running chat to another model."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ..blocks.spec import ModelSpec
from ..checkpoint.hub import resolve_model
from ..checkpoint.load import load_config
from ..checkpoint.names import model_name
from ..engine import Engine
from ..errors import as_json
from ..options import EngineOptions
from ..plan.device import find_device
from ..plan.resolve import EnginePlan, resolve
from ..sampling import SamplingParams
from ..text.tokenizer import Tokenizer
from .explain import LOADING, with_options
from .options import engine_options, sampling_overrides
from .terminal import Output

# Options for another model than that of the command line, whose adapters do not fit it.
WITHOUT_ADAPTERS = {"adapters": None, "adapter_memory": None, "max_rank": None}


def load_engine(args, output: Output) -> tuple[Engine, SamplingParams]:
    """Load the model with a progress bar, show the engine's notes, and return engine and sampling parameters."""
    overrides = sampling_overrides(args)
    SamplingParams(**overrides)  # A wrong value raises an error here, before the weights are read.
    engine = load_model(args, args.model, args.max_seq_len, output)
    if args.command == "chat" or args.verbose:
        show_defaults(engine, overrides, output)
    return engine, engine.default_params(**overrides, adapter=first_adapter(engine))


def first_adapter(engine: Engine) -> str | None:
    """Return the name of the adapter that answers use, unless the user selects another one."""
    return next(iter(engine.adapters), None)


def load_model(
    args, model: str | Path | None, max_seq_len: int | None, output: Output, adapters: bool = True
) -> Engine:
    """Load `model` (None: bundled) with the engine's options of the command line, with or without its adapters."""
    with output.loading() as progress:
        options = engine_options(args) | {"max_seq_len": max_seq_len} | ({} if adapters else WITHOUT_ADAPTERS)
        callers = None if args.command == "serve" else 1  # All other commands submit requests from one thread.
        engine = Engine.load(model, progress=progress.weights, compiling=progress.kernels, callers=callers, **options)
    for note in engine.notes:
        output.note(with_options(note, LOADING))
    return engine


def tokenizer_of(engine: Engine) -> Tokenizer:
    """Return the tokenizer of an engine, which every engine from a checkpoint has."""
    assert engine.tokenizer is not None
    return engine.tokenizer


def show_defaults(engine: Engine, overrides: Collection[str], output: Output) -> None:
    """Show a line with the sampling defaults of the checkpoint that are in effect because no option replaces them."""
    declared = [(name, value) for name, value in engine.config.generation_defaults if name not in overrides]
    defaults = [f"{name} {as_json(value) if isinstance(value, tuple) else value}" for name, value in declared]
    if defaults:
        output.note(f"{', '.join(defaults)} from generation_config.json")


class Loader:
    """Loader of other models for a running chat, with the options of the command line."""

    def __init__(self, args, output: Output):
        self._args, self._output = args, output
        self.model: str | None = args.model  # The model that is in use.

    def switch(self, model, name: str, overrides: Collection[str], raw: bool) -> None:
        """Replace the engine of `model` by an engine of the model `name`.

        If both engines do not fit in memory together, the old one is closed first. If the new engine then fails to
        load, the old one is loaded again. If this also fails, `model` has no engine. After other errors, the old engine
        stays in use.

        Args:
            model: a chat.local.LocalModel
            name: a directory or a Hugging Face id
            overrides: names of the sampling options that the checkpoint's defaults do not replace
            raw: whether the chat runs without a chat template
        """
        path = resolve_model(name)
        plan = self._plan(path)
        if not raw:  # If the model has no template, this call raises PromptError before the old engine is freed.
            Tokenizer.load(path).encode_chat([{"role": "user", "content": "Hello"}])
        if self._fits_with_current(model.engine, plan):
            model.use(self._load(name, path))
        else:
            self._output.note(f"{model.name} and {name} do not fit together in memory; closing {model.name} first")
            failure = None
            model.free_engine()
            try:
                model.use(self._load(name, path))
            except BaseException as error:
                # The traceback refers to objects that were loaded before the failure, and would keep them in memory.
                failure = error.with_traceback(None)
            if failure is not None:
                model.use(self._load(self.model, resolve_model(self.model)))
                raise failure
        self.model = name
        show_defaults(model.engine, overrides, self._output)

    def _plan(self, path: Path) -> EnginePlan:
        spec = load_config(path)
        options = EngineOptions(**engine_options(self._args) | {"max_seq_len": self._limit(spec)} | WITHOUT_ADAPTERS)
        return resolve(options, spec, find_device(options))

    def _limit(self, spec: ModelSpec) -> int | None:
        return self._args.max_seq_len and min(self._args.max_seq_len, spec.max_position)

    def _load(self, model: str | None, path: Path) -> Engine:
        # The path is already resolved. The name is for display.
        limit, own = self._limit(load_config(path)), model == self._args.model
        engine = load_model(self._args, path, limit, self._output, own)
        engine.name = model_name(model)
        return engine

    def _fits_with_current(self, old: Engine, plan: EnginePlan) -> bool:
        """Return whether the new model gets the same context while the old model is in memory as without the old model.

        Raises DeviceError if the new model does not fit without the old one either.
        """
        # The new model does not fit now. It may fit when the old model has released its host memory.
        if plan.problem and (old.plan.offload or old.plan.host_layers):
            return False
        now, freed = plan.memory, old.plan.memory.needed(old.capacity, old.kv_tokens)
        alone = replace(now, free=now.free + freed)
        return now.max_context >= alone.capacity(plan.options.max_seq_len, str(old.device))
