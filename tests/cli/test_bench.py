"""bench: what is counted, how rows are written and compared, and every bench on a tiny model with a clock for a GPU."""

import json
import logging
import os
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
from benches import FACTS, Clock, run_bench
from models import CUDA, DEVICE, FAMILIES, begin, tiny_config, tiny_engine
from torch.autograd import DeviceType

from tridecode.checkpoint.load import random_weights
from tridecode.checkpoint.slices import parameter_count
from tridecode.cli.bench import ablate, first_token, measure, peers, prefill, start, step_bytes, suite, time_decode
from tridecode.cli.bench.passes import enqueue
from tridecode.cli.bench.stream import stream_figures
from tridecode.errors import GenerationError, ParameterError
from tridecode.kernels.device import Device
from tridecode.sampling import SamplingParams
from tridecode.step.graphs import DecodePasses, launcher
from tridecode.step.run import Allocating, run_reference

needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA graphs and activity records exist on a GPU only")


@pytest.fixture
def tiny(monkeypatch):
    """Every bench runs on a tiny engine, wherever the tests run; limits are constants."""
    made = []

    def engine(args, capacity):
        made.append(tiny_engine(capacity=capacity))
        return made[-1]

    for module in ("decode", "prefill", "stream"):
        monkeypatch.setattr(f"tridecode.cli.bench.{module}.bench_engine", engine)
        monkeypatch.setattr(f"tridecode.cli.bench.{module}.run_facts", lambda device: FACTS)
    monkeypatch.setattr("tridecode.cli.bench.decode.read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr("tridecode.cli.bench.prefill.matmul_rate", lambda device: 1e12)
    monkeypatch.setattr("tridecode.cli.bench.suite.need_gpu", lambda: None)
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "Event", Clock)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return made


@pytest.fixture
def bench(capsys):
    return partial(run_bench, capsys)


# what is counted


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step_by_hand(tied):
    engine = tiny_engine(dtype=torch.bfloat16, tie_word_embeddings=tied)
    # hidden 96, intermediate 160, 4 and 2 heads of 64, vocabulary 331, two layers
    layer = 96 * (256 + 2 * 128) + 256 * 96 + 3 * 96 * 160 + 2 * 96 + 2 * 64
    weights = 2 * (2 * layer + 96 + 331 * 96)
    kv = 2 * 2 * 128 * 2  # K and V of two layers, bf16
    assert step_bytes(engine, 10, 1) == weights + 10 * kv
    assert step_bytes(engine, 10, 5) == weights + 12 * kv  # positions 10 to 14
    assert step_bytes(engine, [10, 300], 5) == weights + (12 + 302) * kv  # the weights once for all rows


def test_flops_of_a_prompt_by_hand():
    config = tiny_config()
    qkv, rest, head = 96 * 512, 96 * 256 + 3 * 96 * 160, 96 * 331
    one = 2 * (2 * (qkv + rest) + head) + 2 * 4 * 256
    assert prefill.prefill_flops(config, 1) == one
    # two more tokens: the first layer in full and the second's q, k and v; they attend to 1 and 2 positions
    attention = 4 * 256 * (1 + 2) + 2 * 4 * 256 * (3 - 1)
    assert prefill.prefill_flops(config, 3) == one + 2 * 2 * (2 * qkv + rest) + attention
    alike = replace(config, layers=config.layers[:1] * 2)  # one object
    assert prefill.prefill_flops(alike, 3) == prefill.prefill_flops(config, 3)


def test_flops_of_a_sliding_window_by_hand():
    full, window = (
        prefill.prefill_flops(tiny_config(**FAMILIES["mistral"] | {"sliding_window": w}), 40) for w in (None, 24)
    )
    # of 39 tokens the last 15 attend to 24 positions in one layer; the 40th in two
    assert full - window == 4 * 256 * (sum(range(25, 40)) - 15 * 24) + 2 * 4 * 256 * (40 - 24)


