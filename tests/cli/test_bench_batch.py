"""bench batch and bench serve-mix: cases, and rows beside others, on a tiny model with a clock for a GPU."""

import importlib
import json
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benches import FACTS, Clock, run_bench
from models import CUDA, build_engine, tiny_config

from tridecode import cli as commands
from tridecode.checkpoint.load import random_weights
from tridecode.cli.bench import batch, measure, report, serve_mix, suite
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.cli.parser import make_parser
from tridecode.cli.values import MOST_ROWS, mix
from tridecode.engine import Engine
from tridecode.errors import GenerationError
from tridecode.layout import POSITION, RUN, STATUS
from tridecode.options import GRAPHS, MAX_SLOTS
from tridecode.state.kv import PAGE
from tridecode.step.dispatch import MODES
from tridecode.text.grammar import Matcher

ROOT = Path(__file__).parents[2]
DTYPE = torch.bfloat16 if CUDA else torch.float32


def engine_of(capacity, slots=1, kv_tokens=None, **more) -> Engine:
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    config = tiny_config(max_position=max(capacity, 512))
    pages = kv_tokens and kv_tokens // PAGE
    backend = "triton" if CUDA else "torch"
    weights = random_weights(config, device, DTYPE)
    return build_engine(config, weights, capacity, backend, slots=slots, pages=pages, page=PAGE, **more)


@pytest.fixture
def bench(capsys, monkeypatch):
    """`bench` on a tiny engine, which `bench.made` keeps; limits are constants."""
    made = []

    def engine(args, *sizes, **more):
        made.append(engine_of(*sizes, **more))
        return made[-1]

    for module in (batch, serve_mix):
        monkeypatch.setattr(module, "bench_engine", engine)
        monkeypatch.setattr(module, "run_facts", lambda device: FACTS)
    monkeypatch.setattr(batch, "read_bandwidth", lambda device: 1e9)
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "Event", Clock)
    run = partial(run_bench, capsys)
    run.made = made
    return run


def test_a_row_for_each_number_of_requests_at_each_context(bench):
    argv = ("batch", "--rows", "1,3", "--context", "20,70", "--steps", "3", "--runs", "2", "--sampling", "all")
    code, out, _ = bench(*argv, "--format", "json")
    rows = json.loads(out)
    assert code == 0 and [(row["rows"], row["context"]) for row in rows] == [(1, 20), (3, 20), (1, 70), (3, 70)]
    assert len(bench.made) == 1 and bench.made[0].slots == 3
    for row in rows:
        assert row["us_p5"] <= row["us_per_step"] <= row["us_p95"] and row["one_row_us"] > 0
        assert row["tokens_per_second"] == pytest.approx(1e6 * row["rows"] / row["us_per_step"], 1e-3, 0.06)
        assert row["pct_bandwidth"] == pytest.approx(row["bytes_per_step"] / row["us_per_step"] / 10, 1e-3, 0.06)
        words = f"--rows {row['rows']} --context {row['context']} --steps 3 --sampling all"
        assert row["command"].startswith("python cli.py bench batch ") and row["command"].endswith(words)
        parsed = make_parser().parse_args(row["command"].split()[2:])
        assert parsed.rows == [row["rows"]] and parsed.context == [str(row["context"])]
    one, three = rows[:2]
    kv = 2 * 2 * 128 * DTYPE.itemsize  # K and V of two layers
    assert three["bytes_per_step"] - one["bytes_per_step"] == 2 * 21 * kv  # the weights once; positions 20 to 22


def test_a_mix_says_its_rows_itself(bench):
    code, out, _ = bench("batch", "--context", "90x1+5x2", "--steps", "2", "--runs", "1")
    row = json.loads(out.split("\n")[-2])
    assert code == 0 and (row["rows"], row["context"]) == (3, "90x1+5x2")
    assert row["command"].endswith("--context 90x1+5x2 --steps 2 --sampling greedy") and "--rows" not in row["command"]
    assert "90x1+5x2" in out and "one row" in out
    engine = bench.made[0]
    engine.synchronize()
    # each row has gone from its own context, two steps further
    assert engine.model.workspace.meta[:3, POSITION].tolist() == [92, 7, 7]
    assert engine.model.workspace.meta[:3, STATUS].tolist() == [RUN] * 3


