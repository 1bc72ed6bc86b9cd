"""Tests of the figures of bench, on a tiny model."""

import json
import logging
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import triton
from benches import DTYPE, bench_on_tiny_engines, engine_of, run_bench
from models import CUDA, DEVICE, FAMILIES, begin, tiny_config, tiny_engine

from tridecode.cli.bench import ablate, measure, mix, prefill, start, timing
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.cli.bench.stream import stream_figures
from tridecode.cli.parser import make_parser
from tridecode.errors import GenerationError, ParameterError
from tridecode.layout import POSITION, RUN, STATUS
from tridecode.options import GRAPHS
from tridecode.sampling import SamplingParams
from tridecode.step.dispatch import MODES, PromptDescriptor
from tridecode.step.graphs import DecodePasses, launcher
from tridecode.step.run import Allocating

needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA graphs and activity records exist on a GPU only")


@pytest.fixture
def bench(capsys, monkeypatch):
    return bench_on_tiny_engines(capsys, monkeypatch, "decode", "batch", "prefill", "stream", "mix")


# ---- figures


@pytest.mark.parametrize("tied", [True, False])
def test_step_bytes(tied):
    engine = tiny_engine(dtype=torch.bfloat16, tie_word_embeddings=tied)
    # hidden 96, intermediate 160, 4 and 2 heads of 64, vocabulary 331, two layers
    layer = 96 * (256 + 2 * 128) + 256 * 96 + 3 * 96 * 160 + 2 * 96 + 2 * 64
    weights = 2 * (2 * layer + 96 + 331 * 96)
    kv = 2 * 2 * 128 * 2  # K and V of two layers, bf16
    assert measure.step_bytes(engine, 10, 1) == weights + 10 * kv
    # A pass reads the weights once. Its five rows are at positions 10 to 14, or 300 to 304.
    assert measure.step_bytes(engine, [10, 300], 5) == weights + (12 + 302) * kv


def test_prefill_flops():
    config = tiny_config()
    qkv, rest, head = 96 * 512, 96 * 256 + 3 * 96 * 160, 96 * 331
    one = 2 * (2 * (qkv + rest) + head) + 2 * 4 * 256
    assert prefill.prefill_flops(config, 1) == one
    # Two more tokens. Both run through the first layer, and through q, k and v of the second. They attend to 1 and 2
    # positions.
    attention = 4 * 256 * (1 + 2) + 2 * 4 * 256 * (3 - 1)
    assert prefill.prefill_flops(config, 3) == one + 2 * 2 * (2 * qkv + rest) + attention
    windows = (tiny_config(**FAMILIES["mistral"] | {"sliding_window": window}) for window in (0, 24))
    full, window = (prefill.prefill_flops(config, 40) for config in windows)
    # The last 15 of the first 39 tokens attend to 24 positions in one layer; the 40th token does so in two layers.
    assert full - window == 4 * 256 * (sum(range(25, 40)) - 15 * 24) + 2 * 4 * 256 * (40 - 24)


@pytest.mark.parametrize("window", [0, 24])
def test_flops_of_cached_tokens_are_subtracted(window):
    config = tiny_config(**FAMILIES["mistral"] | {"sliding_window": window})
    whole, first = (prefill.prefill_flops(config, tokens) for tokens in (40, 33))
    # Only the last token runs through the rest of the last layer and the head. The cached part also has a last token.
    last = 2 * (96 * 256 + 3 * 96 * 160 + 96 * 331) + 4 * 256 * min(33, window or 33)
    assert prefill.prefill_flops(config, 7, 33) == whole - (first - last)


def test_percentiles_and_figures_of_stream_and_start():
    found = timing.spread("us_per_token", [3.0, 1.0, 2.0], 10, "us")
    assert found == pytest.approx({"us_per_token": 20.0, "us_p5": 11.0, "us_p95": 29.0})
    found = stream_figures([(0.5, [1e-6, 3e-6]), (0.1, [4e-6, 4e-6])], [2e-6, 2e-6])
    assert found["us_per_token"] == pytest.approx(3) and found["ratio_to_graph"] == pytest.approx(1.5)
    assert found["ttft_ms"] == pytest.approx(300) and found["itl_median_us"] == pytest.approx(3.5)
    later = [(9.0, {"import_s": 3.0}), (7.0, {"import_s": 1.0}), (8.0, {"import_s": 2.0, "token": 4})]
    found = start.start_figures(30.0, {"kernels_compiled": 14}, later)
    assert (found["first_start_s"], found["second_start_s"], found["import_s"]) == (30.0, 8.0, 2.0)
    assert found["first_start_kernels_compiled"] == 14 and "token" not in found


