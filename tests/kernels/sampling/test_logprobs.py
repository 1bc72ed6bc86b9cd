import pytest
import torch
from sampling_util import STEP, UNTOUCHED, assert_same, check, make_state
from util import Case, cases, random

from tridecode import layout as m
from tridecode.sampling import SamplingParams

CASES = cases(
    Case("qwen3_20", gpu=dict(vocab=151936, top=20), small=dict(vocab=4097, top=20)),
    Case("llama3_5", gpu=dict(vocab=128256, top=5), small=dict(vocab=1000, top=5)),
    Case("top_exceeds_vocab", gpu=dict(vocab=13, top=20), small=dict(vocab=13, top=20)),
    Case("sampled_token_only", gpu=dict(vocab=32000, top=0), small=dict(vocab=100, top=0)),
)


@CASES
def test_logprobs_match_reference_and_fp64(case):
    vocab, top = case.sizes.values()
    logits = random(1, vocab, scale=3)
    exact, ids = torch.log_softmax(logits[0].double().cpu(), 0).sort(descending=True)
    shown = min(top, vocab)
    for state in check("logprobs", make_state(logits, SamplingParams(logprobs=top))):
        assert state.ids[0, STEP, :shown].tolist() == ids[:shown].tolist()
        assert bool((state.ids[0, STEP, shown:] == UNTOUCHED).all())
        assert float((state.logprobs[0, STEP, 1 : 1 + shown] - exact[:shown]).abs().sum()) <= 1e-5 * shown
        assert int((state.logprobs != UNTOUCHED).sum()) == shown
        assert float(state.sampler.lse[0]) == pytest.approx(float(logits[0].double().logsumexp(0)), abs=1e-5)


def test_lower_ids_come_first_among_ties():
    logits = random(1, 4200).clamp(max=1.0)
    logits[0, [4150, 7, 4099, 2000]] = 5.0
    logits[0, 3000] = 6.0
    ones = (logits[0] == 1).nonzero().flatten()[:2].tolist()
    assert len(ones) == 2
    for state in check("logprobs", make_state(logits, SamplingParams(logprobs=7)).set(STEP=m.RING + 2)):
        assert state.ids[0, 2, :7].tolist() == [3000, 7, 2000, 4099, 4150, *ones]


@pytest.mark.filterwarnings("ignore:invalid value")  # In the interpreter, numpy gives this warning.
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_non_finite_logits_have_no_logprobs(value):
    logits = random(1, 100)
    logits[0, 31] = value
    before = make_state(logits, SamplingParams(logprobs=5))
    for after in check("logprobs", before):
        assert_same(after, before, "ids", "logprobs")


def test_each_row_reports_its_own_number_of_logprobs():
    logits = random(2, 100, scale=3)
    state, _ = check("logprobs", make_state(logits, SamplingParams(logprobs=2), SamplingParams(logprobs=4)))
    for slot, top in enumerate((2, 4)):
        assert state.ids[slot, STEP, :top].tolist() == logits[slot].topk(top).indices.tolist()
        assert bool((state.ids[slot, STEP, top:] == UNTOUCHED).all())
