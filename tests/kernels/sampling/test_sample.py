"""Sampling: filters and draws against the reference, transformers, fp64 and the distribution itself."""

import math

import pytest
import torch
import triton
import triton.language as tl
from sampling_util import POSITION, STEP, UNTOUCHED, check, kept, make_state, run, run_ref
from scipy.stats import chisquare
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from util import CUDA, DEVICE, Case, covering, random

from tridecode import layout as m
from tridecode.kernels.sampling.filters import DECIDED, LISTED
from tridecode.kernels.sampling.mass import FARTHEST, WEIGHT_BITS, weight, weight_ref
from tridecode.kernels.sampling.nearest import NEAREST, RANK_SHIFT
from tridecode.kernels.sampling.philox import philox_bits, philox_bits_ref, philox_words
from tridecode.sampling import SamplingParams as P

CASES = [
    Case("qwen3", gpu=dict(vocab=151936), small=dict(vocab=4097)),
    Case("llama3", gpu=dict(vocab=128256), small=dict(vocab=1000)),
    Case("llama2", gpu=dict(vocab=32000), small=dict(vocab=64)),
]
BIAS = {0: 3.0, 7: -100.0, 11: 1e30, 12: -1e30, 60: 0.5}
FILTERS = {
    "none": P(),
    "temperature": P(temperature=0.6),
    "hot": P(temperature=100.0, top_k=40, top_p=0.5),
    "cold": P(temperature=0.01, top_k=20, top_p=0.9),
    "cold_top_k": P(temperature=0.01, top_k=20),
    "top_k": P(top_k=20),
    "top_k_1": P(top_k=1),
    "top_k_2_top_p": P(top_k=2, top_p=0.95),
    "top_k_beyond_vocab": P(top_k=10**9),
    "top_k_all_but_one": P(top_k=63),
    "top_k_fills_the_list": P(top_k=NEAREST, top_p=0.9),
    "top_k_exceeds_the_list": P(top_k=NEAREST + 1, top_p=0.9),
    "top_p": P(top_p=0.9),
    "top_p_tiny": P(top_p=1e-6),
    "top_p_near_1": P(top_p=0.9999),
    "min_p": P(min_p=0.05),
    "min_p_1": P(min_p=1.0),
    "top_k_top_p": P(top_k=50, top_p=0.8),
    "penalties": P(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25),
    "bias": P(logit_bias={0: 3.0, 7: -100.0, 60: 0.5}),
    "all": P(0.7, 40, 0.95, 0.02, 1.2, 0.6, 0.1, {0: 3.0, 7: -100.0, 60: 0.5}),
    "all_cut_by_min_p": P(1.5, 60, 0.99, 0.3, 0.8, -0.6, 0.1),
    "huge_bias": P(0.7, 40, 0.95, logit_bias=BIAS),
    "temperature_0_penalties": P(temperature=0, repetition_penalty=1.5, frequency_penalty=0.4, top_k=5, top_p=0.5),
    "temperature_0_bias": P(temperature=0, logit_bias={60: 200.0}),
}
ONE_HOT = torch.nn.functional.one_hot(torch.tensor([41]), 64) * 50.0


@covering(2, case=CASES, params=FILTERS)
def test_sample_matches_reference(case, params):
    """Sampling uses integers, so the sampled token and the kept tokens must be equal."""
    after, ref = check("sample", make_state(random(1, case.sizes["vocab"], scale=3), params, seed=-3))
    if params.temperature > 0:
        assert kept(after) == kept(ref)


@covering(
    2, name=["none", "top_k", "top_k_1", "top_p", "top_p_tiny", "min_p_1", "top_k_top_p", "all"],
    logits={"all_equal": torch.full((1, 1000), -3.25), "one_hot": ONE_HOT},
)  # fmt: skip
def test_sample_matches_reference_on_degenerate_logits(name, logits):
    after, ref = check("sample", make_state(logits, FILTERS[name]))
    assert kept(after) == kept(ref)


LISTS = {  # name: (parameters, whether the list of the nearest tokens decides, possible lengths of the list)
    "top_k": (P(top_k=20), True, range(20, 100)),
    "top_k_top_p": (P(top_k=50, top_p=0.8), True, range(50, 150)),
    "top_k_with_most_tokens_too_far": (P(temperature=0.01, top_k=50), True, range(1, 50)),
    "top_k_exceeds_the_list": (P(top_k=NEAREST + 1), False, range(NEAREST + 1, 20001)),
    "top_p": (P(temperature=0.2, top_p=0.5), True, range(1, 100)),
    "top_p_exceeds_the_list": (P(temperature=5.0, top_p=0.9), False, range(1, 200)),
}


