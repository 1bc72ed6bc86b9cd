"""benchmarks/delta.py: the launches that it times are launches of a pass, at small sizes."""

import pytest
import torch
from models import CUDA

from benchmarks import delta
from tridecode import layout
from tridecode.kernels.attention.arguments import Heads
from tridecode.kernels.delta.arguments import DeltaHeads

HEADS = DeltaHeads(key=1, value=2, key_dim=16, value_dim=32, eps=1e-6)
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(delta, "DEVICE", DEVICE)
    monkeypatch.setattr(delta, "HIDDEN", {HEADS.value: 40})
    monkeypatch.setattr(delta, "LAYERS", 2)
    monkeypatch.setattr(delta, "COLD", 1)
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (0, 0))
        # The interpreter multiplies only fp32 numbers.
        monkeypatch.setattr(delta, "BF16", torch.float32)


@pytest.mark.parametrize("queries", [1, 3])
def test_each_decode_pass_updates_the_state(queries):
    [case] = delta.decode_of(HEADS, 2, queries, 0, [{}])
    case.prepare()
    meta, _, _, _, out, _, records, _, _ = case.launches[1].args
    for passes in range(1, 3):
        out.fill_(float("nan"))
        for launch in case.launches:
            launch()
        assert out.isfinite().all()
        assert (records.covered == delta.START + passes + 1).all(), "a pass did not update the state"
        assert meta[::queries, layout.POSITION].tolist() == [delta.START + passes] * 2


def test_prompt_ops_are_timed_one_by_one_and_together():
    configs = [{}, {"scan.block_v": 16}]
    cases = list(delta.prompt_of(HEADS, 70, configs))
    names = ["delta_conv", "delta_chunks", "delta_scan", "gated_norm", "layer", "delta_scan", "layer"]
    assert [case.op for case in cases] == names, "ops with an equal config are timed once"
    cases[4].launches[1]()
    out = cases[3].launches[1].args[3]
    assert out.isfinite().all() and all(case.nbytes > 0 for case in cases if case.op != "layer")


def test_attention_of_a_prompt_by_triton_and_by_torch(monkeypatch):
    monkeypatch.setattr(delta, "PAGE", 16)
    flash, *cases = delta.attention_of(Heads(4, 1, 64, 0.125, 0), 40, [{}, {"block_m": 16}])
    flash.launches[1]()
    expected = flash.launches[1].args[2].clone()
    for case in cases:
        case.launches[1]()
        torch.testing.assert_close(case.launches[1].args[2], expected, rtol=0, atol=1e-2 if CUDA else 1e-5)
    assert cases[0].flops == 2 * 40 * 41 * 4 * 64


def test_errors_of_a_config_are_rows():
    def fail():
        raise RuntimeError("out of\nresources")

    row = delta.measured(delta.Case("op", {"tokens": 3}, "x=1", [fail]), 1e12)
    assert row == dict(op="op", tokens=3, config="x=1", error="RuntimeError: out of resources")
    assert "out of resources" in delta.line_of(row)


def test_fields_of_a_config_are_parsed():
    assert delta.changes_of("num_warps=4,registers=128") == dict(num_warps=4, registers=128)
