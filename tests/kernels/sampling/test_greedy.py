"""Greedy sampling, and the end of a pass, which greedy and sample have in common."""

import pytest
import torch
from sampling_util import CAPACITY, GENERATION, POSITION, STEP, UNTOUCHED, assert_same, check, make_state, run
from util import Case, cases, covering, random

from tridecode import layout as m
from tridecode.sampling import SamplingParams

CASES = cases(
    Case("qwen3", gpu=dict(rows=1, vocab=151936), small=dict(rows=1, vocab=3000)),
    Case("llama3", gpu=dict(rows=1, vocab=128256), small=dict(rows=1, vocab=1000)),
    Case("odd_two_rows", gpu=dict(rows=2, vocab=32003), small=dict(rows=2, vocab=4097)),
    Case("tiny", gpu=dict(rows=1, vocab=7), small=dict(rows=1, vocab=7)),
)
KINDS = pytest.mark.parametrize("kind", ["greedy", "sample"])
# With top_k=1, sample selects the same token as greedy, but runs all its launches.
PARAMS = SamplingParams(temperature=0.7, top_k=1, top_p=0.5, min_p=0.1)
OVERFLOW = pytest.mark.filterwarnings("ignore:overflow")  # In the interpreter, numpy warns of overflow.


@CASES
def test_greedy_takes_the_largest_logit(case):
    logits = random(*case.sizes.values(), scale=4)
    after, _ = check("greedy", make_state(logits))
    for slot in range(logits.shape[0]):
        assert after.entry(slot) == (STEP, int(logits[slot].argmax()))
        assert after.tokens[slot, POSITION + 1] == int(logits[slot].argmax())


@covering(2, kind=["greedy", "sample"], ids=[(5, 6), (3, 2999), (2047, 2048), (1500, 2700)], top=[2.5, 0.0, -1.5])
def test_lowest_id_wins_ties(kind, ids, top):
    logits = random(1, 3000) - 20
    logits[0, list(ids)] = top
    if top == 0:
        logits[0, ids[0]] = -0.0  # -0.0 is equal to +0.0.
    for after in check(kind, make_state(logits, SamplingParams(temperature=0))):
        assert after.entry() == (STEP, ids[0])


@OVERFLOW
@covering(2, kind=["greedy", "sample"], value=[float("nan"), float("inf"), -float("inf")], at=[0, 1100, 2999])
def test_non_finite_logits_end_the_generation(kind, value, at):
    logits = random(1, 3000)
    logits[0, at] = value
    before = make_state(logits, PARAMS)
    for after in check(kind, before):
        assert after.progress() == dict(STATUS=m.NAN, POSITION=POSITION, STEP=STEP + 1)
        assert after.entry() == (STEP, m.NO_TOKEN)
        assert_same(after, before, "tokens", "counts")


@OVERFLOW
@KINDS
def test_non_finite_logits_end_the_generation_before_a_known_token(kind):
    logits = random(1, 3000)
    logits[0, 77] = float("nan")
    for after in check(kind, make_state(logits, PARAMS).set(N_KNOWN=POSITION + 2)):
        assert after.progress() == dict(STATUS=m.NAN, POSITION=POSITION, STEP=STEP + 1)
        assert after.entry() == (STEP, m.NO_TOKEN)


BEST = 1234  # the most likely token of the status tests
STATUSES = {
    "continues": (dict(), (), m.RUN),
    "stops": (dict(), (5, BEST), m.STOP),
    "stops_at_the_sixteenth_id": (dict(), (*range(15), BEST), m.STOP),
    "ignores_ids_beyond_n_stop": (dict(N_STOP=1), (5, BEST), m.RUN),
    "limit": (dict(LIMIT=POSITION + 2), (), m.LIMIT_REACHED),
    "one_before_the_limit": (dict(LIMIT=POSITION + 3), (), m.RUN),
    "stop_before_limit": (dict(LIMIT=POSITION + 2), (BEST,), m.STOP),
    "ring_wraps": (dict(STEP=m.RING + STEP), (), m.RUN),
    "step_exceeds_its_bits_in_an_entry": (dict(STEP=m.STEP_MASK + 1 + STEP), (), m.RUN),
    "capacity": (dict(POSITION=CAPACITY - 1, N_KNOWN=0), (), m.LIMIT_REACHED),
}


