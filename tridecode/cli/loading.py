"""From the options to a loaded engine and its sampling parameters; from one model to another."""

from dataclasses import replace
from pathlib import Path

from ..blocks.spec import ModelSpec
from ..checkpoint.hub import BUNDLED, resolve_model
from ..checkpoint.load import load_config
from ..engine import Engine
from ..plan.memory import plan_memory
from ..plan.placement import resolve_dtype, to_quantize
from ..sampling import SamplingParams
from ..text.tokenizer import Tokenizer
from .engine_options import BATCH_SLOTS
from .explain import LOADING, with_options
from .parser import sampling_overrides
from .terminal import Output


def load_engine(args, output: Output) -> tuple[Engine, SamplingParams]:
    """Load the model, with a progress bar, and show what the engine has to say."""
    overrides = sampling_overrides(args)
    SamplingParams(**overrides)  # a wrong value fails here, before the weights are read
    engine = load_model(args, args.model, args.max_seq_len, output)
    if args.command == "chat" or args.verbose:
        show_defaults(engine, overrides, output)
    return engine, engine.default_params(**overrides)


def load_model(args, model: str | None, max_seq_len: int | None, output: Output) -> Engine:
    """The engine of `model` (None: bundled) with the other options as they were given."""
    with output.loading() as progress:
        engine = Engine.load(
            model,
            device=args.device,
            backend=args.backend,
            dtype=args.dtype,
            max_seq_len=max_seq_len,
            slots=slots_of(args),
            kv_tokens=args.kv_tokens,
            kv_offload=args.kv_offload,
            kv_ring=args.kv_ring,
            weights_offload=args.weights_offload,
            graph=args.graph,
            graph_sizes=args.graph_sizes,
            attention=args.attention,
            chunk_tokens=args.chunk_tokens,
            prompt_graph_max_tokens=args.prompt_graph_max_tokens,
            prompt_graph_sizes=args.prompt_graph_sizes,
            prompt_attention=args.prompt_attention,
            prompt_ms=args.prompt_ms,
            prefix_sharing=args.prefix_sharing,
            quantize=args.quantize,
            quantize_head=args.quantize_head,
            kv_dtype=args.kv_dtype,
            batch_invariant=args.batch_invariant,
            speculate=args.speculate,
            speculate_ngram=args.speculate_ngram,
            max_queue=getattr(args, "max_queue", None),
            progress=progress,
        )
    for note in engine.notes:
        output.note(with_options(note, LOADING))
    return engine


def slots_of(args) -> int:
    """Requests at a time: --slots, or the command's own number."""
    many = args.command == "serve" or getattr(args, "jsonl", None) is not None
    return args.slots or (BATCH_SLOTS if many else 1)


def show_defaults(engine: Engine, given: dict, output: Output) -> None:
    """One line with the sampling defaults that the checkpoint brings and no option replaced."""
    found = [f"{name} {value}" for name, value in engine.config.generation_defaults if name not in given]
    if found:
        output.note(f"{', '.join(found)} from generation_config.json")


class Loader:
    """Loads other models for a running chat, with the options that it was started with."""

    def __init__(self, args, output: Output):
        self._args, self._output = args, output
        self.model: str | None = args.model  # the one in use

    def switch(self, chat, name: str) -> None:
        """Give `chat` (a chat.talk.Chat) the model `name`; whatever is raised, it then has the model it had.

        Only where both models do not fit the old one goes first, and comes back if the new one fails. If even that
        fails, chat.engine is None.
        """
        path = resolve_model(name)
        spec = to_quantize(load_config(path), self._args.quantize, self._args.quantize_head, self._args.kv_dtype)
        if not chat.conversation.raw:  # its PromptError, before anything is given up
            Tokenizer.load(path).encode_chat([{"role": "user", "content": "Hello"}])
        if self._fits_beside(chat.engine, spec):
            chat.use(self._load(name, path, spec))
        else:
            self._output.note(f"{chat.engine.name} and {name} do not fit together: the first is let go before")
            chat.engine, failure = None, None
            try:
                chat.use(self._load(name, path, spec))
            except BaseException as error:
                failure = error.with_traceback(None)  # which holds what was loaded so far
            if failure is not None:
                before = resolve_model(self.model)
                chat.use(self._load(self.model, before, load_config(before)))
                raise failure
        self.model = name
        show_defaults(chat.engine, chat.given, self._output)

    def _load(self, model: str | None, path: Path, spec: ModelSpec) -> Engine:
        # The path was resolved already; the name is what people see.
        limit = self._args.max_seq_len and min(self._args.max_seq_len, spec.max_position)
        engine = load_model(self._args, path, limit, self._output)
        engine.name = model or BUNDLED.name
        return engine

    def _fits_beside(self, old: Engine, spec: ModelSpec) -> bool:
        """Whether the new model gets beside the old one the context that it would get alone.

        Raises DeviceError where it does not fit even alone.
        """
        dtype = resolve_dtype(self._args.dtype, spec, old.device)
        policy = old.policy
        how = dict(chunk=policy.chunk_tokens, speculate=policy.speculates)
        now = plan_memory(spec, dtype, old.device, slots_of(self._args), **how)
        alone = replace(now, free=now.free + old.plan.needed(old.capacity, old.kv_tokens))
        asked = self._args.max_seq_len and min(self._args.max_seq_len, spec.max_position)
        return now.max_context >= alone.capacity(asked, str(old.device))
