"""bench: time the decode step of a public shape with random weights against the bandwidth of the same run."""

import json
import statistics
import sys

import torch

from .. import __version__
from ..checkpoint import random_weights
from ..engine import Engine
from ..errors import DeviceError, ParameterError
from ..kernels.read import measure_read_bandwidth
from ..kv_cache import kv_bytes_per_token
from ..memory import free_memory, plan_memory
from ..presets import PRESETS
from ..sampling import SamplingParams

ALL_FILTERS = SamplingParams(
    temperature=0.8,
    top_k=200,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={7: 1.0},
    seed=1,
)
GREEDY = SamplingParams(temperature=0.0, seed=1)


def preset_engine(preset: str, capacity: int, graph: str = "full") -> Engine:
    """An engine of a public shape with random weights, its cache filled with random K/V. Needs a GPU."""
    if preset not in PRESETS:
        raise ParameterError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if not torch.cuda.is_available():
        raise DeviceError("bench needs an NVIDIA GPU and none is usable here")
    config, device = PRESETS[preset], torch.device("cuda", torch.cuda.current_device())
    plan = plan_memory(config, torch.bfloat16, device)
    plan.capacity(capacity, str(device))  # an error before memory is spent
    weights = random_weights(config, device, torch.bfloat16)
    engine = Engine.build(config, weights, None, capacity, "triton", graph, plan=plan, name=preset)
    for cache in (*engine.model.kv.k, *engine.model.kv.v):
        cache.normal_()
    return engine


def time_decode(engine: Engine, context: int, steps: int, runs: int, params: SamplingParams = GREEDY) -> list[float]:
    """Seconds a token of `runs` runs of `steps` steps from `context`; state is reset outside the timed region."""
    times = []
    for run in range(runs + 2):
        engine.rewind(context, params)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            engine.enqueue(params)
        end.record()
        end.synchronize()
        if run >= 2:  # two to warm up
            times.append(start.elapsed_time(end) / 1e3 / steps)
    return times


def step_bytes(engine: Engine, context: int, steps: int) -> int:
    """Bytes a step must read: every weight once (the embedding is one row unless it is also the head), and K/V."""
    weights = engine.model.weights
    tied = weights.lm_head.weight.data_ptr() == weights.embed.data_ptr()
    embed = 0 if tied else weights.embed.numel() * weights.dtype.itemsize
    positions = context + (steps - 1) / 2
    return int(weights.nbytes() - embed + positions * kv_bytes_per_token(engine.config, weights.dtype))


def decode(preset: str, context: int = 64, steps: int = 128, runs: int = 9, sampling: str = "greedy") -> dict:
    """One row: figures of the whole step, LM head and sampling included."""
    import triton

    engine = preset_engine(preset, context + steps + 2)
    bandwidth = measure_read_bandwidth(engine.device, min(2**33, free_memory(engine.device) // 2))
    times = sorted(time_decode(engine, context, steps, runs, GREEDY if sampling == "greedy" else ALL_FILTERS))
    median, nbytes = statistics.median(times), step_bytes(engine, context, steps)
    return {
        "preset": preset,
        "context": context,
        "steps": steps,
        "sampling": sampling,
        "us_per_token": round(median * 1e6, 1),
        "us_min": round(times[0] * 1e6, 1),
        "us_max": round(times[-1] * 1e6, 1),
        "tokens_per_second": round(1 / median, 1),
        "bytes_per_step": nbytes,
        "read_bandwidth_gbs": round(bandwidth / 1e9, 1),
        "pct_bandwidth": round(100 * nbytes / median / bandwidth, 1),
        "gpu": torch.cuda.get_device_name(engine.device),
        "tridecode": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def run(args) -> int:
    """Entry of `bench decode`: a line of figures, then one JSON line."""
    row = decode(args.preset, args.context, args.steps, args.runs, args.sampling)
    print(
        f"{row['preset']} context {row['context']}: {row['us_per_token']} us a token "
        f"({row['us_min']} to {row['us_max']}), {row['tokens_per_second']} tok/s, "
        f"{row['pct_bandwidth']}% of {row['read_bandwidth_gbs']} GB/s"
    )
    json.dump(row, sys.stdout)
    print()
    return 0
