"""bench speculate: costs of passes, texts that are played, and the speed-up of both, on a tiny model with a clock."""

import importlib
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from benches import FACTS, Clock, run_bench
from models import CUDA, build_engine, tiny_config, tiny_engine

from tridecode import layout
from tridecode.checkpoint.hub import BUNDLED
from tridecode.checkpoint.load import random_weights
from tridecode.cli.bench import report, speculate, speculate_texts
from tridecode.cli.bench.speculate_texts import Text, play, texts
from tridecode.cli.parser import make_parser
from tridecode.errors import ParameterError
from tridecode.state.kv import PAGE
from tridecode.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
SMALL = ("speculate", "--context", "20", "--steps", "2", "--runs", "1", "--history", "300")


@pytest.fixture
def bench(capsys, monkeypatch):
    """`bench` on a tiny engine, which `bench.made` keeps, and two short texts."""
    made = []

    def engine(args, capacity, slots, kv_tokens, **more):
        device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
        config = tiny_config(max_position=1024)
        weights = random_weights(config, device, torch.bfloat16 if CUDA else torch.float32)
        more |= dict(slots=slots, pages=kv_tokens // PAGE, page=PAGE, speculate_ngram=args.speculate_ngram)
        made.append(build_engine(config, weights, capacity, **more))
        return made[-1]

    monkeypatch.setattr(speculate, "bench_engine", engine)
    monkeypatch.setattr(speculate, "run_facts", lambda device: FACTS)
    short = [Text("twice", "a.py", "one two three four five six " * 4, "one two three four five six " * 3)]
    monkeypatch.setattr(speculate, "texts", lambda: [*short, Text("once", "b.md", "Begin.", "Nothing is said again.")])
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "Event", Clock)
    run = partial(run_bench, capsys)
    run.made = made
    return run


def test_costs_texts_and_the_speed_up_of_both(bench):
    code, out, _ = bench(*SMALL, "--requests", "1,3", "--format", "json")
    one, three, draft, twice, once = json.loads(out)
    assert code == 0 and [one["requests"], three["requests"]] == [1, 3]
    assert [rows for rows in (1, 2, 4, 8) if f"us_{rows}" in one] == [1, 2, 4, 8]
    assert [rows for rows in (1, 2, 4, 8) if f"us_{rows}" in three] == [1, 2, 4, 8]
    for row in (one, three):
        assert row["ratio_4"] == pytest.approx(row["us_4"] / row["off_us"], abs=1e-3) and row["off_us"] > 0
    assert draft["history"] == 300 and draft["draft_us"] > 0
    assert (twice["variant"], twice["source"], twice["licence"]) == ("twice", "a.py", "Apache-2.0")
    passes = {rows: twice[f"passes_{rows}"] for rows in (1, 2, 4, 8)}
    assert twice["tokens_per_pass"] == pytest.approx(twice["tokens"] / sum(passes.values()), abs=0.006)
    assert twice["tokens_per_pass"] > 2 > once["tokens_per_pass"] >= 1
    took = sum(one[f"us_{rows}"] * count for rows, count in passes.items())
    assert twice["speed_up"] == pytest.approx(twice["tokens"] * one["off_us"] / took, abs=0.006)
    parsed = make_parser().parse_args(one["command"].split()[2:])
    assert parsed.requests == [1, 3] and parsed.context == 20 and parsed.history == 300


def test_the_passes_that_are_timed_verify_as_many_as_they_say(bench):
    assert bench(*SMALL, "--requests", "2", "--speculate-ngram", "3:3")[0] == 0
    (engine,) = bench.made
    counts = {stat.kind: stat.count for stat in engine.graph_stats() if stat.kind.startswith("greedy")}
    assert set(counts) == {"greedy", "greedy x2", "greedy x4", "greedy x8"} and len(set(counts.values())) == 1
    assert engine.model.ngram == (3, 3) and engine.plan.ngram == (3, 3)


def test_texts_alone_need_no_gpu_and_no_engine(bench):
    code, out, _ = bench("speculate", "--texts-only", "--speculate-ngram", "5:3", "--format", "json")
    rows = json.loads(out)
    assert code == 0 and not bench.made and [row["variant"] for row in rows] == ["twice", "once"]
    assert not any("speed_up" in row or "gpu" in row for row in rows)
    assert rows[0]["command"] == "python cli.py bench speculate --speculate-ngram 5:3 --texts-only"


@pytest.mark.parametrize(
    "given",
    ["--preset qwen3-4b", "--runs 7", "--requests 1", "--context 64", "--steps 2", "--history 300", "--quantize int4",
     "--quantize-head fp8"],
)  # fmt: skip
def test_texts_alone_refuse_what_is_of_passes(capsys, given):
    """Even at its default."""
    with pytest.raises(SystemExit, match="^2$"):
        make_parser().parse_args(["bench", "speculate", *given.split(), "--texts-only"])
    err, option = capsys.readouterr().err, given.split()[0]
    assert err.count("\n") == 1 and f"error: {option} does not go with --texts-only" in err


