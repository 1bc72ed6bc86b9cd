import pytest
import torch
from sampling_util import STEP, UNTOUCHED, assert_same, make_step, run, run_ref
from util import Case, cases, random

from tridecode import layout as m
from tridecode.sampling import SamplingParams

CASES = cases(
    Case("qwen3_20", gpu=dict(vocab=151936, top=20), small=dict(vocab=4097, top=20)),
    Case("llama3_5", gpu=dict(vocab=128256, top=5), small=dict(vocab=1000, top=5)),
    Case("fewer_tokens_than_asked", gpu=dict(vocab=13, top=20), small=dict(vocab=13, top=20)),
    Case("only_the_drawn_token", gpu=dict(vocab=32000, top=0), small=dict(vocab=100, top=0)),
)


@CASES
def test_logprobs_match_reference_and_fp64(case):
    vocab, top = case.sizes.values()
    logits = random(1, vocab, scale=3)
    step = make_step(logits, SamplingParams(logprobs=top))
    ref = run_ref("logprobs", step)
    run("logprobs", step)
    assert_same(step, ref, "meta", "tokens", "out", "ids", "sampler.counter")
    top = min(top, vocab)
    exact, ids = torch.log_softmax(logits[0].double().cpu(), 0).sort(descending=True)
    for s in (step, ref):
        assert s.ids[0, STEP, :top].tolist() == ids[:top].tolist()
        assert bool((s.ids[0, STEP, top:] == UNTOUCHED).all())
        assert float((s.logprobs[0, STEP, 1 : 1 + top] - exact[:top]).abs().sum()) <= 1e-5 * max(top, 1)
        assert int((~s.logprobs.isnan()).sum()) == top
        assert float(s.sampler.lse[0]) == pytest.approx(float(logits[0].double().logsumexp(0)), abs=1e-5)


def test_lower_ids_come_first_among_ties():
    logits = random(1, 4200).clamp(max=1.0)
    logits[0, [4150, 7, 4099, 2000]] = 5.0
    logits[0, 3000] = 6.0
    step = make_step(logits, SamplingParams(logprobs=7)).set(STEP=m.RING + 2)
    ref = run_ref("logprobs", step)
    run("logprobs", step)
    ones = (logits[0] == 1).nonzero().flatten()[:2].tolist()
    assert len(ones) == 2
    assert step.ids[0, 2, :7].tolist() == ref.ids[0, 2, :7].tolist() == [3000, 7, 2000, 4099, 4150, *ones]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_nothing_is_reported_of_non_finite_logits(value):
    logits = random(1, 100)
    logits[0, 31] = value
    step = make_step(logits, SamplingParams(logprobs=5))
    before = step.copy()
    for after in (run_ref("logprobs", step), run("logprobs", step)):
        assert_same(after, before, "ids", "logprobs", "meta", "sampler.counter")


def test_rows_do_not_mix():
    logits = random(2, 100, scale=3)
    step = make_step(logits, SamplingParams(logprobs=2), SamplingParams(logprobs=4))
    run("logprobs", step)
    for slot, top in enumerate((2, 4)):
        assert step.ids[slot, STEP, :top].tolist() == logits[slot].topk(top).indices.tolist()
        assert bool((step.ids[slot, STEP, top:] == UNTOUCHED).all())