@KINDS
@pytest.mark.parametrize("change, stop_ids, status", STATUSES.values(), ids=STATUSES)
def test_sampled_token_ends_the_pass(kind, change, stop_ids, status):
    logits = random(1, 3000)
    logits[0, BEST] = 20
    before = make_state(logits, PARAMS, stop_ids=stop_ids).set(**change)
    position, step = before.progress()["POSITION"], before.progress()["STEP"]
    expected = before.copy()
    expected.tokens[0, position + 1] = BEST
    expected.out[0, step % m.RING] = m.ring_entry(GENERATION, step, BEST)
    expected.counts[0, BEST] += 2 * (kind == "sample")
    for after in check(kind, before):
        assert after.progress() == dict(STATUS=status, POSITION=position + 1, STEP=step + 1)
        assert after.entry(step=step) == (step & m.STEP_MASK, BEST)
        assert_same(after, expected, "tokens", "out", "counts")


KNOWN = {
    "continues": (dict(N_KNOWN=POSITION + 2), m.RUN),
    "limit": (dict(N_KNOWN=POSITION + 2, LIMIT=POSITION + 2), m.LIMIT_REACHED),
    "far_from_the_end": (dict(N_KNOWN=CAPACITY), m.RUN),
}


@KINDS
@pytest.mark.parametrize("change, status", KNOWN.values(), ids=KNOWN)
def test_known_tokens_are_reported_and_kept(kind, change, status):
    before = make_state(random(1, 3000), PARAMS, stop_ids=(42,)).set(**change)
    before.tokens[0, POSITION + 1] = 42  # A stop id in the prompt does not end the request.
    for after in check(kind, before):
        assert after.progress() == dict(STATUS=status, POSITION=POSITION + 1, STEP=STEP + 1)
        assert after.entry() == (STEP, 42)
        assert_same(after, before, "tokens", "counts")


@pytest.mark.parametrize("kind", ["greedy", "sample", "logprobs"])
def test_row_uses_the_state_of_its_slot(kind):
    params = [SamplingParams(logprobs=3), SamplingParams(top_p=0.7, presence_penalty=1.0, logprobs=1, temperature=0.5)]
    straight = make_state(random(2, 3000), *params)
    straight.sampler.lse.copy_(straight.logits.logsumexp(1))
    crossed = straight.copy()
    # These tensors have one row per row of the pass. The others have one per slot.
    for tensor in (crossed.logits, crossed.meta, crossed.samp, crossed.sampler.lse):
        tensor.copy_(tensor.flip(0))
    (found, _), (expected, _) = (check(kind, state, with_logprobs=kind == "sample") for state in (crossed, straight))
    found.meta.copy_(found.meta.flip(0))
    assert_same(found, expected, "meta", "tokens", "counts", "out", "ids", "logprobs")


@KINDS
def test_idle_row_leaves_the_other_row_running(kind):
    before = make_state(random(2, 1000), PARAMS, PARAMS)
    before.meta[0, m.STATUS] = m.STOP
    after, _ = check(kind, before)
    assert after.progress(0) == before.progress(0) and after.progress(1)["STEP"] == STEP + 1
    assert torch.equal(after.tokens[0], before.tokens[0]) and after.tokens[1, POSITION + 1] != UNTOUCHED
    assert torch.equal(after.out[0], before.out[0]) and after.entry(1)[0] == STEP


def test_passes_follow_each_other_up_to_the_limit():
    logits = random(1, 3000, scale=3)
    state = make_state(logits).set(LIMIT=POSITION + 4)
    for _ in range(5):
        run("greedy", state)
    best = int(logits.argmax())
    assert state.progress() == dict(STATUS=m.LIMIT_REACHED, POSITION=POSITION + 3, STEP=STEP + 3)
    assert state.tokens[0, POSITION + 1 : POSITION + 5].tolist() == [best] * 3 + [UNTOUCHED]
    assert [state.entry(step=STEP + i)[0] for i in range(3)] == [STEP, STEP + 1, STEP + 2]
    assert state.out[0, STEP + 3] == -1