@pytest.mark.parametrize("more", [(), ("--texts-only",)], ids=["passes", "texts"])
@pytest.mark.parametrize("given", ["99:2", "2:8", "0:0"])
def test_numbers_that_engines_refuse_are_refused(capsys, given, more):
    with pytest.raises(SystemExit, match="^2$"):
        make_parser().parse_args(["bench", "speculate", *more, "--speculate-ngram", given])
    expected = f"two numbers from {layout.MAX_NGRAM} down to 1, the larger first, like 8 and 2"
    assert f"argument --speculate-ngram: expected {expected}, got '{given}'" in capsys.readouterr().err


def test_kv_in_8_bits_is_not_offered(capsys):
    """Nothing verifies it."""
    with pytest.raises(SystemExit, match="^2$"):
        make_parser().parse_args(["bench", "speculate", "--kv-dtype", "fp8"])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "error: unrecognized arguments: --kv-dtype fp8 (see" in err


def test_without_texts_only_the_defaults_are_what_help_says():
    args = make_parser().parse_args(["bench", "speculate", "--steps", "5"])
    assert (args.preset, args.runs, args.requests, args.context) == ("qwen3-4b", 7, [1, 2, 4, 8, 16], 1024)
    assert (args.steps, args.history, args.quantize) == (5, 32000, None)


def test_the_texts_are_there_and_are_what_they_are_called():
    found = {text.name.split()[0].rstrip(":"): text for text in texts()}
    assert list(found) == ["code", "quotation", "JSON", "prose", "chat"]
    for text in found.values():
        assert (ROOT / text.source).parent == ROOT / "benchmarks/texts" and len(text.drawn) > 2000
    assert found["code"].drawn != found["code"].before and "kept" in found["code"].drawn
    assert found["quotation"].drawn in found["quotation"].before
    assert found["prose"].drawn[:200] not in found["prose"].before


def test_what_is_recorded_of_the_texts_is_of_these():
    """No edit of another file changes a figure; an edit of these has to be played and recorded again."""
    recorded = json.loads((ROOT / "benchmarks/speculation-texts.json").read_text())
    tokenizer = Tokenizer.load(BUNDLED)
    found = [(text.name, text.source, len(tokenizer.encode(text.drawn))) for text in texts()]
    assert found == [(row["variant"], row["source"], row["tokens"]) for row in recorded]


def test_without_the_files_it_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(speculate_texts, "ROOT", tmp_path)
    with pytest.raises(ParameterError, match="benchmarks/texts/code.txt is not there; run it in a checkout$"):
        texts()


def test_playing_a_text_by_hand():
    """Rows follow what the pass but one before asked for: a guess that was right is verified two passes later."""
    assert play([1, 2, 3], [40, 50, 60, 70], layout.NGRAM) == Counter({1: 4})
    passes = play([7] * 20, [7] * 40, layout.NGRAM)
    assert passes == Counter({1: 2, 2: 1, 4: 1, 8: 4}), "1 + 1 + 2 + 4 + 4 * 8 tokens"
    assert play([7] * 20, [7] * 12, (16, 16)) == play([7] * 20, [7] * 12, layout.NGRAM)
    assert play([7] * 10, [7] * 4, (16, 16)) == Counter({1: 4}), "sixteen never agree"


def test_the_tables(bench):
    code, out, _ = bench(*SMALL, "--requests", "1", "--format", "md")
    assert code == 0 and "| requests | shape | context | µs a pass without | 1 row of each | 1: ratio |" in out
    assert "| text | from | licence | tokens | tokens a pass | passes of 1 | passes of 2 |" in out
    assert "| speed-up |" in out and "| looking for a draft | tokens before | µs |" in out
    assert set(report.COMPARED) == set(report.COLUMNS)


def test_on_a_machine_without_a_gpu_it_says_so(capsys):
    if not CUDA:
        code, out, err = run_bench(capsys, "speculate")
        assert (code, out, err.count("\n")) == (1, "", 1) and "needs an NVIDIA GPU" in err


# ---- a draft model


@pytest.fixture
def draft_model(monkeypatch):
    """The script of that name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("draft_model")


def test_a_cycle_of_two_models_is_timed_and_advances_both(draft_model, monkeypatch):
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "Event", Clock)
    positions = draft_model.room(20, 2)
    large = tiny_engine(graph="none", capacity=positions, build={"speculate": "ngram"})
    small = tiny_engine(graph="none", capacity=positions, num_layers=1)
    rows = draft_model.measure(large, small, context=20, steps=2, runs=1)
    assert [row["guesses"] for row in rows] == [1, 3, 7]
    for row in rows:
        assert row["passes"] == pytest.approx(row["cycle_us"] / row["large_us"], abs=1e-3)
        assert all(row[name] > 0 for name in ("large_us", "small_us", "verify_us", "cycle_us"))
    torch.cuda.synchronize() if CUDA else None
    at = [engine.model.workspace.meta[0, layout.POSITION].item() for engine in (large, small)]
    assert at == [20 + 3 * 8, 20 + 3 * 7], "three cycles of seven guesses, all of which were right"


def test_break_even(draft_model):
    assert draft_model.expected(0.5, 3) == 1.875 and draft_model.expected(1.0, 7) == 8
    assert draft_model.break_even(1.875, 3) == 0.5 and draft_model.break_even(8.0, 7) == 1.0
    assert draft_model.break_even(1.0, 3) == 0.0 and draft_model.break_even(4.1, 3) is None