@pytest.mark.parametrize("params, decides, lengths", LISTS.values(), ids=LISTS)
def test_list_of_nearest_tokens_decides_if_it_suffices(params, decides, lengths):
    after, ref = check("sample", make_state(random(1, 20000, scale=3), params))
    assert kept(after) == kept(ref)
    found = after.sampler.state[0].tolist()
    assert found[LISTED] in lengths
    assert found[DECIDED] == decides
    if decides:
        d = after.sampler.near[0, : found[LISTED]]
        nearer = d[None] < d[:, None]
        ranks = (nearer.sum(1) << RANK_SHIFT) + (nearer * weight_ref(d.long())).sum(1)
        assert torch.equal(after.sampler.ranks[0, : found[LISTED]], ranks)


@pytest.mark.parametrize("top_k, vocab", [(12, 2049), (20, 4097)])
def test_padding_of_the_last_block_is_not_near(top_k, vocab):
    """The largest logit is 0. If padding were also 0 instead of far below all logits, it would count as near."""
    logits = random(1, vocab, scale=2) - 20
    logits[0, 5] = 0.0
    after, ref = check("sample", make_state(logits, P(top_k=top_k)))
    assert kept(after) == kept(ref)
    assert after.sampler.state[0, LISTED] == vocab, (
        "the list excludes tokens although it is known for fewer than top-k logits that they are largest"
    )


@pytest.mark.parametrize("top_k", [0, 50])
def test_mass_equal_to_top_p_suffices(top_k):
    """The weight of the largest logit is 2**42, which equals ceil(top_p * total). The four other weights are 2**16."""
    d = torch.arange(2361000, 2363000)
    far = int(d[weight_ref(d) == 2**16][0])
    logits = torch.full((1, 300), -60.0)
    logits[0, 7] = 0.0
    logits[0, 9:13] = -far / 2**17
    after, ref = check("sample", make_state(logits, P(top_k=top_k, top_p=1 - 2**-24)))
    assert kept(after) == kept(ref) == {7}


@pytest.mark.parametrize("tied", [NEAREST, NEAREST + 1])
def test_list_holds_as_many_ties_as_fit(tied):
    logits = torch.full((1, 3000), -50.0)
    logits[0, 1000 : 1000 + tied] = 2.0
    state = run("sample", make_state(logits, P(top_k=3)))
    assert kept(state) == set(range(1000, 1000 + tied))
    assert state.sampler.state[0, DECIDED] == (tied == NEAREST)


def test_rows_are_independent():
    logits = random(3, 2100, scale=3)
    params = [FILTERS[name] for name in ("all", "top_p", "temperature_0_bias")]
    after, _ = check("sample", before := make_state(logits, *params))
    alone = make_state(logits[1:2], params[1])
    alone.counts.copy_(before.counts[1:2])
    assert run("sample", alone).entry()[1] == after.entry(1)[1]


def test_lists_of_rows_are_independent():
    logits = random(3, 20000, scale=3) * torch.tensor([[1.0], [8.0], [0.3]], device=DEVICE)
    params = P(top_k=20), P(top_k=12, top_p=0.9), P(temperature=0.3, top_k=40, top_p=0.6)
    after, ref = check("sample", make_state(logits, *params))
    assert after.sampler.state[:, DECIDED].tolist() == [1, 1, 1]
    for row in range(3):
        assert kept(after, row) == kept(ref, row)


def survivors(scores: torch.Tensor) -> set[int]:
    return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())


WARPERS = {
    "top_k": (P(top_k=37), lambda p: [TopKLogitsWarper(p.top_k)]),
    "top_p": (P(top_p=0.9), lambda p: [TopPLogitsWarper(p.top_p)]),
    "top_p_small": (P(top_p=0.1), lambda p: [TopPLogitsWarper(p.top_p)]),
    "min_p": (P(min_p=0.03), lambda p: [MinPLogitsWarper(p.min_p)]),
    "top_k_top_p": (P(top_k=30, top_p=0.7), lambda p: [TopKLogitsWarper(p.top_k), TopPLogitsWarper(p.top_p)]),
    "all": (
        P(temperature=0.8, top_k=50, top_p=0.9, min_p=0.04),
        lambda p: [
            TemperatureLogitsWarper(p.temperature),
            TopKLogitsWarper(p.top_k),
            TopPLogitsWarper(p.top_p),
            MinPLogitsWarper(p.min_p),
        ],
    ),
}