def test_ended_rows_are_not_timed():
    engine = engine_of(128, 2)
    rewind(engine, [5, 5], measure.GREEDY, 2)
    measure.check_running(engine, "both", 2)
    engine.model.workspace.meta[1, STATUS] = 3
    measure.check_running(engine, "the first", 1)
    with pytest.raises(GenerationError, match="both: a row ended during the passes"):
        measure.check_running(engine, "both", 2)


@pytest.mark.parametrize("contexts, steps", [([64] * 7, 128), ([1000, 64, 63, 1], 63), ([32, 96], 30)])
def test_pool_has_pages_for_every_pass(contexts, steps):
    room = [measure.reserved_positions(context, steps) for context in contexts]
    engine = engine_of(max(room), len(contexts), sum(room))
    tables = []
    for _ in range(2):
        rewind(engine, contexts, measure.GREEDY, len(contexts))
        engine.synchronize()
        tables.append(engine.model.kv.page_table.clone())
    assert tables[0].equal(tables[1]), "two runs used different pages"
    meta = engine.model.workspace.meta
    meta[: len(contexts), POSITION] += steps  # Positions after the last pass.
    enqueue(engine, measure.GREEDY, len(contexts))
    engine.synchronize()
    assert meta[: len(contexts), STATUS].tolist() == [RUN] * len(contexts)


def test_options_of_the_engine(monkeypatch):
    """Drafts are off unless the bench turns them on, and --graph is not passed to the engine."""
    assert GRAPHS == tuple(MODES)
    with pytest.raises(ParameterError, match="gpt-2"):
        measure.preset_engine("gpt-2", 64)
    found = []
    monkeypatch.setattr(measure, "preset_engine", lambda *args, **more: found.append(more))
    args = make_parser().parse_args("bench serve --mix --prompt-ms 7 --graph none --quantize int4".split())
    for more in ({}, {"speculate": "ngram"}):
        measure.bench_engine(args, 64, **more)
    assert [each["speculate"] for each in found] == ["off", "ngram"]
    assert (found[0]["prompt_ms"], found[0]["quantize"]) == (7, "int4") and "graph" not in found[0]
    assert found[0]["gguf"] is None
    measure.bench_engine(make_parser().parse_args("bench decode --gguf q8_0".split()), 64)
    assert found[2]["gguf"] == "q8_0"


# ---- bench decode, bench batch, bench prefill and bench stream


def test_decode(bench):
    code, out, _ = bench("decode", "--context", "20", "--steps", "3", "--runs", "4", "--sampling", "all")
    row = json.loads(out.split("\n")[-2])
    assert code == 0 and bench.made[0].capacity == row["capacity"] == 25
    assert row["us_p5"] <= row["us_per_token"] <= row["us_p95"]
    # Figures are rounded: the time matters for short steps, the quotient for long ones.
    assert row["pct_bandwidth"] == pytest.approx(row["bytes_per_step"] / row["us_per_token"] / 1e3 * 100, 1e-3, 0.06)
    assert row["tokens_per_second"] == pytest.approx(1e6 / row["us_per_token"], 1e-3, 0.06)
    assert "us_over_greedy" in row and row["command"].endswith("--context 20 --steps 3 --sampling all")
    assert {"preset", "context", "read_bandwidth_gbs", "gpu", "torch", "triton"} <= row.keys()
    assert "all sampling filters" in out and "a clock" in out
    (engine,) = bench.made
    engine.synchronize()
    assert engine.model.workspace.meta[0, [STATUS, POSITION]].tolist() == [RUN, 23], (
        "a run did not start at its context"
    )