def test_the_one_row_beside_a_mix_is_its_longest(bench, monkeypatch):
    timed = []
    monkeypatch.setattr(batch, "time_decode", lambda engine, contexts, *more: timed.append(contexts) or [1e-6])
    monkeypatch.setattr(batch, "check_running", lambda *args: None)
    assert bench("batch", "--context", "30x2+90x1,40", "--rows", "2")[0] == 0
    assert sorted(timed[:2]) == [[40], [90]] and timed[2:] == [[30, 30, 90], [40, 40]]


def test_steps_that_have_ended_in_any_row_are_no_figure():
    engine = engine_of(128, 2)
    rewind(engine, [5, 5], measure.GREEDY, 2)
    measure.check_running(engine, "both", 2)
    engine.model.workspace.meta[1, STATUS] = 3
    measure.check_running(engine, "the first", 1)
    with pytest.raises(GenerationError, match="both: the steps ended early"):
        measure.check_running(engine, "both", 2)


def test_every_run_has_the_same_pages():
    """Else `tune` would find other logits, where the K/V that it has filled in are another row's."""
    engine = engine_of(256, 3)
    tables = []
    for _ in range(3):
        rewind(engine, [70, 5, 200], measure.GREEDY, 3)
        engine.synchronize()
        tables.append(engine.model.kv.page_table.clone())
    assert tables[0].equal(tables[1]) and tables[0].equal(tables[2])


@pytest.mark.parametrize("contexts, steps", [([64] * 7, 128), ([1000, 64, 63, 1], 63), ([32, 96], 30)])
def test_the_pool_has_room_for_every_step(contexts, steps):
    room = [batch.room_of(context, steps) for context in contexts]
    engine = engine_of(max(room), len(contexts), sum(room))
    rewind(engine, contexts, measure.GREEDY, len(contexts))
    meta = engine.model.workspace.meta
    meta[: len(contexts), POSITION] += steps  # where the last step leaves them
    enqueue(engine, measure.GREEDY, len(contexts))
    engine.synchronize()
    assert meta[: len(contexts), STATUS].tolist() == [RUN] * len(contexts)


@pytest.mark.parametrize(
    "context, rows",
    [("64", [64]), ("32000x1+64x2", [32000, 64, 64]), ("5+6", [5, 6]), ("5x2", [5, 5])],
)
def test_mixes(context, rows):
    assert mix(context) == rows


@pytest.mark.parametrize(
    "argv, named",
    [
        ("--context 64x", "an integer from 1 to 2,147,483,646, got ''"),
        ("--context x3", "an integer from 1"),
        ("--context 64x65", "at most 64 rows, got '64x65'"),
        ("--context 64x99999999999999999999", "an integer from 1"),
        ("--context 5x2x2", "got '2x2'"),
        ("--context 64,", "an integer from 1 to 2,147,483,646, got ''"),
        ("--rows 0", "an integer from 1 to 64, got '0'"),
        ("--rows 1,65", "an integer from 1 to 64, got '1,65'"),
    ],
)
def test_wrong_rows_and_contexts_are_one_line(argv, named, capsys):
    with pytest.raises(SystemExit) as exit:
        commands.main(["bench", "batch", *argv.split()])
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.count("\n") == 1 and named in err


def test_rows_beside_a_mix_alone_are_refused(bench):
    code, out, err = bench("batch", "--rows", "4", "--context", "64x3,32x2")
    assert (code, out, err.count("\n")) == (1, "", 1) and "--rows: a mix like 64x3 says itself how many" in err