@covering(2, case=CASES, filters=WARPERS)
def test_filters_match_transformers(case, filters):
    params, warpers = filters
    logits = random(1, case.sizes["vocab"], scale=3).cpu()
    scores = logits.double()
    for warper in warpers(params):
        scores = warper(None, scores)
    assert 1 <= len(survivors(scores)) < logits.numel()
    assert kept(run("sample", make_state(logits, params))) == survivors(scores)


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_temperature_and_repetition_penalty_match_transformers(temperature):
    logits = random(1, 1000, scale=3).cpu()
    state = make_state(logits, P(temperature=temperature, repetition_penalty=1.4, min_p=0.2))
    seen = state.counts.cpu().nonzero()[:, 1][None]
    scores = RepetitionPenaltyLogitsProcessor(1.4)(seen, logits.clone())
    run("sample", state)
    assert torch.equal(state.sampler.processed.cpu(), scores)
    assert kept(state) == survivors(MinPLogitsWarper(0.2)(None, TemperatureLogitsWarper(temperature)(None, scores)))


@pytest.mark.parametrize("name", ["penalties", "bias", "all", "all_cut_by_min_p"])
def test_processed_logits_and_kept_tokens_match_fp64(name):
    p = FILTERS[name]
    state = make_state(random(1, 1000, scale=3), p)
    x, counts = state.logits[0].double().cpu(), state.counts[0].tolist()
    run("sample", state)
    for token, value in p.logit_bias.items():
        x[token] += value
    for token, count in enumerate(counts):
        times = count // 2
        if count:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.presence_penalty * (times > 0) + p.frequency_penalty * times
    torch.testing.assert_close(state.sampler.processed[0].double().cpu(), x, rtol=1e-6, atol=1e-6)
    ranked = sorted(range(1000), key=lambda i: -x[i])[: p.top_k or None]
    probs = torch.softmax(x[ranked] / p.temperature, 0).tolist()
    expected = {
        i for n, i in enumerate(ranked) if (p.top_p == 1 or sum(probs[:n]) < p.top_p) and probs[n] >= p.min_p * probs[0]
    }
    assert kept(state) == expected


TIES = {
    "top_k": P(top_k=3),
    "top_p": P(top_p=0.5),
    "min_p": P(min_p=math.exp(-1) * 0.999),
    "both": P(top_k=3, top_p=0.9),
}


@pytest.mark.parametrize("params", TIES.values(), ids=TIES)
def test_ties_at_the_threshold_are_all_kept(params):
    logits = torch.full((1, 2500), -9.0)
    tied = [3, 700, 1023, 1024, 2499]
    logits[0, tied] = 2.0
    logits[0, 1500] = 3.0
    assert kept(run("sample", make_state(logits, params))) == {1500, *tied}


def test_top_p_applies_after_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(run("sample", make_state(logits, P(top_p=0.65)))) == {0, 1}
    assert kept(run("sample", make_state(logits, P(top_k=2, top_p=0.55)))) == {0}
    assert kept(run("sample", make_state(logits, P(top_k=2, top_p=0.6)))) == {0, 1}


def draws(params, logits, seeds, positions):
    """Return sampled tokens.

    On a GPU the kernels sample them, elsewhere the reference, which gives equal tokens and is faster.
    """
    state, tokens = make_state(logits, params), []
    counts = state.counts.clone()
    for seed in seeds:
        for position in positions:
            state.counts.copy_(counts)
            state.set(SEED_LO=seed, SEED_HI=~seed, POSITION=position, N_KNOWN=0, STEP=STEP, STATUS=m.RUN)
            state = run("sample", state) if CUDA else run_ref("sample", state)
            tokens.append(state.entry()[1])
    return tokens


@pytest.mark.parametrize("seeds, positions", [((5,), range(1, 38)), (range(40), (20,))], ids=["positions", "seeds"])
def test_draws_repeat_and_depend_on_seed_and_position(seeds, positions):
    logits = random(1, 500, scale=2)
    once = draws(P(), logits, seeds, positions)
    assert once == draws(P(), logits, seeds, positions)
    assert len(set(once)) > 15


