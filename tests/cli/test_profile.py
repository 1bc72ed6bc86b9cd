"""Tests of `tridecode profile`: the figures and pictures from activity records and, on a GPU, the command itself."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from models import tiny_engine, use_h100
from torch.profiler import ProfilerActivity

from tridecode import cli as commands
from tridecode import layout
from tridecode.checkpoint.load import empty_weights
from tridecode.cli.bench.measure import GREEDY
from tridecode.cli.bench.passes import rewind
from tridecode.cli.profile import command, draw, records
from tridecode.cli.profile.records import ProfileError, Record, Span, attribute, chained, split_steps, summarize
from tridecode.models.presets import PRESETS
from tridecode.state.kv import PAGE, kv_bytes_per_token
from tridecode.step import decode
from tridecode.step.model import make_model
from tridecode.step.run import Recorder

CUDA = torch.cuda.is_available()
LAYER = ("qkv", "attention", "o_proj", "gate_up", "down")
_LAYER_KERNELS = ("_matvec_kernel", "_attention_kernel", *("_matvec_kernel",) * 3)


def roles_and_kernels(layers: int) -> tuple[list[str], list[str]]:
    """Return the expected roles and kernels of a greedy pass, in order."""
    kernels = ["_embed_kernel", *_LAYER_KERNELS * layers, "_matvec_kernel", "_greedy_kernel"]
    return ["embed", *LAYER * layers, "lm_head", "greedy"], kernels


ROLES, KERNELS = roles_and_kernels(3)
LAUNCHES = [(role, [kernel]) for role, kernel in zip(ROLES, KERNELS)]


def event(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def step_trace(steps: int, layers: int, cost: float = 2.0, gap: float = 0.5) -> dict:
    """Return a trace of passes whose kernels overlap by 1 µs; embed starts `gap` µs after the pass before it."""
    events, end = [], 100.0
    for _ in range(steps):
        for op, kernel in zip(*roles_and_kernels(layers)):
            start = end + gap if op == "embed" else end - 1
            end += gap + cost if op == "embed" else cost
            events.append(event(kernel, start, end - start))
    return {"traceEvents": events, "host_name": "somewhere"}


def test_gpu_records_are_read_in_start_order():
    trace = {
        "traceEvents": [
            event("late", 30.5, 1.25),
            event("cudaGraphLaunch", 1, 5, "cuda_runtime"),
            event("copy", 10, 2, "gpu_memcpy"),
            {"ph": "M", "name": "process_name", "ts": 0},
            event("fill", 5, 1, "gpu_memset"),
        ]
    }
    assert records.read_records(trace) == [Record("fill", 5, 6), Record("copy", 10, 12), Record("late", 30.5, 31.75)]
    assert records.read_records({}) == []


def test_costs_of_overlapping_kernels_add_up_to_wall_time():
    step = [Record("a", 12, 20), Record("b", 14, 26), Record("c", 15, 24), Record("d", 29, 33)]
    spans = attribute(step, "abcd", before=10.0)
    assert [span.cost for span in spans] == [10, 6, 0, 7]  # Span c ends within b, so it costs nothing.
    assert [span.gap for span in spans] == [2, 0, 0, 3]
    assert records.wall(spans) == 33 - 10


def test_pass_starts_at_the_previous_end_and_first_passes_are_dropped():
    found = split_steps([Record("k", t, t + 4) for t in (0, 10, 20, 31)], 4)
    steps = chained(found, ["op"], drop=2)
    assert [(span.before, span.cost, span.gap) for (span,) in steps] == [(14, 10, 6), (24, 11, 7)]
    steps = [[Span("op", 0, end, 0)] for end in (9, 3, 5, 4)]
    assert records.typical(steps)[0].end == 4, "the chosen pass does not have the median time"


def test_medians_over_steps_shares_and_gaps():
    def one(a_end, b_start, b_end):
        return attribute([Record("a", 0, a_end), Record("b", b_start, b_end)], ["x", "y"], before=0)

    found = summarize([one(6, 6, 8), one(6, 7, 10), one(60, 120, 130)])
    assert (found["steps"], found["launches"], found["wall_us"]) == (3, 2, 10)
    assert (found["compute_us"], found["gap_us"], found["gap_pct"]) == (9, 1, 10)
    x, y = found["kernels"]
    assert (x["op"], x["us_per_step"], x["mean_us"], x["recorded_us"]) == ("x", 6, 6, 6)
    # The cost of a kernel includes the gap before it.
    assert (y["op"], y["us_per_step"], y["recorded_us"]) == ("y", 4, 3)
    assert [role["share_pct"] for role in (x, y)] == [60, 40]
    assert found["gaps"] == {"<1": 4, "1-5": 1, "5-10": 0, "10-50": 0, ">50": 1}
    for gap, name in ((0, "<1"), (0.99, "<1"), (1, "1-5"), (5, "5-10"), (10, "10-50"), (50, ">50")):
        found = summarize([attribute([Record("k", gap, gap + 1)], ["op"], before=0)])["gaps"]
        assert found.pop(name) == 1 and not any(found.values())
    spans = attribute([Record("k", t, t + 2) for t in (0, 2, 4)], ["x", "y", "x"], before=0)
    x = summarize([spans])["kernels"][0]
    assert (x["op"], x["launches"], x["us_per_step"], x["mean_us"]) == ("x", 2, 4, 2)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda steps: steps[:-1], "recorded 71 activities in 4 steps, expected a multiple of 4"),
        (lambda steps: [], "recorded 0 activities"),
        (lambda steps: steps + [Record("x", 1e6, 1e6 + 1)] * 4, "recorded 19 activities in a step, expected 18"),
        (lambda steps: steps[4:], "activity 1 of a step is '_matvec_kernel', expected _embed_kernel for embed"),
        (lambda steps: steps[:68], "activity 18 of a step is missing, expected _greedy_kernel for greedy"),
    ],
)
def test_records_of_another_step_are_refused(change, words):
    found = change(records.read_records(step_trace(4, 3)))
    with pytest.raises(ProfileError, match=words):
        for step in split_steps(found, 4):
            records.roles_of(step, LAUNCHES)


def test_launches_may_omit_kernels():
    launches = [("route", ["_route", "_choose"]), ("sort", ["_sort", "_count", "_place"]), ("down", ["_down"])]

    def roles(*kernels):
        return records.roles_of([Record(f"{kernel}_kernel", 0, 1) for kernel in kernels], launches)

    assert roles("_route", "_sort", "_down") == ["route", "sort", "down"]
    both = roles("_route", "_choose", "_count", "_place", "_down")
    assert both == ["route", "route", "sort", "sort", "down"]
    for kernels in (("_route", "_choose", "_down"), ("_sort", "_down"), ("_route", "_sort")):
        with pytest.raises(ProfileError):
            roles(*kernels)


def test_prompt_chunks_start_at_their_first_kernel():
    found = [Record("void at::native::f<float>(int)", t, t + 3) for t in (0, 4, 1000, 1004)]
    (spans,) = records.separate_spans(split_steps(found, 2), drop=1)
    assert [(span.op, span.cost) for span in spans] == [("f", 3), ("f", 4)]
    for name, short in (
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::A<float> >(int)",
            "vectorized_elementwise_kernel",
        ),
        ("void at::native::(anonymous namespace)::elementwise<X>(Y)", "elementwise"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD"),
    ):
        assert records.short_name(name) == short


def test_roles_and_kernels_match_the_launch_list():
    model = tiny_engine("torch", num_layers=3).model
    launches = command.step_launches(model)
    assert [(launch.role, launch.kernels()) for launch in launches] == LAUNCHES
    recorder = Recorder()
    decode.decode_pass(recorder, model, "sample")
    role, kernels = recorder.launches[-1].role, recorder.launches[-1].kernels()
    assert role == "sample" and kernels[0] == "_process_kernel" and kernels[-1] == "_sample_kernel"
    assert len(kernels) == 5


def test_bytes_match_the_matrices(monkeypatch):
    use_h100(monkeypatch)
    spec = PRESETS["qwen3-4b"]
    model = make_model(spec, empty_weights(spec, "meta", torch.bfloat16, packs=True), 2048, page=PAGE)
    state = torch.zeros(1, layout.META_WIDTH, dtype=torch.int32)
    state[0, layout.POSITION] = 1000
    model = replace(model, workspace=replace(model.workspace, meta=state))
    launches = command.step_launches(model)
    moved = command.bytes_by_role(launches)
    attention, mlp = spec.layers[0].blocks
    layer = spec.hidden_size * (2 * attention.q_size + 2 * attention.kv_size + 3 * mlp.intermediate)
    weights = 2 * (spec.num_layers * layer + spec.vocab_size * spec.hidden_size)
    needed = weights + 1000 * kv_bytes_per_token(spec, torch.bfloat16)
    assert needed < sum(launch.bytes() for launch in launches) < 1.005 * needed
    assert moved["attention"] == 1000 * kv_bytes_per_token(spec, torch.bfloat16) / spec.num_layers


def test_bytes_of_attention_end_at_the_window():
    config = dict(sliding_window=24, layer_types=("sliding_attention", "full_attention"))
    engine = tiny_engine("torch", dtype=torch.bfloat16, **config)
    rewind(engine, 100, GREEDY)
    moved = command.bytes_by_role(command.step_launches(engine.model))["attention"]
    # Factors: K and V, heads, head_dim, bytes, and the mean of two contexts.
    assert moved == 2 * 2 * 64 * 2 * (24 + 100) / 2


def test_bytes_of_prompt_kernels():
    """A launch counts the tensors that it reads and writes, except norm weights, and its rows of the cache."""
    engine = tiny_engine("torch", num_layers=2, dtype=torch.bfloat16)
    (attention, mlp), rows = engine.config.layers[0].blocks, 5
    hidden = engine.config.hidden_size
    moved = command.bytes_by_kernel(command.prompt_launches(engine.model, rows))
    kv, q = 2 * rows * attention.kv_size, 2 * rows * attention.q_size
    first, later = rows * hidden * (4 + 2), rows * hidden * (4 + 4 + 2 + 2)
    assert moved == {
        "_embed_rows_kernel": rows * hidden * (2 + 4),
        "_prompt_attention_kernel": 2 * q + 2 * kv,
        "_add_norm_kernel": (first + 2 * later) / 3,  # The last layer ends after it has written K and V.
        "_rope_write_kernel": 2 * (q + 2 * kv) + 2 * rows * 32 * 4,
        "_silu_mul_kernel": 2 * rows * 3 * mlp.intermediate,
    }


def test_bandwidth_of_a_role():
    kernels = [{"op": "embed", "mean_us": 2.0}, {"op": "qkv", "mean_us": 0.0}, {"op": "gemm", "mean_us": 1.0}]
    command.add_bytes(kernels, {"embed": 1000, "qkv": 5}, bandwidth=1e9)
    assert "bytes" not in kernels[2]
    assert kernels[0]["bytes"] == 1000 and kernels[0]["pct_bandwidth"] == pytest.approx(50)
    assert kernels[1]["pct_bandwidth"] is None


def texts(svg: str) -> list[str]:
    return [node.text for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")]


def test_the_timeline_shows_the_whole_step_and_one_layer():
    (spans,) = chained(split_steps(records.read_records(step_trace(2, 3)), 2), ROLES, drop=1)
    svg = draw.timeline("a <title> & more", spans)
    words = texts(svg)
    assert "a <title> & more" in words
    assert any(word.startswith("the whole step, 18 launches") for word in words)
    assert any(word.startswith("layer 2 of 3") for word in words)
    assert {f"{op} 2.0" for op in LAYER} <= set(words)
    assert "prefers-color-scheme: dark" in svg


def test_bar_lengths_match_shares():
    roles = [
        {"op": "a<b", "share_pct": 75.0, "launches": 3, "mean_us": 1.0, "pct_bandwidth": 50.0},
        {"op": "c", "share_pct": 25.0, "launches": 1, "mean_us": 1.0},
    ]
    svg = draw.shares("title", roles)
    bars = [
        float(node.get("width"))
        for node in ElementTree.fromstring(svg).iter()
        if node.tag.endswith("rect") and node.get("fill")
    ]
    assert bars[0] == 3 * bars[1]
    assert "a<b" in texts(svg) and "75.0% · 3 x 1.00 µs · 50% of bandwidth" in texts(svg)


def test_the_command_writes_tables_files_and_one_json_line(monkeypatch, capsys, tmp_path):
    engine = tiny_engine()
    layers = engine.config.num_layers
    chunk = {"traceEvents": [event(f"k{i % 3}", 10 * i, 8) for i in range(21)], "host_name": "somewhere"}
    traces = iter([{}, step_trace(24, layers), chunk])
    monkeypatch.setattr(command, "need_gpu", lambda name: None)
    monkeypatch.setattr(command, "record_on_gpu", lambda work: next(traces))
    monkeypatch.setattr(command, "bench_engine", lambda *args: engine)
    monkeypatch.setattr(command, "prefill", lambda *args: None)
    monkeypatch.setattr(command, "read_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(command, "time_decode", lambda *args, **more: [9e-6, 8e-6, 7e-6])
    monkeypatch.setattr(command, "run_facts", lambda device: {"gpu": "A GPU"})
    assert commands.main(["profile", "--preset", "qwen3-0.6b", "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert (report["preset"], report["rows"], report["context"], report["prompt_tokens"]) == ("qwen3-0.6b", 1, 64, 2048)
    decode, prefill = report["decode"], report["prefill"]
    assert decode["steps"] == 20 and decode["launches"] == 3 + 5 * layers and decode["us_without_profiler"] == 8
    assert decode["wall_us"] == pytest.approx(2 * decode["launches"] + 0.5) and decode["gap_us"] == pytest.approx(0.5)
    roles = {role["op"]: role for role in decode["kernels"]}
    assert {op: role["launches"] for op, role in roles.items()} == Counter(roles_and_kernels(layers)[0])
    assert roles["down"]["mean_us"] == pytest.approx(2) and roles["down"]["recorded_us"] == pytest.approx(3)
    assert roles["embed"]["mean_us"] == pytest.approx(2.5) and roles["embed"]["recorded_us"] == pytest.approx(2)
    assert sum(role["share_pct"] for role in roles.values()) == pytest.approx(100, 1e-3)
    assert all(role["bytes"] > 0 and role["pct_bandwidth"] > 0 for role in decode["kernels"])
    assert prefill["steps"] == 5 and prefill["launches"] == 3 and prefill["wall_us"] == 28
    assert command.at({"rows": 8, "context": 1024}) == "8 rows at context 1,024"
    assert "lm_head" in out and f"gaps (µs): <1: {20 * decode['launches']}" in out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {
        "decode_timeline.svg", "decode_shares.svg", "prefill_shares.svg", "decode_trace.json.gz",
        "prefill_trace.json.gz", "profile.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "profile.json").read_text()) == report
    with gzip.open(tmp_path / "out" / "prefill_trace.json.gz", "rt") as file:
        assert len(json.load(file)["traceEvents"]) == 21


def test_passes_with_adapters_have_their_launches_and_bytes(monkeypatch, capsys):
    engine = tiny_engine("torch", build=dict(slots=4, adapter_memory=0.01, max_rank=16))
    engine.model.pool.fill(16)
    made, passes = [], []
    launches = command.step_launches(engine.model.with_adapters(), 4)
    kernels = [kernel for launch in launches for kernel in launch.kernels()]
    assert launches[0].role == "adapters" and kernels.count("_shrink_kernel") == 4 * engine.config.num_layers
    events = [event(kernel, 10 * i, 8) for i, kernel in enumerate(kernels * (command.STEPS + command.DROPPED))]
    chunk = {"traceEvents": [event("k", 10 * i, 8) for i in range(7)]}

    def record(work):
        if made:  # Before, the command attaches the profiler.
            work()
        return {"traceEvents": events}

    def make(args, *sizes, adapters, rank):
        made.append((adapters, rank))
        return engine

    def enqueue(engine, params, rows, adapters):
        if not passes:
            run_pass(engine, params, rows, adapters=adapters)
        passes.append((rows, adapters, engine.model.pool.slots.tolist()))

    run_pass = command.enqueue
    monkeypatch.setattr(command, "need_gpu", lambda name: None)
    monkeypatch.setattr(command, "record_on_gpu", record)
    monkeypatch.setattr(command, "bench_engine", make)
    monkeypatch.setattr(command, "enqueue", enqueue)
    monkeypatch.setattr(command, "prefill_trace", lambda model, tokens: chunk if model.adapting else None)
    monkeypatch.setattr(command, "read_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(command, "run_facts", lambda device: {"gpu": "A GPU"})
    options = "--preset qwen3-0.6b --rows 4 --context 20 --prompt-tokens 32 --random-adapters 3 --rank 9"
    assert commands.main(["profile", *options.split()]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert made == [(3, 9)] and (report["adapters"], report["rank"]) == (3, 9)
    assert passes == [(4, True, [1, 2, 3, 1])] * (command.STEPS + command.DROPPED)
    assert "token step at 4 rows with 3 adapters at context 20" in out
    moved = {role["op"]: role["bytes"] for role in report["decode"]["kernels"] if "bytes" in role}
    qkv = engine.config.layers[0].linears()[0]
    itemsize = engine.model.weights.dtype.itemsize
    assert moved["qkv_shrink"] > 3 * 16 * 3 * qkv.k * itemsize, "A of three adapters has three parts"


def test_more_adapters_than_rows_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(command, "need_gpu", lambda name: None)
    assert commands.main("profile --rows 2 --random-adapters 3".split()) == 1
    assert "--random-adapters must be at most --rows, 2, got 3" in capsys.readouterr().err


def test_a_trace_does_not_name_the_machine(monkeypatch):
    if not CUDA:
        monkeypatch.setattr(records.torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(records, "ProfilerActivity", SimpleNamespace(CUDA=ProfilerActivity.CPU))
    trace = records.record_on_gpu(lambda: None)
    assert "traceEvents" in trace and not {"host_name", "traceName"} & set(trace)


@pytest.mark.skipif(not CUDA, reason="the test records activity of an NVIDIA GPU")
def test_records_of_a_real_pass_are_complete():
    records.record_on_gpu(lambda: torch.zeros(1, device="cuda"))
    engine = tiny_engine()
    steps = command.decode_spans(command.decode_trace(engine, 16), engine.model)
    found = summarize(steps)
    assert found["steps"] == command.STEPS and found["wall_us"] > 0
    assert found["compute_us"] + found["gap_us"] == pytest.approx(found["wall_us"], rel=0.2)