def test_batch_has_a_row_for_each_number_of_requests_at_each_context(bench):
    argv = ("batch", "--rows", "1,3", "--context", "20,70", "--steps", "3", "--runs", "2", "--sampling", "all")
    code, out, _ = bench(*argv, "--format", "json")
    rows = json.loads(out)
    assert code == 0 and [(row["rows"], row["context"]) for row in rows] == [(1, 20), (3, 20), (1, 70), (3, 70)]
    assert len(bench.made) == 1 and bench.made[0].slots == 3
    for row in rows:
        assert row["us_p5"] <= row["us_per_step"] <= row["us_p95"] and row["one_row_us"] > 0
        assert row["tokens_per_second"] == pytest.approx(1e6 * row["rows"] / row["us_per_step"], 1e-3, 0.06)
        parsed = make_parser().parse_args(row["command"].split()[2:])
        assert parsed.rows == (row["rows"],) and parsed.context == (str(row["context"]),)
    kv = 2 * 2 * 128 * DTYPE.itemsize  # K and V of two layers
    # Each row reads the weights once. The contexts are positions 20 to 22.
    assert rows[1]["bytes_per_step"] - rows[0]["bytes_per_step"] == 2 * 21 * kv


def test_rows_with_adapters_are_compared_with_the_pass_without(capsys, monkeypatch):
    def make(args, *sizes, adapters=0, rank=16):
        engine = engine_of(*sizes, adapter_memory=0.01, max_rank=rank)
        assert len(engine.model.pool) >= adapters == 3
        engine.model.pool.fill(rank)
        return engine

    bench = bench_on_tiny_engines(capsys, monkeypatch, "batch", make=make)
    argv = "batch --rows 1,4 --context 20 --steps 2 --runs 2 --rank 8 --random-adapters 1,3"
    code, out, _ = bench(*argv.split())
    rows = json.loads(out.split("\n")[-2])["rows"]
    found = [(row["rows"], row["adapters"], row["rank"]) for row in rows]
    assert code == 0 and found == [(1, 1, 8), (4, 1, 8), (4, 3, 8)]
    # A pass reads A and B of qkv, o, gate_up and down of each adapter in two layers.
    numbers = 8 * (3 * 96 + 512 + 256 + 96 + 2 * 96 + 320 + 160 + 96)
    assert rows[2]["bytes_per_step"] - rows[1]["bytes_per_step"] == 2 * 2 * numbers * DTYPE.itemsize
    for row in rows:
        assert row["ratio"] == pytest.approx(row["us_per_step"] / row["plain_us"], 1e-3)
        assert row["ratio_of_bytes"] > 1
        assert make_parser().parse_args(row["command"].split()[2:]).random_adapters == (row["adapters"],)
    engine = bench.made[0]
    engine.synchronize()
    assert sorted(engine.model.pool.slots.tolist()) == [1, 1, 2, 3]
    assert {(stat.kind, stat.rows) for stat in engine.graph_stats()} >= {("greedy+adapters", 4), ("greedy", 4)}


def test_a_mix_of_contexts_names_its_rows(bench):
    code, out, _ = bench("batch", "--context", "90+5x2", "--steps", "2", "--runs", "1")
    row = json.loads(out.split("\n")[-2])
    assert code == 0 and (row["rows"], row["context"]) == (3, "90+5x2")
    assert "--context 90+5x2" in row["command"] and "--rows" not in row["command"]
    engine = bench.made[0]
    engine.synchronize()
    # Each row began at its own context, and has advanced by two steps.
    assert engine.model.workspace.meta[:3, POSITION].tolist() == [92, 7, 7]
    assert engine.model.workspace.meta[:3, STATUS].tolist() == [RUN] * 3


@pytest.mark.parametrize(
    "argv, named",
    [
        ("batch --rows 4 --context 64x3,32x2", "--rows: a mix like 64x3 sets the number"),
        ("serve --mix --requests 64", "--requests must be at most 63"),
    ],
)
def test_conflicting_sizes_are_one_line(bench, argv, named):
    code, out, err = bench(*argv.split())
    assert (code, out, err.count("\n")) == (1, "", 1) and named in err


def test_prefill_in_several_lengths_and_modes(bench):
    """Each run computes only the new tokens, in each graph mode. Each row contains its mode."""
    argv = ("--prompt-tokens", "7,20", "--cached", "30", "--graph", "full,full_decode_only", "--runs", "2")
    code, out, _ = bench("prefill", *argv, "--format", "json")
    rows, (engine,) = json.loads(out), bench.made
    assert code == 0 and engine.capacity == 51
    assert [(row["prompt_tokens"], row["cached"], row["graph"]) for row in rows] == [
        (7, 30, "full"), (7, 30, "full_decode_only"), (20, 30, "full"), (20, 30, "full_decode_only"),
    ]  # fmt: skip
    for row in rows:
        assert row["command"].endswith(f"--prompt-tokens {row['prompt_tokens']} --cached 30 --graph {row['graph']}")
        assert row["reads"] == ("full" if CUDA and row["graph"] == "full" else "none")
        assert row["flops"] == prefill.prefill_flops(engine.config, row["prompt_tokens"], 30) and row["ttft_ms"] > 0
        assert row["pct_matmul"] == pytest.approx(100 * row["flops"] / (row["prefill_ms"] / 1e3) / 1e12, 1e-2, 0.06)


