"""Models with recurrent state: every form of pass, several requests, drafts, cut prompts."""

from dataclasses import replace

import pytest
import torch
from block_check import REFERENCES, reference_logits
from hybrid import GREEDY, REPEATING, SPEC, hybrid_engine, hybrid_weights, prompt_of
from models import CUDA, interpreter_configs, planned
from util import relative_rms

from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.errors import ParameterError
from tridecode.models.presets import PRESETS

PROMPTS = [prompt_of(seed, count) for seed, count in ((0, 5), (1, 70), (2, 130), (3, 64))]


@pytest.fixture(scope="module")
def weights():
    return hybrid_weights()


@pytest.fixture(scope="module")
def texts_alone(weights):
    """The text after each prompt, by an engine that runs nothing else."""
    engine = hybrid_engine(weights)
    return [list(engine.generate(ids, GREEDY).token_ids) for ids in PROMPTS]


@pytest.mark.skipif(CUDA, reason="on a GPU, the other tests of this file run the kernels")
def test_kernels_agree_with_references_in_the_interpreter(weights):
    engine = hybrid_engine(weights, 128, "triton", "none", interpreter_configs(SPEC, weights))
    ids = PROMPTS[1][:7]
    exact = reference_logits(SPEC, weights, ids, REFERENCES)
    assert relative_rms(engine.score(ids), exact) < 1e-5, "decode passes computed other logits"
    ids = PROMPTS[1]
    answer = engine.generate(ids, replace(GREEDY, max_tokens=3))
    exact = reference_logits(SPEC, weights, [*ids, *answer.token_ids[:-1]], REFERENCES)
    assert relative_rms(engine.model.workspace.logits[0], exact[-1]) < 1e-5, (
        "decode passes after a prompt pass computed other logits"
    )


def test_rewound_rows_update_the_state(weights):
    """A benchmark runs passes from the same position again. They do not count as passes that are repeated."""
    engine, params = hybrid_engine(weights), replace(GREEDY, seed=0)
    for _ in range(2):
        rewind(engine, 40, params)
        before = [layer.state[0].clone() for layer in engine.model.recurrent.layers]
        enqueue(engine, params)
        for layer, state in zip(engine.model.recurrent.layers, before):
            assert (layer.covered[0] == 41).all() and not layer.state[0].equal(state)


def test_text_agrees_with_the_reference(weights, texts_alone):
    for ids, text in zip(PROMPTS, texts_alone):
        exact = reference_logits(SPEC, weights, [*ids, *text[:-1]], REFERENCES)
        assert exact[len(ids) - 1 :].argmax(-1).tolist() == text


@pytest.mark.parametrize("chunk_tokens", [7, 64, 90])
def test_text_does_not_depend_on_the_cuts_of_a_prompt(weights, texts_alone, chunk_tokens):
    engine = hybrid_engine(weights, 256, chunk_tokens=chunk_tokens)
    assert [list(engine.generate(ids, GREEDY).token_ids) for ids in PROMPTS] == texts_alone


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_text_does_not_depend_on_other_requests(weights, texts_alone, speculate):
    engine = hybrid_engine(weights, 256, slots=3, chunk_tokens=50, speculate=speculate)
    for _ in range(2):  # again in slots that other requests have used
        requests = [engine.submit(ids, GREEDY) for ids in PROMPTS]
        assert [list(request.result().token_ids) for request in requests] == texts_alone
    engine.scheduler.assert_consistent()


def test_preempted_request_continues_its_text(weights, texts_alone):
    engine = hybrid_engine(weights, 256, slots=3, page=16, pages=16, chunk_tokens=50)
    requests = [engine.submit(ids, GREEDY) for ids in PROMPTS]
    assert [list(request.result().token_ids) for request in requests] == texts_alone
    assert engine.scheduler.preemptions > 0


def test_drafts_are_accepted_and_do_not_change_the_text():
    weights, params = hybrid_weights(REPEATING), replace(GREEDY, max_tokens=110)
    plain = hybrid_engine(weights)
    engine, accepted = hybrid_engine(weights, 256, speculate="ngram"), 0
    for ids in PROMPTS:
        result, expected = engine.generate(ids, params), plain.generate(ids, params)
        assert list(result.token_ids) == list(expected.token_ids)
        accepted += result.usage.accepted
        again = engine.generate(ids, replace(params, max_tokens=3), reuse_prefix=False)

        assert list(again.token_ids) == list(expected.token_ids[:3])
    assert accepted > 30, "too few drafts were accepted"


def test_fp16_state_gives_the_same_text_in_every_form_of_pass():
    """The state is rounded after each row and each block, so every form of pass computes the same text."""
    weights, params = hybrid_weights(REPEATING), replace(GREEDY, max_tokens=60)
    plain = hybrid_engine(weights, state_dtype="float16")
    assert plain.model.recurrent.layers[0].state.dtype == torch.float16
    assert plain.plan.snapshot_bytes < hybrid_engine(weights).plan.snapshot_bytes
    other = hybrid_engine(weights, 256, slots=3, chunk_tokens=64, speculate="ngram", state_dtype="float16")
    other.steps.costs = {}  # with the measured costs of so small a model, a GPU may never verify drafts
    requests = [other.submit(ids, params) for ids in PROMPTS]
    texts = [list(request.result().token_ids) for request in requests]
    assert texts == [list(plain.generate(ids, params).token_ids) for ids in PROMPTS]
    assert sum(request.result().usage.accepted for request in requests) > 0
    again = [list(other.generate(ids, params).token_ids) for ids in PROMPTS]  # from snapshots
    assert again == texts


def test_fp16_state_is_refused_without_recurrent_state():
    with pytest.raises(ParameterError) as caught:
        planned(PRESETS["qwen3-0.6b"], state_dtype="float16")
    assert caught.value.argument == "state_dtype" and caught.value.code == "conflict"


def test_batch_invariant_logprobs_are_equal_alone_and_among_others():
    weights = hybrid_weights(dtype=torch.bfloat16 if CUDA else torch.float32)
    params = replace(GREEDY, logprobs=5)
    alone = hybrid_engine(weights, 256, batch_invariant=True, page=64)
    expected = [alone.generate(ids, params).logprobs for ids in PROMPTS]
    engine = hybrid_engine(weights, 256, batch_invariant=True, page=64, slots=3)
    requests = [engine.submit(ids, params) for ids in PROMPTS]
    assert [request.result().logprobs for request in requests] == expected
