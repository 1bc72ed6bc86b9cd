import pytest
import torch
from sampling_util import CAPACITY, GENERATION, POSITION, RUNNERS, STEP, UNTOUCHED, assert_same, make_step, run, run_ref
from util import Case, cases, random

from tridecode import layout as m
from tridecode.sampling import SamplingParams

CASES = cases(
    Case("qwen3", gpu=dict(rows=1, vocab=151936), small=dict(rows=1, vocab=3000)),
    Case("llama3", gpu=dict(rows=1, vocab=128256), small=dict(rows=1, vocab=1000)),
    Case("odd_two_rows", gpu=dict(rows=2, vocab=32003), small=dict(rows=2, vocab=4097)),
    Case("tiny", gpu=dict(rows=1, vocab=7), small=dict(rows=1, vocab=7)),
)
ALL = pytest.mark.parametrize("runner", RUNNERS.values(), ids=RUNNERS)
KERNELS = pytest.mark.parametrize("kind", ["greedy", "sample", "logprobs"])
# top_k 1 draws like greedy, through every launch of sample
PARAMS = SamplingParams(temperature=0.7, top_k=1, top_p=0.5, min_p=0.1)


@CASES
def test_greedy_matches_reference(case):
    logits = random(*case.sizes.values(), scale=4)
    step = make_step(logits)
    ref = run_ref("greedy", step)
    run("greedy", step)
    assert_same(step, ref, "meta", "tokens", "counts", "out", "sampler.counter")
    for slot in range(logits.shape[0]):
        assert step.entry(slot) == (STEP, int(logits[slot].argmax()))
        assert step.tokens[slot, POSITION + 1] == int(logits[slot].argmax())


@ALL
@pytest.mark.parametrize("ids", [(5, 6), (3, 2999), (2047, 2048), (1500, 2700)], ids=str)
@pytest.mark.parametrize("top", [2.5, 0.0, -1.5])
def test_lowest_id_wins_ties(runner, ids, top):
    logits = random(1, 3000) - 20
    logits[0, list(ids)] = top
    if top == 0:
        logits[0, ids[0]] = -0.0  # equal to +0
    assert runner(make_step(logits, SamplingParams(temperature=0))).entry() == (STEP, ids[0])


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter
@ALL
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("at", [0, 1100, 2999])
def test_non_finite_logits_end_the_generation(runner, value, at):
    logits = random(1, 3000)
    logits[0, at] = value
    before = make_step(logits, PARAMS)
    after = runner(before.copy())
    assert after.state() == dict(STATUS=m.NAN, POSITION=POSITION, STEP=STEP + 1)
    assert after.entry() == (STEP, m.NO_TOKEN)
    assert_same(after, before, "tokens", "counts", "logprobs", "sampler.counter")


@pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter
@ALL
def test_given_tokens_are_checked_for_non_finite_logits_too(runner):
    logits = random(1, 3000)
    logits[0, 77] = float("nan")
    after = runner(make_step(logits, PARAMS).set(N_KNOWN=POSITION + 2))
    assert after.state() == dict(STATUS=m.NAN, POSITION=POSITION, STEP=STEP + 1)
    assert after.entry() == (STEP, m.NO_TOKEN)


BEST = 1234  # the most likely token of the status tests
STATUSES = {
    "goes_on": (dict(), (), m.RUN),
    "stops": (dict(), (5, BEST), m.STOP),
    "stops_at_the_sixteenth_id": (dict(), (*range(15), BEST), m.STOP),
    "ids_beyond_n_stop_do_not_count": (dict(N_STOP=1), (5, BEST), m.RUN),
    "limit": (dict(LIMIT=POSITION + 2), (), m.LIMIT_REACHED),
    "one_before_the_limit": (dict(LIMIT=POSITION + 3), (), m.RUN),
    "stop_before_limit": (dict(LIMIT=POSITION + 2), (BEST,), m.STOP),
    "ring_wraps": (dict(STEP=m.RING + STEP), (), m.RUN),
    "more_steps_than_an_entry_tells": (dict(STEP=m.STEP_MASK + 1 + STEP), (), m.RUN),
    "capacity": (dict(POSITION=CAPACITY - 1, N_KNOWN=0), (), m.LIMIT_REACHED),
}


