"""Tests of the scripts in benchmarks/ that measure batches, structured output and a draft model."""

import json
import time
from itertools import count

import pytest
from models import tiny_engine

from benchmarks import batch_speed, draft_model, structured_speed
from tridecode import layout
from tridecode.text.grammar import Matcher


def last_object(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_batch_time_is_compared_with_its_passes(monkeypatch, capsys):
    sizes = ["--requests", "5", "--slots", "3", "--prompt-tokens", "9", "--tokens", "12"]
    monkeypatch.setattr("sys.argv", ["batch_speed", *sizes])
    batch_speed.main()
    found = last_object(capsys)
    decode = [each for each in found["passes"] if each["kind"] == "greedy"]
    reads = [each for each in found["passes"] if each["kind"] in ("prompt", "mixed")]
    assert sum(each["rows"] * each["count"] for each in reads) == 5 * 9, (
        "some prompt tokens were read twice, or were not read"
    )
    sampled = sum(each["rows"] * each["count"] for each in decode)
    assert 5 * 8 < sampled <= 5 * (12 + 1), "the number of sampled tokens is outside the limits"
    total = sum(each["us"] * each["count"] for each in found["passes"]) / 1e6
    assert found["passes_s"] == pytest.approx(total, abs=1e-3) and found["wall_s"] > 0


def test_rows_that_wait_for_a_mask_are_counted(monkeypatch, capsys):
    allowed, calls = Matcher.allowed, count(1)
    monkeypatch.setattr(Matcher, "allowed", lambda self: (next(calls) % 4 or time.sleep(0.3), allowed(self))[1])
    monkeypatch.setattr("sys.argv", ["structured_speed", "--rows", "2", "--tokens", "8", "--runs", "1"])
    structured_speed.main()
    found = last_object(capsys)
    assert min(found[name] for name in ("late", "without", "beside", "held")) > 0


def test_a_cycle_of_two_models_is_timed_and_advances_both():
    positions = draft_model.room(20, 2)
    large = tiny_engine(graph="none", capacity=positions, build={"speculate": "ngram"})
    small = tiny_engine(graph="none", capacity=positions, num_layers=1)
    rows = draft_model.measure(large, small, context=20, steps=2, runs=1)
    assert [row["drafts"] for row in rows] == [1, 3, 7]
    for row in rows:
        assert row["passes"] == pytest.approx(row["cycle_us"] / row["large_us"], abs=1e-3)
    at = []
    for engine in (large, small):
        engine.synchronize()
        at.append(engine.model.workspace.meta[0, layout.POSITION].item())
    assert at == [20 + 3 * 8, 20 + 3 * 7]


def test_break_even():
    assert draft_model.expected(0.5, 3) == 1.875 and draft_model.expected(1.0, 7) == 8
    assert draft_model.break_even(1.875, 3) == 0.5 and draft_model.break_even(8.0, 7) == 1.0
    assert draft_model.break_even(1.0, 3) == 0.0 and draft_model.break_even(4.1, 3) is None
