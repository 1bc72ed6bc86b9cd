"""Tests of `tridecode tune`: the command, the table that it writes, and the timing of passes on a GPU."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hybrid import hybrid_engine, hybrid_weights
from models import tiny_engine

from tridecode import cli as commands
from tridecode.cli import tune
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.kernels.attention.attention import AttentionConfig
from tridecode.kernels.device import Device
from tridecode.kernels.linear.matvec import MatvecConfig
from tridecode.kernels.linear.project import Case
from tridecode.step import graphs
from tridecode.step.compiling import missing
from tridecode.step.dispatch import BatchDescriptor
from tridecode.tuning import tables
from tridecode.tuning.configs import AttentionCase
from tridecode.tuning.resolve import resolve_configs
from tridecode.tuning.search import Search, config_of, with_config
from tridecode.tuning.tables import VALUES, entry_of, table_path

CUDA = torch.cuda.is_available()
BF16 = torch.bfloat16
GPU = Device("NVIDIA Test 1 (80GB)", 90, 132, 232448, 233472, 65536)
QKV, DOWN = Case(512, 4096, BF16, "normed"), Case(256, 4096, BF16, "residual")
CASES = {"qkv": QKV, "o_proj": DOWN, "down": DOWN}
ATTENTION = AttentionCase(4, 2, 64, BF16)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache directory, empty."""
    monkeypatch.setattr(tables.platformdirs, "user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake(cache, monkeypatch):
    """Replace the engine and the timer of the command. The timer reports shorter times for more warps."""
    configs = resolve_configs(CASES.values(), [ATTENTION], BF16, GPU)[1]
    for part in (QKV, DOWN):
        configs = with_config(configs, part, MatvecConfig(2, 4))
    model = SimpleNamespace(cases=CASES, configs=configs, configs_for=1)
    engine = SimpleNamespace(model=model, device=torch.device("cpu"))
    monkeypatch.setattr(tune, "StepTimer", lambda engine, contexts: Timer())
    monkeypatch.setattr(tune, "bench_engine", lambda args, capacity, slots: engine)
    monkeypatch.setattr(tune, "model_facts", lambda engine, args: {"preset": args.preset})
    monkeypatch.setattr(tune, "run_facts", lambda device: {"gpu": GPU.name})
    monkeypatch.setattr(tune, "device_of", lambda device: GPU)
    monkeypatch.setattr(tune, "need_gpu", lambda command: None)
    return model


class Timer:
    contexts = [128]

    def __call__(self, configs) -> float:
        return 1e-3 / sum(config_of(configs, part).num_warps for part in (QKV, DOWN, ATTENTION))

    def compile(self, several) -> None:
        assert several


def test_the_command_writes_a_table_for_the_next_engine(fake, capsys):
    assert commands.main(["tune", "--preset", "qwen3-4b", "--minutes", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["us_after"] < report["us_before"] and report["finished"] and report["preset"] == "qwen3-4b"
    assert report["table"] == str(table_path(GPU.name))
    found = resolve_configs(CASES.values(), [ATTENTION], BF16, GPU, user_table=True)[1]
    assert report["shapes"] == {
        "qkv": entry_of(found.linears[QKV].config),
        "o_proj": entry_of(found.linears[DOWN].config),
        "down": entry_of(found.linears[DOWN].config),
        "attention": entry_of(found.attention[ATTENTION]),
    }
    assert {choice.source for choice in found.linears.values()} == {"user table"}
    assert found.attention[ATTENTION].num_warps == max(VALUES[AttentionConfig]["num_warps"])
    assert [line.split(" kernel")[0].strip() for line in lines[:3]] == ["qkv", "o_proj, down", "attention"]


def test_table_requires_a_confirmed_gain(fake, capsys, monkeypatch):
    def timed(seconds):
        monkeypatch.setattr(Timer, "__call__", lambda self, configs: seconds(configs))

    timed(lambda configs: 1e-3)
    assert commands.main(["tune"]) == 0
    out = capsys.readouterr().out
    assert "no launch configs are faster" in out and json.loads(out.splitlines()[-1])["table"] is None
    lucky = iter([1e-3, *[1e-4] * 200])
    other = with_config(fake.configs, QKV, MatvecConfig(4, 4))
    timed(lambda configs: 1e-4 if configs == fake.configs else next(lucky))
    monkeypatch.setattr(tune, "search", lambda start, *rest: Search(other, 1e-5))
    assert commands.main(["tune"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["table"] is None, (
        "a table was written without a confirmed gain"
    )
    timed(lambda configs: None)
    assert commands.main(["tune"]) == 1
    assert capsys.readouterr().err.startswith("tridecode: error: the pass gave different logits")
    assert not table_path(GPU.name).exists()


@pytest.mark.parametrize("build", [tiny_engine, lambda: hybrid_engine(hybrid_weights())], ids=["dense", "hybrid"])
def test_logits_are_compared_over_the_same_cache(build):
    engine = build()
    timer = tune.StepTimer(engine)
    assert timer.same_logits()
    rewind(engine, timer.contexts[-1] - 40, tune.GREEDY)  # Rewind and run 39 passes, as a timing does.
    for _ in range(39):
        enqueue(engine, tune.GREEDY)
    assert timer.same_logits()
    engine.model.weights.lm_head.weight.neg_()
    assert not timer.same_logits()


def with_qkv(model, **fields):
    """Return the launch configs of a model in which qkv has other fields."""
    part = model.cases["qkv"]
    return with_config(model.configs, part, replace(config_of(model.configs, part), **fields))


@pytest.mark.skipif(not CUDA, reason="the test captures and times passes on an NVIDIA GPU")
def test_real_pass_is_timed_if_it_compiles():
    engine = tiny_engine()
    timer, start = tune.StepTimer(engine), engine.model.configs
    assert 0 < timer(start) < 0.1
    # The number is not a power of two, so the kernel does not compile.
    assert timer(with_qkv(engine.model, block_n=3)) is None
    (attention,) = start.attention
    assert 0 < timer(with_config(start, attention, replace(start.attention[attention], splits=1))) < 0.1
    assert 0 < timer(start) < 0.1


@pytest.mark.skipif(not CUDA, reason="the test launches kernels on an NVIDIA GPU")
def test_configs_are_compiled_ahead_if_others_fail():
    timer = tune.StepTimer(tiny_engine())
    model = timer.engine.model
    warps = config_of(model.configs, model.cases["qkv"]).num_warps
    wrong, right = with_qkv(model, block_n=3), with_qkv(model, num_warps=4 if warps == 8 else 8)
    other = replace(model, configs_by_rows={1: right})
    lines, run = graphs.decode_list(other, BatchDescriptor("greedy", 1)), graphs.launcher(other)
    timer(model.configs)
    assert missing(lambda: lines(run))
    timer.compile([wrong, right])
    assert not missing(lambda: lines(run))


@pytest.mark.skipif(not CUDA, reason="the test captures and times passes on an NVIDIA GPU")
def test_a_real_step_of_quantized_weights_is_tuned(cache, capsys):
    args = ["tune", "--preset", "qwen3-0.6b", "--quantize", "int4", "--minutes", "0.2"]
    assert commands.main(args) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["quantize"] == "int4" and report["tried"] > report["skipped"]
    assert {config["kernel"] for config in report["shapes"].values()} >= {"attention", "ring"}