@ALL
@pytest.mark.parametrize("change, stop_ids, status", STATUSES.values(), ids=STATUSES)
def test_a_drawn_token_ends_the_step(runner, change, stop_ids, status, request):
    logits = random(1, 3000)
    logits[0, BEST] = 20
    before = make_step(logits, PARAMS, stop_ids=stop_ids).set(**change)
    position, step = before.state()["POSITION"], before.state()["STEP"]
    after = runner(before.copy())
    assert after.state() == dict(STATUS=status, POSITION=position + 1, STEP=step + 1)
    assert after.entry(step=step) == (step & m.STEP_MASK, BEST)
    tokens, out, counts = before.tokens.clone(), before.out.clone(), before.counts.clone()
    tokens[0, position + 1] = BEST
    out[0, step % m.RING] = m.ring_entry(GENERATION, step, BEST)
    counts[0, BEST] += 2 * ("sample" in request.node.callspec.id)
    assert torch.equal(after.tokens.cpu(), tokens.cpu())
    assert torch.equal(after.out, out)
    assert torch.equal(after.counts.cpu(), counts.cpu())


GIVEN = {
    "goes_on": (dict(N_KNOWN=POSITION + 2), m.RUN),
    "limit": (dict(N_KNOWN=POSITION + 2, LIMIT=POSITION + 2), m.LIMIT_REACHED),
    "far_from_the_end": (dict(N_KNOWN=CAPACITY), m.RUN),
}


@ALL
@pytest.mark.parametrize("change, status", GIVEN.values(), ids=GIVEN)
def test_given_tokens_are_reported_and_kept(runner, change, status):
    before = make_step(random(1, 3000), PARAMS, stop_ids=(42,)).set(**change)
    before.tokens[0, POSITION + 1] = 42  # a stop id: does not stop where it is given
    after = runner(before.copy())
    assert after.state() == dict(STATUS=status, POSITION=POSITION + 1, STEP=STEP + 1)
    assert after.entry() == (STEP, 42)
    assert_same(after, before, "tokens", "counts")


@pytest.mark.parametrize("kind", ["greedy", "sample", "logprobs"])
def test_a_row_takes_its_slots_state_whichever_row_it_is(kind):
    params = [SamplingParams(logprobs=3), SamplingParams(top_p=0.7, presence_penalty=1.0, logprobs=1, temperature=0.5)]
    straight = make_step(random(2, 3000), *params)
    crossed = straight.copy()
    for name in ("logits", "meta", "samp"):  # what is a row's; the rest is a slot's
        getattr(crossed, name).copy_(getattr(straight, name).flip(0))
    run(kind, straight, with_logprobs=True)
    run(kind, crossed, with_logprobs=True)
    crossed.meta.copy_(crossed.meta.flip(0))
    assert_same(crossed, straight, "meta", "tokens", "counts", "out", "ids")
    top = slice(1 if kind == "logprobs" else 0, 1 if kind == "sample" else 4)  # of logprobs and sample each its part
    if kind != "greedy":
        found, expected = (step.logprobs[:, STEP, top].nan_to_num(7.0) for step in (crossed, straight))
        assert torch.equal(found, expected)


@KERNELS
@pytest.mark.parametrize("status", [m.STOP, m.LIMIT_REACHED, m.NAN])
def test_dead_steps_write_nothing(kind, status):
    step = make_step(random(1, 3000), SamplingParams(top_k=9, top_p=0.5, frequency_penalty=1.0)).set(STATUS=status)
    before = step.copy()
    assert_same(run(kind, step, with_logprobs=True), before)
    assert_same(run_ref(kind, step, with_logprobs=True), before)


@pytest.mark.parametrize("kind", ["greedy", "sample"])
def test_a_slot_ends_alone(kind):
    step = make_step(random(2, 1000), PARAMS, PARAMS)
    step.meta[0, m.STATUS] = m.STOP
    before = step.copy()
    run(kind, step)
    assert step.state(0) == before.state(0) and step.state(1)["STEP"] == STEP + 1
    assert torch.equal(step.tokens[0], before.tokens[0]) and step.tokens[1, POSITION + 1] != UNTOUCHED
    assert torch.equal(step.out[0], before.out[0]) and step.entry(1)[0] == STEP


def test_steps_follow_each_other():
    logits = random(1, 3000, scale=3)
    step = make_step(logits).set(LIMIT=POSITION + 4)
    for _ in range(5):
        run("greedy", step)
    best = int(logits.argmax())
    assert step.state() == dict(STATUS=m.LIMIT_REACHED, POSITION=POSITION + 3, STEP=STEP + 3)
    assert step.tokens[0, POSITION + 1 : POSITION + 5].tolist() == [best] * 3 + [UNTOUCHED]
    assert [step.entry(step=STEP + i)[0] for i in range(3)] == [STEP, STEP + 1, STEP + 2]
    assert step.out[0, STEP + 3] == -1