@pytest.mark.parametrize("name", ["none", "top_k_top_p", "all"])
def test_draws_follow_the_distribution(name):
    """The chi-square statistic over fixed seeds accepts the distribution and rejects one that is 40% sharper."""
    params, logits = FILTERS[name], random(1, 64, scale=1.5)
    state = run_ref("sample", make_state(logits, params))
    ids = sorted(kept(state))
    tokens = torch.tensor(draws(params, logits, range(50), range(1, 38)))
    counts = (tokens[:, None] == torch.tensor(ids)).sum(0)
    assert counts.sum() == len(tokens)
    x = state.sampler.processed[0, ids].double()

    def p_value(sharper):
        expected = torch.softmax(x / params.temperature * sharper, 0) * len(tokens)
        rare = expected < 5
        groups = [(counts[~rare], expected[~rare]), (counts[rare].sum()[None], expected[rare].sum()[None])]
        observed, expected = (torch.cat(g) for g in zip(*groups))
        used = expected > 0
        return chisquare(observed[used].numpy(), expected[used].numpy()).pvalue

    assert p_value(1.0) > 0.01
    assert p_value(1.4) < 1e-6


@pytest.mark.parametrize("known", [False, True], ids=["sampled", "known"])
@pytest.mark.parametrize("name", ["all", "temperature_0_penalties"])
def test_reported_token_has_its_raw_log_probability(name, known):
    logits = random(1, 2100, scale=3)
    before = make_state(logits, FILTERS[name]).set(N_KNOWN=POSITION + 1 + known)
    before.tokens[0, POSITION + 1] = 1999
    before.sampler.lse[0] = logits[0].logsumexp(0)
    after, _ = check("sample", before, with_logprobs=True)
    token = after.entry()[1]
    assert (token == 1999) == known
    expected = float(torch.log_softmax(logits[0].double(), 0)[token])
    assert float(after.logprobs[0, STEP, 0]) == pytest.approx(expected, abs=1e-5)
    assert int((after.logprobs != UNTOUCHED).sum()) == 1


@triton.jit
def _bits_kernel(out_ptr, seed_ptr, position_ptr):
    i = tl.program_id(0)
    bits = philox_bits(tl.load(seed_ptr + 2 * i), tl.load(seed_ptr + 2 * i + 1), tl.load(position_ptr + i), i)
    tl.store(out_ptr + i, bits.to(tl.int64, bitcast=True))


def test_philox_matches_its_published_vectors():
    zeros, ones = philox_words(0, (0, 0, 0, 0)), philox_words(2**64 - 1, (2**32 - 1,) * 4)
    digits = philox_words(0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    assert zeros == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert ones == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert digits == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_philox_bits_match_reference():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**31), 2**31, (20, 2), generator=generator).int()
    seeds[0], seeds[1] = 0, -1
    positions = torch.randint(0, 2**31 - 1, (20,), generator=generator).int()
    out = torch.zeros(20, dtype=torch.int64, device=DEVICE)
    _bits_kernel[(20,)](out, seeds.to(DEVICE), positions.to(DEVICE))
    expected = [philox_bits_ref(*pair, p, i) for i, (pair, p) in enumerate(zip(seeds.tolist(), positions.tolist()))]
    assert [value % 2**64 for value in out.tolist()] == expected
    assert len(set(expected)) == 20


@triton.jit
def _weight_kernel(out_ptr, d_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, weight(tl.load(d_ptr + offs)))


def test_weights_are_exponentials_and_match_reference():
    d = torch.arange(FARTHEST + 1)
    w = weight_ref(d)
    exact = torch.exp(-d.double() / 2**17) * 2.0**WEIGHT_BITS
    assert float(((w - exact).abs() - 1).div(exact).max()) < 4e-7  # The last unit in 32 bits may differ.
    assert w[0] == 2**WEIGHT_BITS and bool((w[1:] <= w[:-1]).all()) and bool((w[1:] < w[0]).all())
    some = d[torch.randperm(d.numel(), generator=torch.Generator().manual_seed(0))[: 1 << 16]].int()
    out = torch.full((1 << 16,), -1, dtype=torch.int64, device=DEVICE)
    _weight_kernel[(16,)](out, some.to(DEVICE), BLOCK=4096, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), w[some.long()])
