"""Masks: what they bar is never drawn, other rows draw as ever, and a row whose mask is late stays where it is."""

import pytest
import torch
from sampling_util import GENERATION, POSITION, STEP, UNTOUCHED, assert_same, make_step, run, run_ref
from util import Case, cases, random

from tridecode import SamplingParams
from tridecode import layout as m

CASES = cases(
    Case("qwen3", gpu=dict(rows=3, vocab=151936), small=dict(rows=3, vocab=3000)),
    Case("odd", gpu=dict(rows=2, vocab=32003), small=dict(rows=2, vocab=4097)),
    Case("less_than_a_word", gpu=dict(rows=2, vocab=7), small=dict(rows=2, vocab=7)),
)
KINDS = pytest.mark.parametrize("kind", ["greedy", "sample"])
RUN = pytest.mark.parametrize("draw", [run, run_ref], ids=["kernels", "reference"])
STAMP = m.mask_stamp(GENERATION, POSITION)
HOT = SamplingParams(temperature=1.5, top_k=50, top_p=0.99, repetition_penalty=0.01, frequency_penalty=-2.0)


def masked_step(rows, vocab, allowed, params=HOT, stamp=STAMP, first=0):
    """Rows from `first` on have masks that allow the tokens `allowed`."""
    step = make_step(random(rows, vocab, scale=4), *[params] * rows)
    bits = torch.zeros(32 * m.mask_words(vocab), dtype=torch.int64)
    bits[list(allowed)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    step.mask[:] = torch.where(words >= 2**31, words - 2**32, words).int()
    step.stamp[first:] = stamp
    step.meta[first:, m.FLAGS] |= m.FLAG_MASK
    return step


@CASES
@KINDS
def test_masks_match_the_reference(case, kind):
    rows, vocab = case.sizes.values()
    allowed = {0, vocab - 1, vocab // 2}
    step = masked_step(rows, vocab, allowed, SamplingParams(temperature=0) if kind == "greedy" else HOT, first=1)
    plain, ref = run(kind, step.copy()), run_ref(kind, step, masked=True)
    run(kind, step, masked=True)
    assert_same(step, ref, "logits", "meta", "tokens", "counts", "out", "sampler.counter")
    assert torch.equal(step.tokens[0], plain.tokens[0])  # it has none
    for row in range(1, rows):
        assert step.entry(row)[1] in allowed and step.tokens[row, POSITION + 1] == step.entry(row)[1]


@RUN
@KINDS
@pytest.mark.parametrize("token", [0, 31, 32, 1023, 1024, 2999])
def test_the_only_token_that_is_allowed_is_drawn_whatever_speaks_against_it(draw, kind, token):
    params = SamplingParams(temperature=1.0, logit_bias={token: -1e30, 5: 1e30}, top_k=3)
    params = SamplingParams(temperature=0) if kind == "greedy" else params
    assert draw(kind, masked_step(1, 3000, [token], params), masked=True).entry() == (STEP, token)


STAMPS = {
    "of_the_position_before": m.mask_stamp(GENERATION, POSITION - 1),
    "of_another_request": m.mask_stamp(GENERATION - 1, POSITION),
    "none": 0,
}


@RUN
@KINDS
@pytest.mark.parametrize("stamp", STAMPS.values(), ids=STAMPS)
def test_a_row_whose_mask_is_late_does_the_same_pass_again(draw, kind, stamp):
    before = masked_step(2, 3000, [7], SamplingParams(temperature=0) if kind == "greedy" else HOT, stamp, first=1)
    after = draw(kind, before.copy(), masked=True)
    assert after.state(0) == dict(STATUS=m.RUN, POSITION=POSITION + 1, STEP=STEP + 1)
    assert after.state(1) == dict(STATUS=m.RUN, POSITION=POSITION, STEP=STEP + 1)
    assert after.entry(1) == (STEP, m.LATE_TOKEN) and after.tokens[1, POSITION + 1] == UNTOUCHED
    assert torch.equal(after.counts[1].cpu(), before.counts[1].cpu())
    after.stamp[1] = STAMP
    after.meta[0, m.STATUS] = m.STOP
    again = draw(kind, after, masked=True)
    assert again.state(1) == dict(STATUS=m.RUN, POSITION=POSITION + 1, STEP=STEP + 2)
    assert again.entry(1, STEP + 1) == (STEP + 1, 7) and again.tokens[1, POSITION + 1] == 7


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter
@RUN
@KINDS
def test_an_allowed_logit_that_is_not_finite_ends_the_generation(draw, kind):
    step = masked_step(1, 3000, [7, 1500], SamplingParams(temperature=0) if kind == "greedy" else HOT)
    step.logits[0, 1500] = float("nan")
    assert draw(kind, step, masked=True).state() == dict(STATUS=m.NAN, POSITION=POSITION, STEP=STEP + 1)


@RUN
def test_a_row_that_has_ended_writes_nothing(draw):
    before = masked_step(1, 3000, [7]).set(STATUS=m.STOP)
    assert_same(draw("sample", before.copy(), masked=True), before)
