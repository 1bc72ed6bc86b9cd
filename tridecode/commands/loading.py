"""From the options to a loaded engine and its sampling parameters."""

from ..engine import Engine
from ..sampling import SamplingParams
from .parser import sampling_overrides
from .terminal import Output


def load_engine(args, output: Output) -> tuple[Engine, SamplingParams]:
    """Load the model, with a progress bar, and show what the engine has to say."""
    overrides = sampling_overrides(args)
    SamplingParams(**overrides)  # a wrong value fails here, before the weights are read
    with output.loading() as progress:
        engine = Engine.load(
            args.model,
            device=args.device,
            backend=args.backend,
            dtype=args.dtype,
            max_seq_len=args.max_seq_len,
            graph=args.graph,
            progress=progress,
        )
    for note in engine.notes:
        output.note(note)
    return engine, engine.default_params(**overrides)