@pytest.mark.parametrize("window", [None, 24])
def test_flops_behind_what_is_cached_are_those_of_the_whole_without_those_of_the_beginning(window):
    """But for what only a last token needs, which the beginning has too."""
    config = tiny_config(**FAMILIES["mistral"] | {"sliding_window": window})
    whole, first = (prefill.prefill_flops(config, tokens) for tokens in (40, 33))
    rest = 96 * 256 + 3 * 96 * 160
    end = 4 * 256 * min(33, window or 33)  # of the beginning's last token: in the last layer only it attends
    assert prefill.prefill_flops(config, 7, 33) == whole - (first - 2 * (rest + 96 * 331) - end)


def test_percentiles():
    assert measure.spread([3.0, 1.0, 2.0], 10) == pytest.approx((20.0, 11.0, 29.0))
    assert measure.spread([5.0]) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("intervals", "span", "union"),
    [
        ([(0, 2), (5, 6)], 6, 3),
        ([(5, 6), (0, 2)], 6, 3),  # in any order
        ([(0, 4), (3, 6), (3.5, 4)], 6, 6),  # overlapping, one inside another
        ([(1, 2), (2, 4)], 3, 3),
    ],
)
def test_span_and_union_of_kernels(intervals, span, union):
    assert ablate.span_and_union(intervals) == (span, union)


# benches on a tiny model


def test_decode(tiny, bench):
    code, out, err = bench("decode", "--context", "20", "--steps", "3", "--runs", "4", "--sampling", "all")
    row = json.loads(out.split("\n")[-2])
    assert code == 0 and tiny[0].capacity == 25
    assert row["us_p5"] <= row["us_per_token"] <= row["us_p95"]
    # Figures are rounded for reading: of short steps the time, of long ones what is made from it.
    assert row["pct_bandwidth"] == pytest.approx(row["bytes_per_step"] / row["us_per_token"] / 1e3 * 100, 1e-3, 0.06)
    assert row["tokens_per_second"] == pytest.approx(1e6 / row["us_per_token"], 1e-3, 0.06)
    assert "us_over_greedy" in row and row["command"].endswith("--context 20 --steps 3 --sampling all")
    for key in ("preset", "context", "bytes_per_step", "read_bandwidth_gbs", "gpu", "torch", "triton"):
        assert key in row
    assert "all sampling filters" in out and "a clock" in out


def test_time_decode_starts_each_run_at_the_context(tiny):
    engine = tiny_engine()
    assert len(time_decode(engine, 30, 5, 2)) == 2
    engine.synchronize()
    assert engine.model.workspace.meta[0, measure.STATUS] == measure.RUN
    assert engine.model.workspace.tokens[0, :31].eq(0).all()


def test_prefill_has_a_row_for_each_length(tiny, bench):
    code, out, _ = bench("prefill", "--prompt-tokens", "12,1", "--runs", "2", "--format", "json")
    long, short = json.loads(out)
    assert code == 0 and tiny[0].capacity == 13
    assert (long["prompt_tokens"], short["prompt_tokens"]) == (12, 1)
    assert long["command"].endswith("--prompt-tokens 12 --cached 0 --graph full")
    assert short["command"].endswith("--prompt-tokens 1 --cached 0 --graph full")
    assert long["flops"] > short["flops"] and 0 < long["ttft_ms"]
    assert long["pct_matmul"] == pytest.approx(100 * long["flops"] / (long["prefill_ms"] / 1e3) / 1e12, abs=0.06)


def test_prefill_of_a_second_turn_in_several_modes(tiny, bench, monkeypatch):
    """Each run reads the new tokens and no other, in whichever mode; a row says how."""
    argv = ("--prompt-tokens", "7,20", "--cached", "30", "--graph", "full,full_decode_only", "--runs", "2")
    code, out, _ = bench("prefill", *argv, "--format", "json")
    rows = json.loads(out)
    assert code == 0 and len(tiny) == 1 and tiny[0].capacity == 51
    assert [(row["prompt_tokens"], row["cached"], row["graph"]) for row in rows] == [
        (7, 30, "full"), (7, 30, "full_decode_only"), (20, 30, "full"), (20, 30, "full_decode_only"),
    ]  # fmt: skip
    for row in rows:
        assert row["command"].endswith(f"--prompt-tokens {row['prompt_tokens']} --cached 30 --graph {row['graph']}")
        assert row["reads"] == ("full" if CUDA and row["graph"] == "full" else "none")
        assert row["flops"] == prefill.prefill_flops(tiny[0].config, row["prompt_tokens"], 30) and row["ttft_ms"] > 0


