"""Tests of bench speculate, on a tiny model: costs of passes, playback of texts, and the speed-up."""

import json
from collections import Counter

import pytest
from benches import bench_on_tiny_engines, engine_of, run_bench

from tridecode import layout
from tridecode.cli.bench import speculate, speculate_texts
from tridecode.cli.bench.speculate_texts import Text, simulate, texts
from tridecode.cli.parser import make_parser

SMALL = ("speculate", "--context", "20", "--steps", "2", "--runs", "1", "--history", "300")


@pytest.fixture
def bench(capsys, monkeypatch):
    """`bench` on a tiny engine, with two short texts."""

    def make(args, *sizes, **more):
        return engine_of(*sizes, **more, speculate_ngram=args.speculate_ngram)

    short = [Text("twice", "a.py", "one two three four five six " * 4, "one two three four five six " * 3)]
    monkeypatch.setattr(speculate, "texts", lambda: [*short, Text("once", "b.md", "Begin.", "Nothing is said again.")])
    return bench_on_tiny_engines(capsys, monkeypatch, "speculate", make=make)


def test_rows_of_costs_texts_and_speed_up(bench):
    code, out, _ = bench(*SMALL, "--requests", "1,3", "--format", "json")
    one, three, draft, twice, once = json.loads(out)
    assert code == 0 and [one["requests"], three["requests"]] == [1, 3]
    for row in (one, three):
        assert [rows for rows in (1, 2, 4, 8) if f"us_{rows}" in row] == [1, 2, 4, 8]
        assert row["ratio_4"] == pytest.approx(row["us_4"] / row["off_us"], abs=1e-3) and row["off_us"] > 0
    assert draft["history"] == 300 and draft["draft_us"] > 0
    assert (twice["variant"], twice["source"], twice["license"]) == ("twice", "a.py", "Apache-2.0")
    passes = {rows: twice[f"passes_{rows}"] for rows in (1, 2, 4, 8)}
    assert twice["tokens_per_pass"] == pytest.approx(twice["tokens"] / sum(passes.values()), abs=0.006)
    assert twice["tokens_per_pass"] > 2 > once["tokens_per_pass"] >= 1
    took = sum(one[f"us_{rows}"] * count for rows, count in passes.items())
    assert twice["speed_up"] == pytest.approx(twice["tokens"] * one["off_us"] / took, abs=0.006)
    parsed = make_parser().parse_args(one["command"].split()[2:])
    assert parsed.requests == (1, 3) and parsed.context == 20 and parsed.history == 300


def test_timed_passes_verify_the_named_number_of_rows(bench):
    code, out, _ = bench(*SMALL, "--requests", "2", "--speculate-ngram", "3:3", "--format", "md")
    (engine,) = bench.made
    counts = {stat.kind: stat.count for stat in engine.graph_stats() if stat.kind.startswith("greedy")}
    assert code == 0 and set(counts) == {"greedy", "greedy x2", "greedy x4", "greedy x8"}
    assert len(set(counts.values())) == 1 and engine.plan.ngram == (3, 3)
    assert "| speculate | requests | context | µs per pass without drafts | 1 row of each | 1: ratio |" in out
    assert "| search for a draft | tokens of text | µs |" in out and "speed-up" not in out, (
        "the output contains a speed-up without a measured baseline"
    )


def test_texts_only_needs_no_gpu_and_no_engine(bench):
    code, out, _ = bench("speculate", "--texts-only", "--speculate-ngram", "5,3", "--format", "json")
    rows = json.loads(out)
    assert code == 0 and not bench.made and [row["variant"] for row in rows] == ["twice", "once"]
    assert not any("speed_up" in row or "gpu" in row for row in rows)
    assert rows[0]["command"] == "python cli.py bench speculate --speculate-ngram 5,3 --texts-only"


def test_without_texts_only_options_have_their_defaults():
    args = make_parser().parse_args(["bench", "speculate", "--steps", "5"])
    assert (args.preset, args.runs, args.requests, args.context) == ("qwen3-4b", 7, (1, 2, 4, 8, 16), 1024)
    assert (args.steps, args.history, args.quantize) == (5, 32000, None)


def test_missing_texts_fail_with_one_line(capsys, monkeypatch, tmp_path):
    code, quotation, _, prose, _ = texts()
    assert code.sampled != code.before and quotation.sampled in quotation.before
    assert prose.sampled[:200] not in prose.before
    monkeypatch.setattr(speculate_texts, "ROOT", tmp_path)
    code, out, err = run_bench(capsys, "speculate")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "benchmarks/texts/code.txt is missing; run this bench in a checkout" in err


def test_playback_of_a_text():
    """The host reads the result of a pass two passes later, so that the number of rows follows with that delay."""
    assert simulate([1, 2, 3], [40, 50, 60, 70], layout.NGRAM) == Counter({1: 4})
    passes = simulate([7] * 20, [7] * 40, layout.NGRAM)
    assert passes == Counter({1: 2, 2: 1, 4: 1, 8: 4})
    assert simulate([7] * 20, [7] * 12, (16, 16)) == simulate([7] * 20, [7] * 12, layout.NGRAM)
    assert simulate([7] * 10, [7] * 4, (16, 16)) == Counter({1: 4})