def test_the_suite_has_the_rows_that_are_published():
    cases = [(args, batch.cases_of(args)) for args in suite.suite_args("batch")]
    found = {(args.preset, args.sampling, len(rows), name) for args, each in cases for name, rows in each}
    powers = (1, 2, 4, 8, 16, 32, 64)
    assert found == {
        *((preset, "greedy", rows, 64) for preset in ("qwen3-4b", "qwen3-0.6b") for rows in powers),
        ("qwen3-4b", "all", 8, 64),
        ("qwen3-0.6b", "all", 8, 64),
        ("qwen3-4b", "greedy", 32, 1024),
        ("qwen3-4b", "greedy", 32, "32000x1+64x31"),
    }
    few = {(args.preset, args.quantize, *args.rows) for args in suite.suite_args("few-bits")}
    presets = ("qwen3-0.6b", "qwen3-4b", "llama-3.1-8b")
    assert few == {(preset, kind, 1, 8, 16, 32, 64) for preset in presets for kind in ("fp8", "int4")}


def test_the_table_has_a_row_for_each_case():
    row = {"bench": "batch", "preset": "qwen3-4b", "rows": 32, "context": "32000x1+64x31", "us_per_step": 4100.4}
    row |= {"one_row_us": 3399.6, "tokens_per_second": 7804.1, "sampling": "all", "bytes_per_step": 10**10}
    text = report.render([row, row | {"context": 1024}], "md")
    assert "| batch | rows | context | µs per step | one row | tokens per second | GB per step |\n" in text
    assert "| qwen3-4b, all sampling filters | 32 | 32000x1+64x31 | 4,100 | 3,400 | 7,804 | 10.000 |\n" in text
    assert "| 32 | 1,024 |" in text
    few = report.render([row | {"quantize": "int4", "kv_dtype": "fp8"}], "md")
    assert "| qwen3-4b, int4, K/V in fp8, all sampling filters | 32 |" in few


# a prompt among requests


def test_what_requests_see_of_a_prompt_that_comes(bench, monkeypatch):
    made = []
    monkeypatch.setattr(serve_mix, "make_runners", lambda *args: made.append(measure.make_runners(*args)) or made[-1])
    argv = ("serve-mix", "--requests", "3", "--context", "9", "--prompt-tokens", "90", "--steps", "4", "--runs", "2")
    code, out, _ = bench(*argv, "--graph", "full,full_decode_only", "--prompt-ms", "7", "--format", "json")
    rows, (engine,) = json.loads(out), bench.made
    assert code == 0 and [row["graph"] for row in rows] == ["full", "full_decode_only"]
    assert engine.slots == 4 and engine.plan.options.prompt_ms == 7 and engine.scheduler.preemptions == 0
    for row in rows:
        for phase in ("before", "during", "after"):
            median, p99, most = (row[f"{phase}_{figure}_ms"] for figure in ("median", "p99", "max"))
            assert 0 < median <= p99 <= most
        assert (row["lost"], row["requests"], row["prompt_tokens"]) == (0, 3, 90) and row["ttft_ms"] > 0
        assert row["reads"] == ("full" if CUDA and row["graph"] == "full" else "none")
        words = f"--requests 3 --context 9 --prompt-tokens 90 --steps 4 --prompt-ms 7.0 --graph {row['graph']}"
        assert row["command"].endswith(words)
    for runners in made[0].values():
        mixed = [rows * count for (kind, rows, *_), count in runners.reads().items() if kind == "mixed"]
        assert sum(mixed) == (2 + measure.WARM_UP) * 90, "the prompt was not read among them"
    assert "lost" in report.render(rows, "md") and "| during: p99 |" in report.render(rows, "md")