def test_a_prompt_with_a_shorter_cached_prefix_is_not_timed(bench):
    engine = engine_of(64)
    cache = engine.scheduler.slots.cache
    match = cache.match
    cache.match = lambda ids, salt: match(ids[:-5], salt)
    with pytest.raises(GenerationError, match="the cache provided 19 tokens, expected 20"):
        prefill.time_prefill(engine, 5, 1, 20)


@needs_gpu
def test_every_size_of_every_mode_is_captured_before_it_is_timed():
    engine = tiny_engine(capacity=300)
    modes = measure.make_runners(engine, ["full", "full_and_piecewise", "full_decode_only"])
    assert modes["full"].prompts is engine.prompts and engine.prompts.seconds.keys() > {PromptDescriptor(64, 0)}
    assert modes["full_and_piecewise"].prompts.seconds.keys() == engine.prompts.seconds.keys()
    for mode, expected in zip(modes, ("full", "piecewise", "none")):
        with measure.running(engine, *modes[mode]) as prompt_modes:
            prefill.time_prefill(engine, 100, 1)
            assert prompt_modes() == expected


def test_stream(bench):
    code, out, _ = bench("stream", "--context", "9", "--steps", "6", "--runs", "2", "--format", "jsonl")
    row = json.loads(out)
    assert code == 0 and row["steps"] == 6
    assert row["ratio_to_graph"] == pytest.approx(row["us_per_token"] / row["graph_us_per_token"], 1e-3, 1e-3)
    assert row["itl_median_us"] <= row["itl_p99_us"] and row["ttft_ms"] > 0


WRONG = {
    "bench batch": [
        ("--context 64x", "argument --context: every entry must be a number of tokens, or a mix"),
        ("--context 64x65", "at most 64 requests, got '64x65'"),
        ("--context 64x99999999999999999999", "argument --context: every entry must be"),
        ("--context 5x2x2", "got '5x2x2'"),
        ("--rows 1,65", "argument --rows: every entry must be"),
    ],
    "bench prefill": [
        ("--prompt-tokens 3,x", "argument --prompt-tokens: every entry must be"),
        ("--graph full,half", "got 'full,half'"),
        ("--cached -1", "--cached"),
    ],
    "bench decode": [
        ("--model a --preset qwen3-4b", "not allowed with"),
        ("--preset gpt-2", "'gpt-2'"),
        ("--steps 0", "'0'"),
        ("--context -1", "'-1'"),
    ],
    "bench start": [("--steps 3", "unrecognized arguments: --steps 3")],
    "bench offload": [("--swap --weights 4", "not allowed with")],
    "bench serve": [
        ("--mix --url http://a", "--url cannot be used with --mix"),
        ("--mix --percentiles 99", "--percentiles cannot be used with --mix"),
        ("--requests 3", "--requests needs --mix"),
        ("--mix --model a --preset qwen3-4b", "not allowed with"),
        *((f"--url={url}", "--url") for url in ("ftp://a", "http://a:99999", "http://")),
        *((f"--url={url}", "--url") for url in ("http://[", "http://a/?b=c")),
        ("--request-rate nan", "--request-rate"),
        ("--burstiness inf", "--burstiness"),
        ("--percentiles 50,101", "--percentiles"),
        ("--percentiles=", "--percentiles"),
        ("--timeout -1", "--timeout"),
        ("--endpoint responses", "--endpoint"),
    ],
    "bench speculate": [
        # The option is refused even with its default value.
        ("--texts-only --preset qwen3-4b", "--preset cannot be used with --texts-only"),
        ("--texts-only --quantize int4", "--quantize cannot be used with --texts-only"),
        ("--speculate-ngram 2:8", "down to 1, the larger first, like 8 and 2, got '2:8'"),
        ("--kv-dtype fp8", "unrecognized arguments: --kv-dtype fp8"),  # Drafts cannot be verified with fp8 K/V.
    ],
    "tune": [(f"--minutes={value}", "expected a number above 0 to 1,440") for value in ("0", "nan", "inf", "1441")],
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_options_are_one_line(command, run):
    for argv, named in WRONG[command]:
        code, _, err = run(*command.split(), *argv.split())
        assert code == 2 and err.count("\n") == 1 and named in err, argv


@needs_gpu
@pytest.mark.parametrize(
    "argv",
    [("decode", "--steps", "8"), ("stream", "--steps", "8"), ("prefill", "--prompt-tokens", "64")]
    + [("batch", "--rows", "8", "--steps", "8")],
)
def test_a_real_preset_on_the_gpu(capsys, argv):
    code, out, _ = run_bench(capsys, *argv, "--preset", "qwen3-0.6b", "--runs", "2")
    row = json.loads(out.split("\n")[-2])
    assert code == 0 and row["gpu"] == torch.cuda.get_device_name(DEVICE)
    assert 0 < row.get("pct_bandwidth", 1) < 100 and 0 < row.get("pct_matmul", 1) < 100


# ---- bench decode --ablate


def test_allocating_workspace_gives_equal_tokens(monkeypatch):
    tokens, made, params = [], [], SamplingParams(temperature=0.0, seed=1)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t: made.append(t) or empty_like(t))
    for allocating in (False, True):
        engine = tiny_engine("triton", "none")
        if allocating:
            engine.steps = DecodePasses(engine.model, Allocating(launcher(engine.model)))
        begin(engine, [5, 17], 0, params, limit=6)
        made.clear()
        for _ in range(4):
            enqueue(engine, params)
        engine.synchronize()
        tokens.append(engine.model.workspace.tokens[0, :6].tolist())
        # A layer: qkv 1, attention 3, o_proj 3, gate_up 1, down 3. The rest of the pass: embed 3, lm_head 1.
        assert len(made) == (4 * 26 if allocating else 0)
    assert tokens[0] == tokens[1]