def test_a_prompt_that_was_read_from_another_token_on_is_no_figure(tiny):
    engine = tiny_engine()
    assert len(prefill.time_prefill(engine, 5, 1, 20)[0]) == 1
    cache = engine.scheduler.slots.cache
    match = cache.match
    cache.match = lambda ids, salt: match(ids[:-5], salt)
    with pytest.raises(GenerationError, match="the cache held 19 tokens, not 20"):
        prefill.time_prefill(engine, 5, 1, 20)


@needs_gpu
def test_every_size_of_every_mode_is_captured_before_it_is_timed():
    engine = tiny_engine(capacity=300)
    modes = measure.make_runners(engine, ["full", "full_and_piecewise", "full_decode_only"])
    assert modes["full"].prompts is engine.prompts and engine.prompts.seconds.keys() > {(64, 0)}
    assert modes["full_and_piecewise"].prompts.seconds.keys() == engine.prompts.seconds.keys()
    for mode, expected in zip(modes, ("full", "piecewise", "none")):
        before = modes[mode].reads()
        with measure.running(engine, modes[mode]):
            prefill.time_prefill(engine, 100, 1)
        assert measure.read_modes(before, modes[mode].reads()) == expected


def test_stream(tiny, bench):
    code, out, _ = bench("stream", "--context", "9", "--steps", "6", "--runs", "2", "--format", "jsonl")
    row = json.loads(out)
    assert code == 0 and row["steps"] == 6
    assert row["ratio_to_graph"] == pytest.approx(row["us_per_token"] / row["graph_us_per_token"], 1e-3, 1e-3)
    assert row["itl_median_us"] <= row["itl_p99_us"] and row["ttft_ms"] > 0


def test_stream_figures_by_hand():
    found = stream_figures([(0.5, [1e-6, 3e-6]), (0.1, [4e-6, 4e-6])], [2e-6, 2e-6])
    assert found["us_per_token"] == 3 and found["graph_us_per_token"] == 2 and found["ratio_to_graph"] == 1.5
    assert found["ttft_ms"] == 300 and found["itl_mean_us"] == 3 and found["itl_median_us"] == 3.5


def test_a_suite_writes_what_it_could_measure(tiny, bench, monkeypatch, tmp_path):
    lines = "decode --context 5 --steps 2 --runs 1\nprefill --prompt-tokens 900 --capacity 8 --runs 1"
    monkeypatch.setitem(suite.SUITES, "targets", lines)
    code, out, err = bench("suite", "--output", str(tmp_path / "rows.json"))
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert code == 1 and row["bench"] == "decode" and json.loads(out.split("\n")[-2]) == row
    assert "prefill" in err and "900" in err and "[2/2]" in err and f"us_per_token {row['us_per_token']}" in err


def test_a_suite_without_any_row_leaves_the_file(tiny, bench, monkeypatch, tmp_path):
    monkeypatch.setitem(suite.SUITES, "targets", "prefill --prompt-tokens 900 --capacity 8")
    (tmp_path / "rows.json").write_text("before")
    code, out, err = bench("suite", "--output", str(tmp_path / "rows.json"))
    assert code == 1 and out == "" and "every row failed" in err
    assert (tmp_path / "rows.json").read_text() == "before"


# the ladder


def test_the_workspace_that_allocates_gives_the_same_tokens():
    tokens, params = [], SamplingParams(temperature=0.0, seed=1)
    for fresh in (False, True):
        engine = tiny_engine("triton", "none")
        if fresh:
            engine.steps = DecodePasses(engine.model, Allocating(launcher(engine.model)))
        begin(engine, [5, 17], 0, params, limit=6)
        for _ in range(4):
            enqueue(engine, params)
        engine.synchronize()
        tokens.append(engine.model.workspace.tokens[0, :6].tolist())
    assert tokens[0] == tokens[1]