def test_times_between_tokens_fall_where_they_ended(monkeypatch):
    """By hand: passes of 1 s, but for the two in which the prompt is read, which take 5."""
    now, passes = [0.0], []

    class Request:
        def __init__(self, ids, params, reuse_prefix):
            self.most, self.read, self.drawn = params.max_tokens, -(-len(ids) // 50), 0
            passes.append(self)

        @property
        def completion_tokens(self):
            return self.drawn

        def result(self):
            return SimpleNamespace(error=None, token_ids=[0] * (self.drawn - (self is passes[1])))

    class Device:
        config = tiny_config()
        submit = staticmethod(Request)

        def step(self):
            now[0] += 5 if len(passes) == 3 and passes[2].read > 0 else 1
            for request in passes:
                request.read -= 1
                request.drawn += request.read <= 0 and request.drawn < request.most
            return any(request.drawn < request.most for request in passes)

    monkeypatch.setattr(serve_mix.time, "perf_counter", lambda: now[0])
    mix = serve_mix.time_mix(Device(), 2, 10, 100, 4)
    assert mix.gaps == {"before": [1] * 8, "during": [5] * 4, "after": [1] * 10}
    assert mix.ttft == 10 and mix.lost == 1
    figures = serve_mix.mix_figures([mix, serve_mix.Mix(mix.gaps | {"during": [7.0]}, 14.0, 0)])
    assert (figures["before_median_ms"], figures["during_max_ms"], figures["ttft_ms"]) == (1000, 7000, 12000)
    assert figures["lost"] == 1
    passes.clear()
    words = "the requests ended before the prompt was read, after 2 steps; give more --steps"
    with pytest.raises(GenerationError, match=words):
        serve_mix.time_mix(Device(), 2, 10, 500, 2)


def test_as_many_requests_as_slots_leave_none_for_the_prompt(bench):
    code, out, err = bench("serve-mix", "--requests", "64")
    assert (code, out, err.count("\n")) == (1, "", 1) and "--requests: at most 63 beside the prompt, got 64" in err


def test_options_know_what_the_engine_does():
    assert MOST_ROWS == MAX_SLOTS
    assert GRAPHS == tuple(MODES)


@pytest.fixture
def batch_speed(monkeypatch):
    """The script of that name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("batch_speed")


def test_the_script_compares_a_file_with_its_passes(batch_speed, monkeypatch, capsys):
    sizes = ["--requests", "5", "--slots", "3", "--prompt-tokens", "9", "--tokens", "12"]
    monkeypatch.setattr("sys.argv", ["batch_speed.py", *sizes])
    batch_speed.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    decode = [each for each in found["passes"] if each["kind"] == "greedy"]
    reads = [each for each in found["passes"] if each["kind"] in ("prompt", "mixed")]
    assert sum(each["rows"] * each["count"] for each in reads) == 5 * 9, "tokens of prompts were read twice, or not"
    drawn = sum(each["rows"] * each["count"] for each in decode)
    assert 5 * 8 < drawn <= 5 * (12 + 1), "a request may be in the one pass that was enqueued before its end was seen"
    assert max(each["rows"] for each in decode) <= 3
    total = sum(each["us"] * each["count"] for each in found["passes"]) / 1e6
    assert found["passes_s"] == pytest.approx(total, abs=1e-3) and found["wall_s"] > 0
    rounding = 0.0006 * (1 + found["ratio"])  # to milliseconds
    assert found["ratio"] * found["passes_s"] == pytest.approx(found["wall_s"], abs=rounding)


def test_the_script_of_structured_output_counts_the_rows_that_are_late(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script, allowed, calls = importlib.import_module("structured_speed"), Matcher.allowed, count(1)
    monkeypatch.setattr(Matcher, "allowed", lambda self: (next(calls) % 4 or time.sleep(0.3), allowed(self))[1])
    monkeypatch.setattr("sys.argv", ["structured_speed.py", "--rows", "2", "--tokens", "8", "--runs", "1"])
    script.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert min(found[name] for name in ("late", "without", "beside", "held")) > 0


@pytest.mark.skipif(not CUDA, reason="times a public shape on a GPU")
def test_a_real_preset_on_the_gpu(capsys):
    code, out, _ = run_bench(capsys, "batch", "--preset", "qwen3-0.6b", "--rows", "1,8", "--steps", "8", "--runs", "2")
    one, eight = json.loads(out.split("\n")[-2])["rows"]
    assert code == 0 and one["one_row_us"] == pytest.approx(one["us_per_step"], rel=0.2)
    assert eight["us_per_step"] < 4 * one["us_per_step"] and 0 < eight["pct_bandwidth"] < 100