def test_kernel_figures_by_range():
    def event(name, start, end, cat="kernel"):
        return {"name": name, "ts": start, "dur": end - start, "cat": cat}

    spans = (("graph", 10, 50), ("eager", 60, 90), ("empty", 95, 99))
    host = [event(*span, "user_annotation") for span in spans]
    annotation = event("graph", 12, 40, "gpu_user_annotation")  # The profiler copies the range to the GPU's time line.
    spans = [("fill", 2, 4), ("c", 35, 40), ("a", 12, 20), ("b", 18, 30), ("inside", 19, 25), ("d", 61, 62)]
    trace = {"traceEvents": [*host, annotation, *(event(*span) for span in spans), event("empty", 13, 14, "cpu_op")]}
    figures = {"span_us": 14.0, "compute_us": 11.5, "gap_us": 2.5, "gap_pct": 250 / 14}
    assert ablate.recorded_figures(trace, "graph", 2) == pytest.approx(figures)
    assert ablate.recorded_figures(trace, "eager", 1) == {"span_us": 1, "compute_us": 1, "gap_us": 0, "gap_pct": 0}
    assert ablate.recorded_figures(trace, "empty", 2) == {}


@pytest.mark.skipif(CUDA, reason="the profiler records kernels on a GPU")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_profiler_without_kernels_keeps_wall_times(bench):
    code, out, err = bench("decode", "--ablate", "--context", "4", "--steps", "2", "--runs", "1")
    rows = json.loads(out.split("\n")[-2])["rows"]
    assert code == 0 and [row["variant"] for row in rows][-1] == "graph" and len(rows) == 3
    assert all(row["wall_us"] > 0 and "gap_us" not in row for row in rows)
    assert err.count("recorded no kernel") == 3


@needs_gpu
def test_ablation_on_a_gpu():
    args = make_parser().parse_args("bench decode --ablate --context 8 --steps 16 --runs 2".split())
    rows = ablate.ladder(tiny_engine(), args, SimpleNamespace(note=lambda message: None))
    assert len(rows) == 3 + (torch.cuda.get_device_capability() >= (9, 0))
    for row in rows:
        assert 0 < row.compute_us <= row.span_us and row.wall_us > 0
    assert rows[-1].wall_us < rows[0].wall_us


# ---- bench start