def test_one_allocation_for_every_output_of_every_op(monkeypatch):
    """Of a layer: qkv 1; attention 3 (partial results twice); o_proj 3 (residual, norm, its sums); gate_up 1; down 3.

    Beside the layers: embed 3, lm_head 1.
    """
    made = []
    engine = tiny_engine("torch", "none", torch.float32)
    steps, empty_like = DecodePasses(engine.model, Allocating(run_reference)), torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: made.append(tuple(t.shape)) or empty_like(t))
    counts = []
    for _ in range(3):
        steps.replay("greedy")
        counts.append(len(made))
    assert counts == [26, 52, 78]
    assert made.count((1, 331)) == 3  # logits


def test_rungs_of_the_ladder():
    engine = tiny_engine("torch", "none", torch.float32)
    engine.model = replace(engine.model, gpu=Device(capability=80))
    assert len(list(ablate.variants(engine))) == 3
    engine.model = replace(engine.model, gpu=Device(capability=90))
    found = list(ablate.variants(engine))
    assert [name.split(",")[0] for name, _ in found] == ["eager", "eager", "graph", "graph"]
    assert all(steps.model.weights is engine.model.weights for _, steps in found)
    own = engine.steps
    assert found[-1][1] is own
    with ablate.stepping(engine, found[0][1]):
        assert engine.steps is found[0][1]
    assert engine.steps is own


def test_steps_that_have_ended_are_no_figure():
    engine = tiny_engine("torch", "none", torch.float32)
    engine.model.workspace.meta[0, measure.STATUS] = 3
    with pytest.raises(GenerationError, match="ended early"):
        measure.check_running(engine, "graph")


def test_kernels_belong_to_the_range_that_ran_them():
    def event(name, start, end, device=DeviceType.CUDA, annotation=False):
        place = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=place, device_type=device, is_user_annotation=annotation)

    events = [
        event("graph", 10, 50, DeviceType.CPU, True),
        event("graph", 12, 40, annotation=True),  # the profiler's copy of the range on the GPU's time line
        event("eager", 60, 90, DeviceType.CPU, True),
        event("fill", 2, 4),
        event("a", 12, 20),
        event("b", 18, 30),
        event("c", 35, 40),
        event("d", 61, 62),
        event("aten::empty_like", 13, 14, DeviceType.CPU),
    ]
    found = ablate.kernels_within(events, "graph")
    assert found == [(12, 20), (18, 30), (35, 40)] and ablate.kernels_within(events, "eager") == [(61, 62)]
    figures = {"span_us": 14.0, "compute_us": 11.5, "gap_us": 2.5, "gap_pct": 17.9}
    assert ablate.device_figures(found, 2) == figures


@pytest.mark.skipif(CUDA, reason="a GPU records kernels")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_profiler_that_records_no_kernel_leaves_the_wall_times(tiny, bench):
    code, out, err = bench("decode", "--ablate", "--context", "4", "--steps", "2", "--runs", "1")
    rows = json.loads(out.split("\n")[-2])["rows"]
    assert code == 0 and [row["variant"] for row in rows][-1] == "graph" and len(rows) == 3
    assert all(row["wall_us"] > 0 and "gap_us" not in row for row in rows)
    assert err.count("recorded no kernel") == 3


@needs_gpu
def test_ladder_on_the_gpu():
    output = SimpleNamespace(note=lambda message: None)
    rungs = ablate.ladder(tiny_engine(), 8, 16, 2, measure.GREEDY, output)
    assert len(rungs) == 3 + (torch.cuda.get_device_capability() >= (9, 0))
    for rung in rungs:
        assert 0 < rung["compute_us"] <= rung["span_us"] and rung["wall_us"] > 0
    assert rungs[-1]["wall_us"] < rungs[0]["wall_us"]


# process start


def test_seconds_to_the_first_line():
    code = "import json, os; print(json.dumps({'cache': os.environ['TRITON_CACHE_DIR']}), flush=True); print('more')"
    seconds, found = start.time_to_first_line([sys.executable, "-c", code], os.environ | {"TRITON_CACHE_DIR": "x"})
    assert 0 < seconds < 60 and found == {"cache": "x"}


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "pass"])
def test_a_process_without_a_token(code):
    with pytest.raises(GenerationError, match="before its first token"):
        start.time_to_first_line([sys.executable, "-c", code], dict(os.environ))


