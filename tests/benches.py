"""Shared helpers of the tests of bench."""

from functools import partial
from pathlib import Path

import torch
from models import CUDA, build_engine, tiny_config

from tridecode import cli as commands
from tridecode.checkpoint.load import random_weights
from tridecode.engine import Engine
from tridecode.state.kv import PAGE

ROOT = Path(__file__).parents[1]
FACTS = {"dtype": "bfloat16", "gpu": "a clock", "tridecode": "0", "torch": "0", "triton": "0"}
DTYPE = torch.bfloat16 if CUDA else torch.float32


def engine_of(capacity, slots=1, kv_tokens=None, **more) -> Engine:
    """A tiny engine with pages of the usual size."""
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    config = tiny_config(max_position=max(capacity, 512))
    weights = random_weights(config, device, DTYPE)
    more |= dict(slots=slots, pages=kv_tokens and kv_tokens // PAGE, page=PAGE)
    return build_engine(config, weights, capacity, "triton" if CUDA else "torch", **more)


def run_bench(capsys, *argv):
    """Run `bench ARGS`; returns exit code, stdout and stderr."""
    code = commands.main(["bench", *argv])
    return code, *capsys.readouterr()


def bench_on_tiny_engines(capsys, monkeypatch, *modules, make=lambda args, *sizes, **more: engine_of(*sizes)):
    """Return `run_bench` with tiny engines and constant hardware limits.

    Args:
        capsys: pytest's fixture
        monkeypatch: pytest's fixture
        modules: modules of `bench` whose engines are replaced
        make: builds an engine; the result's list `made` contains the engines
    """
    made = []

    def engine(*args, **more):
        made.append(make(*args, **more))
        return made[-1]

    for module in modules:
        monkeypatch.setattr(f"tridecode.cli.bench.{module}.bench_engine", engine)
        for limit, value in (("read_bandwidth", 1e9), ("matmul_rate", 1e12)):
            monkeypatch.setattr(
                f"tridecode.cli.bench.{module}.{limit}", lambda device, value=value: value, raising=False
            )
    if "speculate" in modules:
        monkeypatch.setattr("tridecode.cli.bench.speculate.need_gpu", lambda: None)
    for name in ("measure", *({"speculate"} & set(modules))):
        monkeypatch.setattr(f"tridecode.cli.bench.{name}.run_facts", lambda device: FACTS)
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    run = partial(run_bench, capsys)
    run.made = made
    return run