def test_seconds_to_the_first_line(tmp_path, monkeypatch, capfd):
    code = "import json, os; print(json.dumps({'cache': os.environ['TRITON_CACHE_DIR']}), flush=True); print('more')"
    seconds, found = start.time_to_first_line([sys.executable, "-c", code], os.environ | {"TRITON_CACHE_DIR": "x"})
    assert 0 < seconds < 60 and found == {"cache": "x"}
    with pytest.raises(GenerationError, match="before its first token"):
        start.time_to_first_line([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    if not CUDA:
        monkeypatch.chdir(tmp_path)  # The program must work from any directory.
        with pytest.raises(GenerationError, match="exit code 1"):
            start.time_start("qwen3-0.6b", str(tmp_path))
        err = capfd.readouterr().err
        assert "imported torch" in err and "bench needs an NVIDIA GPU" in err


def test_the_started_program_reports_its_token_and_its_times(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)  # monkeypatch restores the listener after the test.
    monkeypatch.setattr(logging.getLogger("tridecode"), "level", logging.NOTSET)
    monkeypatch.setattr(start, "preset_engine", lambda preset, capacity: tiny_engine(capacity=64))
    start.main("qwen3-0.6b", time.time() - 5)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert 0 <= found["token"] < 331 and found["kernels_compiled"] >= 0
    assert 5 <= found["import_s"] < 60 and 0 <= found["build_s"] < 60 and 0 <= found["prompt_s"] < 60
    assert "imported torch" in err and "captured" in err


# ---- bench serve --mix


def test_mix_rows(bench):
    argv = ("serve", "--mix", "--requests", "3", "--context", "9", "--prompt-tokens", "90", "--steps", "4")
    code, out, _ = bench(*argv, "--runs", "2", "--graph", "full,full_decode_only", "--format", "json")
    rows, (engine,) = json.loads(out), bench.made
    assert code == 0 and [row["graph"] for row in rows] == ["full", "full_decode_only"]
    assert engine.slots == 4 and engine.scheduler.preemptions == 0
    for row in rows:
        for phase in ("before", "during", "after"):
            median, p99, largest = (row[f"{phase}_{figure}_ms"] for figure in ("median", "p99", "max"))
            assert 0 < median <= p99 <= largest
        assert (row["lost"], row["requests"], row["prompt_tokens"]) == (0, 3, 90) and row["ttft_ms"] > 0
        assert row["reads"] == ("full" if CUDA and row["graph"] == "full" else "none")
        args = make_parser().parse_args(row["command"].split()[2:])
        assert args.mix and (args.requests, args.prompt_tokens, args.graph) == (3, 90, (row["graph"],))


def test_token_gaps_are_assigned_to_phases(monkeypatch):
    """Passes take 1 s, but the two passes that read the prompt take 5 s."""
    now, passes = [0.0], []

    class Request:
        def __init__(self, ids, params, reuse_prefix):
            self.max_tokens, self.read, self.sampled = params.max_tokens, -(-len(ids) // 50), 0
            passes.append(self)

        @property
        def completion_tokens(self):
            return self.sampled

        def result(self):
            return SimpleNamespace(error=None, token_ids=[0] * (self.sampled - (self is passes[1])))

    class FakeEngine:
        config = tiny_config()
        submit = staticmethod(Request)

        def step(self):
            now[0] += 5 if len(passes) == 3 and passes[2].read > 0 else 1
            for request in passes:
                request.read -= 1
                request.sampled += request.read <= 0 and request.sampled < request.max_tokens
            return any(request.sampled < request.max_tokens for request in passes)

    monkeypatch.setattr(mix.time, "perf_counter", lambda: now[0])
    found = mix.time_mix(FakeEngine(), 2, 10, 100, 4)
    assert found.gaps == {"before": [1] * 8, "during": [5] * 4, "after": [1] * 10}
    assert found.ttft == 10 and found.lost == 1
    figures = mix.mix_figures([found, mix.Mix(found.gaps | {"during": [7.0]}, 14.0, 0)])
    assert (figures["before_median_ms"], figures["during_max_ms"], figures["ttft_ms"]) == (1000, 7000, 12000)
    assert figures["lost"] == 1
    passes.clear()
    words = "the requests ended before the prompt was read, after 2 steps; give more --steps"
    with pytest.raises(GenerationError, match=words):
        mix.time_mix(FakeEngine(), 2, 10, 500, 2)