def test_figures_of_starts():
    later = [(9.0, {"import_s": 3.0}), (7.0, {"import_s": 1.0}), (8.0, {"import_s": 2.0, "token": 4})]
    found = start.start_figures(30.0, {"kernels_compiled": 14}, later)
    assert (found["first_start_s"], found["second_start_s"], found["import_s"]) == (30.0, 8.0, 2.0)
    assert found["first_start_kernels_compiled"] == 14 and "token" not in found


def test_the_started_program_says_its_token_and_what_took_its_time(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)  # put back afterwards, as the level is
    monkeypatch.setattr(logging.getLogger("tridecode"), "level", logging.NOTSET)
    monkeypatch.setattr(first_token, "preset_engine", lambda preset, capacity: tiny_engine(capacity=64))
    first_token.main("qwen3-0.6b", time.time() - 5)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert 0 <= found["token"] < 331 and found["kernels_compiled"] >= 0
    assert 5 <= found["import_s"] < 60 and 0 <= found["build_s"] < 60 and 0 <= found["prompt_s"] < 60
    assert "imported torch" in err and "captured" in err
    triton.knobs.compilation.listener(
        src=None, metadata={"name": "_embed_kernel"}, metadata_group={}, times=None, cache_hit=False
    )
    assert "compiled embed_kernel" in capsys.readouterr().err


@pytest.mark.skipif(CUDA, reason="a GPU is there")
def test_the_started_program_is_found_from_anywhere(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GenerationError, match="exit code 1"):
        start.time_start("qwen3-0.6b", str(tmp_path))
    err = capfd.readouterr().err
    assert "imported torch" in err and "bench needs an NVIDIA GPU" in err


# peers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_peer_has_the_same_parameters(family):
    pytest.importorskip("transformers", reason="the peer is transformers")
    config = tiny_config(**FAMILIES[family])
    model = peers.peer_model(config, "cpu", torch.float32)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert model.lm_head.weight.shape == random_weights(config, "cpu", torch.float32).lm_head.weight.shape


def test_peers_are_timed_with_both_caches():
    pytest.importorskip("transformers", reason="the peer is transformers")
    config = tiny_config()
    model = peers.peer_model(config, "cpu", torch.float32)
    for cache in (None, "static"):
        times = peers.time_peer(model, config, 6, 8, 2, cache)
        assert len(times) == 2 and all(seconds > -1 for seconds in times)


def test_peers_without_transformers(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = bench("peers")
    assert code == 1 and out == "" and err.count("\n") == 1 and "pip install transformers" in err


def test_nothing_speculates_in_a_bench_unless_the_bench_says_so(monkeypatch):
    found = []
    monkeypatch.setattr(measure, "need_gpu", lambda: None)
    monkeypatch.setattr(measure, "fill_cache", lambda engine: None)
    monkeypatch.setattr(measure, "preset_engine", lambda *args, **more: found.append(more["speculate"]))
    monkeypatch.setattr(measure, "Engine", SimpleNamespace(load=measure.preset_engine))
    for model in (None, "a checkpoint"):
        measure.bench_engine(SimpleNamespace(model=model, preset="qwen3-4b"), 64)
        measure.bench_engine(SimpleNamespace(model=model, preset="qwen3-4b"), 64, speculate="ngram")
    assert found == ["off", "ngram"] * 2


# a GPU


def test_an_unknown_preset():
    with pytest.raises(ParameterError, match="gpt-2"):
        measure.preset_engine("gpt-2", 64)


@needs_gpu
@pytest.mark.parametrize(
    "argv", [("decode", "--steps", "8"), ("stream", "--steps", "8"), ("prefill", "--prompt-tokens", "64")]
)
def test_a_real_preset_on_the_gpu(bench, argv):
    code, out, _ = bench(*argv, "--preset", "qwen3-0.6b", "--runs", "2")
    row = json.loads(out.split("\n")[-2])
    assert code == 0 and row["gpu"] == torch.cuda.get_device_name(DEVICE)
    assert 0 < row.get("pct_bandwidth", 1) < 100 and 0 < row.get("pct_matmul", 1) < 100
