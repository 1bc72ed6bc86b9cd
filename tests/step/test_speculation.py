"""Speculative decoding: texts equal the texts without drafts, and repetitive texts have several tokens per pass.

The tests run in fp32, in which the rows of a pass do not change a text, and on a GPU also in bf16 in batch-invariant
mode. A model with sharp logits repeats itself, also when it samples.
"""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import BOTH, CUDA, DEVICE, begin, interpreter_configs, no_allocations, tiny_config, tiny_engine, use_h100
from servers import Running

from tridecode import Engine, SamplingParams, layout
from tridecode.checkpoint.load import random_weights
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.errors import ParameterError
from tridecode.kernels.attention.attention_queries import ATTENTION_QUERIES
from tridecode.layout import GENERATION, NGRAM
from tridecode.options import EngineOptions
from tridecode.plan.graphs import MIN_WEIGHT_BYTES, plan_drafts, plan_graphs
from tridecode.state.acceptance import FIRST, NEXT, Acceptance
from tridecode.step.dispatch import best_queries, max_queries, typical_costs
from tridecode.step.model import make_model, verify_rows

POISON, CAPACITY, SHARP = 301, 128, 12.0
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.4, top_k=40, top_p=0.95, seed=11),
    "penalties": SamplingParams(
        temperature=0.3, repetition_penalty=1.02, presence_penalty=0.1, frequency_penalty=0.02, seed=5,
        logit_bias={7: 2},
    ),
    "logprobs": SamplingParams(temperature=0.4, min_p=0.01, seed=3, logprobs=3),
}  # fmt: skip
PROMPTS = [
    [5, 17, 42, 8] * 5,
    [9, 9, 9, 9],
    [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 50, 60, 1, 2],
    [(97 + 13 * i) % 300 for i in range(40)],
]


def engine_of(slots=1, in_flight=1, speculate="ngram", capacity=CAPACITY, dtype=torch.float32, family="qwen3", **build):
    """Return an engine whose text repeats itself."""
    build |= {"slots": slots, "speculate": speculate}
    model = dict(tie_word_embeddings=False, num_layers=1) | BOTH[family]
    engine = tiny_engine(dtype=dtype, capacity=capacity, build=build, **model)
    # The CPU makes the random weights, so that they are equal on all machines.
    weights = engine.model.weights.tensors()
    for name, tensor in random_weights(engine.config, torch.device("cpu"), dtype, seed=0).tensors().items():
        weights[name].copy_(tensor)
    engine.model.weights.final_norm.mul_(SHARP)
    engine.model.weights.embed[POISON] = float("nan")
    engine.scheduler.lookahead = in_flight
    engine.threads = 1
    engine.scheduler.answered = True
    return engine


@pytest.fixture(scope="module")
def plain_result(request):
    """Return a function that generates a text without speculation, as the only request of an engine."""
    engine, results = engine_of(speculate="off", family=getattr(request, "param", "qwen3")), {}

    def generate(prompt, params):
        key = tuple(prompt), repr(params)
        if key not in results:
            results[key] = engine.generate(prompt, params, reuse_prefix=False)
        return results[key]

    return generate


@pytest.fixture(scope="module", params=[1] if CUDA else [0, 1], ids=lambda ahead: f"{ahead}_ahead")
def engine(request):
    return engine_of(in_flight=request.param)


@pytest.fixture(scope="module")
def small():
    """Return an engine with three slots, and pages for little more than one request."""
    return engine_of(slots=3, page=16, pages=9, chunk_tokens=24)


def same(result, expected) -> None:
    """Check that two results are equal, with log-probabilities up to rounding."""
    actual = result.token_ids, result.finish_reason, result.error, result.text
    assert actual == (expected.token_ids, expected.finish_reason, expected.error, expected.text)
    for ours, theirs in zip(result.logprobs or (), expected.logprobs or (), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("kind", PARAMS)
def test_text_equals_text_without_drafts(engine, plain_result, kind):
    params, accepted = replace(PARAMS[kind], max_tokens=80), 0
    for prompt in PROMPTS:
        result = engine.generate(prompt, params)
        same(result, plain_result(prompt, params))
        usage = result.usage
        assert 0 <= usage.accepted <= usage.drafted and usage.completion_tokens == len(result.token_ids)
        sampled = len(result.token_ids)
        assert usage.tokens_per_pass == pytest.approx(sampled / (sampled - usage.accepted))
        accepted += usage.accepted
    assert accepted > 15, "fewer drafts were accepted than expected"


@pytest.mark.parametrize("family, plain_result", [*zip(BOTH, BOTH)], indirect=["plain_result"], ids=BOTH)
def test_text_does_not_depend_on_other_requests(family, plain_result):
    engine = engine_of(slots=4, page=16, family=family)
    params = [replace(each, max_tokens=60) for each in PARAMS.values()]
    requests = [engine.submit(prompt, each) for each in params for prompt in PROMPTS]
    expected = [plain_result(prompt, each) for each in params for prompt in PROMPTS]
    for request, result in zip(requests, expected):
        same(request.result(), result)
    engine.scheduler.assert_consistent()
    assert any(" x" in stat.kind and stat.rows > 1 for stat in engine.graph_stats())


def test_generation_can_end_at_any_draft(engine, plain_result):
    whole = plain_result(PROMPTS[0], replace(PARAMS["greedy"], max_tokens=40)).token_ids
    for most in range(1, 30):
        params = replace(PARAMS["logprobs" if most % 2 else "greedy"], max_tokens=most)
        same(engine.generate(PROMPTS[0], params), plain_result(PROMPTS[0], params))
    for token in set(whole):
        params = replace(PARAMS["greedy"], max_tokens=40, stop_token_ids=(token,))
        result = engine.generate(PROMPTS[0], params)
        assert result.finish_reason == "stop" and result.token_ids == whole[: whole.index(token) + 1]


@pytest.mark.parametrize("left", range(6))
def test_generation_ends_at_the_capacity(engine, plain_result, left):
    prompt = (PROMPTS[0] * 8)[: CAPACITY - 20 - left]
    same(engine.generate(prompt, PARAMS["greedy"]), plain_result(prompt, PARAMS["greedy"]))


def test_nan_logits_end_the_request(engine, plain_result):
    prompt = [*PROMPTS[0], POISON, *PROMPTS[0]]
    params = replace(PARAMS["greedy"], max_tokens=20)
    result = engine.generate(prompt, params)
    assert result.finish_reason == "error" and result.error == plain_result(prompt, params).error
    same(engine.generate(PROMPTS[0], params), plain_result(PROMPTS[0], params))


def test_scores_equal_scores_without_drafts(engine):
    ids, without = PROMPTS[2] * 3, engine_of(speculate="off")
    assert torch.allclose(engine.score(ids), without.score(ids), atol=1e-4)
    same(*(each.submit_score(ids, 2).result() for each in (engine, without)))


ACTION = st.one_of(
    *[st.tuples(st.just("submit"), st.tuples(
        st.integers(0, 3), st.sampled_from(sorted(PARAMS)), st.sampled_from([1, 7, 30, 60]), st.booleans(),
    ))] * 3,
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
)  # fmt: skip


@settings(max_examples=30 if CUDA else 60, deadline=None)  # A GPU may be slow because other programs use it.
@given(actions=st.lists(ACTION, min_size=4, max_size=20), lookahead=st.integers(0, 1))
def test_any_schedule_gives_the_same_tokens(small, plain_result, actions, lookahead):
    """The engine has few small pages, so that requests wait for pages and are preempted in the middle of drafts."""
    scheduler, requests, cancelled = small.scheduler, [], set()
    scheduler.lookahead = 1 if CUDA else lookahead
    for action, value in actions:
        if action == "submit":
            which, kind, most, reuse = value
            params = replace(PARAMS[kind], max_tokens=most)
            request = small.submit(PROMPTS[which], params, reuse_prefix=reuse)
            requests.append((request, plain_result(PROMPTS[which], params)))
        elif action == "cancel":
            if value < len(requests) and requests[value][0].cancel():
                cancelled.add(value)
        else:
            for _ in range(value):
                scheduler.step()
            scheduler.assert_consistent()
    for number, (request, expected) in enumerate(requests):
        result = request.result()
        if number in cancelled:
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            same(result, expected)
    scheduler.assert_consistent()


def test_preempted_request_continues(small, plain_result):
    before = small.scheduler.preemptions
    params = [replace(PARAMS[kind], max_tokens=90) for kind in ("greedy", "sampled")]
    requests = [small.submit(PROMPTS[0], each, reuse_prefix=False) for each in params]
    for request, each in zip(requests, params):
        same(request.result(), plain_result(PROMPTS[0], each))
    assert small.scheduler.preemptions > before


def test_batch_invariant_mode_computes_the_same_bits():
    dtype = torch.bfloat16 if CUDA else torch.float32
    shape = dict(hidden_size=1024, head_dim=128, intermediate_size=2048) if CUDA else {}
    results = []
    for speculate in ("off", "ngram"):
        build = {"slots": 2, "speculate": speculate, "batch_invariant": True, "chunk_tokens": 64}
        engine = tiny_engine(dtype=dtype, capacity=256, tie_word_embeddings=False, build=build, **shape)
        engine.model.weights.final_norm.mul_(SHARP)
        params = [replace(each, max_tokens=60) for each in PARAMS.values()]
        results.append([])
        for _ in range(2):
            requests = [engine.submit(prompt, each) for each in params for prompt in PROMPTS[:3]]
            results[-1] += [request.result() for request in requests]
    off, ngram = results
    assert [r.token_ids for r in ngram] == [r.token_ids for r in off]
    assert [r.logprobs for r in ngram] == [r.logprobs for r in off], (
        "the log-probabilities with and without drafts differ"
    )
    assert sum(r.usage.accepted for r in ngram) > 40 and not any(r.usage.drafted for r in off)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs exist on a GPU only")
def test_verifying_passes_are_captured_at_load():
    engine = tiny_engine("triton", "full", capacity=256, build={"speculate": "ngram", "slots": 2})
    params, steps = replace(PARAMS["greedy"], max_tokens=60), engine.steps
    captured = steps.captures
    assert captured == 3 * (2 + 2) + 3 * (3 + 3), "a wrong number of graphs was captured"
    for _ in range(3):
        requests = [engine.submit(prompt, each) for each in (params, PARAMS["sampled"]) for prompt in PROMPTS[:3]]
        assert all(len(request.result().token_ids) > 1 for request in requests)
    assert steps.captures == captured and any(" x8" in stat.kind for stat in engine.graph_stats())
    eager = tiny_engine("triton", "none", capacity=256, build={"speculate": "ngram", "slots": 2})
    steps.check_addresses = True
    for kind in ("greedy", "logprobs"):  # The test replays the passes in one engine and launches them in the other.
        for each in (engine, eager):
            rewind(each, 40, replace(PARAMS[kind], seed=3), rows=2, known=30)
            for tokens in (8, 4, 2, 8, 1):
                each.steps.replay(kind, 2, tokens=tokens)
            each.synchronize()
        replayed, launched = (each.model.workspace.meta.clone() for each in (engine, eager))
        # The engines ran different numbers of requests, so their generations differ.
        replayed[:, GENERATION] = launched[:, GENERATION] = 0
        assert torch.equal(replayed, launched), kind


@pytest.mark.skipif(not CUDA, reason="the test measures GPU memory")
def test_verifying_passes_allocate_nothing():
    engine = tiny_engine("triton", "full", capacity=512, build={"speculate": "ngram"})
    rewind(engine, 40, replace(PARAMS["greedy"], seed=1))
    for tokens in (8, 4, 2, 1):
        enqueue(engine, PARAMS["greedy"], tokens=tokens)
    engine.synchronize()
    with no_allocations():
        for tokens in (8, 4, 2, 1) * 20:
            enqueue(engine, PARAMS["greedy"], tokens=tokens)
        engine.synchronize()


# ---- The bundled model: text, stop strings, grammars


@pytest.fixture(scope="module")
def bundled():
    engines = [Engine.load(speculate=speculate, dtype="float32", slots=2) for speculate in ("off", "ngram")]
    engines[1].scheduler.answered = True
    engines[1].steps.costs = {}  # Measured costs of passes on a busy GPU may prefer fewer drafts.
    return engines


@pytest.mark.parametrize("stop", [(), (" the",), ("e", "zz"), ("ing to",)], ids=repr)
def test_stop_strings_cut_the_same_text(bundled, stop):
    params = SamplingParams(temperature=0, max_tokens=60, stop=stop)
    prompt = [{"role": "user", "content": "Say it again, say it again, say it again, say it"}]
    off, ngram = (engine.generate(prompt, params) for engine in bundled)
    same(ngram, off)
    assert ngram.usage.accepted <= ngram.usage.drafted, "more tokens count as accepted than were drafted"


def test_server_counts_drafts(bundled):
    """A bias makes the model repeat one token, so all drafts are right."""
    body = {"model": "bundled", "prompt": "Again", "temperature": 0, "max_tokens": 60, "logit_bias": {"300": 100}}
    names = [f"spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    with Running(bundled[1]) as running:
        before = [running.metric(name) for name in names]
        assert running.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 60
        drafted, accepted = (running.metric(name) - old for name, old in zip(names, before))
    assert drafted >= accepted > 40


def test_chat_reports_the_tokens_of_a_pass(piped):
    arguments = ("--raw", "--temperature", 0, "--max-tokens", 60, "--logit-bias", "300=100", "--max-seq-len", 256)
    assert re.search(r"60 tokens .* [4-7]\.\d tok/pass", piped("Again\n", *arguments, "--speculate", "ngram")[2])
    assert "tok/pass" not in piped("Again\n", *arguments)[2]


def test_request_with_a_grammar_runs_with_a_repetitive_one(bundled):
    structured = SamplingParams(temperature=0, max_tokens=30, regex="(ab|cd)+")
    free = SamplingParams(temperature=0, max_tokens=60)
    results = []
    for engine in bundled:
        requests = [engine.submit("one two one two one two", each) for each in (free, structured)]
        results.append([request.result() for request in requests])
    for off, ngram in zip(*results):
        same(ngram, off)


# (whether a GPU is used, options, conflicting options, the choice of auto, the error of ngram)
RESOLVED = [
    (True, {}, (), "ngram", None),
    (True, dict(slots=64), (), "ngram", None),
    (True, dict(slots=16, graph_sizes=(8, 16)), (), "ngram", None),
    (True, dict(graph="piecewise"), (), "ngram", None),
    (True, dict(graph="full_decode_only"), (), "ngram", None),
    (True, dict(batch_invariant=True), (), "ngram", None),
    (True, dict(graph="none"), (), "off", None),
    (True, dict(attention="torch"), (), "off", None),
    (True, dict(slots=32, graph_sizes=(32,)), (), "off", "at most 16 requests, and the smallest of graph_sizes is 32"),
    (True, {}, ("kv_dtype",), "off", 'does not work beside kv_dtype="fp8"'),
    (True, {}, ("kv_offload",), "off", "does not work beside kv_offload"),
    (True, {}, ("kv_offload", "weights_offload"), "off", "does not work beside kv_offload or weights_offload"),
    (False, {}, (), "off", None),
    (False, {}, ("weights_offload",), "off", "does not work beside weights_offload"),
]  # fmt: skip


CONFLICTS = {"kv_dtype": "fp8", "kv_offload": 0.1, "weights_offload": 0.1}


@pytest.mark.parametrize("gpu, fields, conflicts, auto, error", RESOLVED, ids=str)
def test_speculation_is_resolved_from_the_options(monkeypatch, gpu, fields, conflicts, auto, error):
    use_h100(monkeypatch)
    device = torch.device("cuda" if gpu else "cpu")

    def drafts(**more):
        options = EngineOptions(**fields | {name: CONFLICTS[name] for name in conflicts} | more)
        graphs = plan_graphs(options, "triton" if gpu else "torch", tiny_config(), torch.bfloat16, device)
        return plan_drafts(options, graphs, MIN_WEIGHT_BYTES)

    ngram, why = drafts()
    assert ngram == (NGRAM if auto == "ngram" else None) and (why is None) == (auto == "ngram")
    assert drafts(speculate="off") == (None, None)
    if error is None:
        assert drafts(speculate="ngram") == (NGRAM, None) and drafts(speculate_ngram=(4, 2)) == ((4, 2), None)
    else:
        with pytest.raises(ParameterError, match=f'^speculate="ngram" .*{error}; use speculate="off"$') as refused:
            drafts(speculate="ngram")
        assert (refused.value.argument, refused.value.code) == ("speculate", "conflict")
        with pytest.raises(ParameterError, match=f"^speculate_ngram .*{error}; leave it out$") as refused:
            drafts(speculate_ngram=(4, 2))
        assert (refused.value.argument, refused.value.code) == ("speculate_ngram", "conflict")
        assert error in why or not gpu


def test_auto_drafts_only_for_models_that_are_large_enough(monkeypatch):
    use_h100(monkeypatch)
    graphs = plan_graphs(EngineOptions(), "triton", tiny_config(), torch.bfloat16, torch.device("cuda"))
    assert plan_drafts(EngineOptions(), graphs, MIN_WEIGHT_BYTES) == (NGRAM, None)
    ngram, why = plan_drafts(EngineOptions(), graphs, MIN_WEIGHT_BYTES - 1)
    assert ngram is None and why.startswith("pays for models of 128 MiB or more")
    assert plan_drafts(EngineOptions(speculate="ngram"), graphs, MIN_WEIGHT_BYTES - 1) == (NGRAM, None)


def test_experts_that_a_row_does_not_use_do_not_count():
    assert tiny_config().active_share == 1
    spec = tiny_config(num_layers=1, experts=dict(experts=8, top_k=2, intermediate=48))
    idle, others = 6 * 3 * 96 * 48, 96 * 512 + 256 * 96 + 331 * 96
    assert spec.active_share == pytest.approx(1 - idle / (others + idle * 8 / 6))


def test_an_engine_follows_its_plan(monkeypatch):
    """The bundled model is too small for auto. The memory of drafts is planned, also for the choice of auto."""
    options = dict(device=str(DEVICE), max_seq_len=64)
    with Engine.load(**options) as engine:
        assert engine.plan.ngram is None and engine.model.verify is None and engine.plan.why_no_drafts
        fixed = engine.plan.memory.fixed
    with Engine.load(**options, speculate_ngram=(4, 2)) as engine:
        assert engine.plan.ngram == engine.model.ngram == (4, 2) and engine.plan.memory.fixed > fixed
    monkeypatch.setattr("tridecode.plan.resolve.plan_drafts", lambda *args: (NGRAM, None))
    with Engine.load(**options) as engine:
        assert engine.model.verify is not None and engine.plan.memory.fixed > fixed


@pytest.mark.parametrize("ngram", [(1, 1), (16, 16)], ids=str)
def test_drafts_need_a_match_of_the_minimum_length(plain_result, ngram):
    params = replace(PARAMS["greedy"], max_tokens=14)
    engine = engine_of(speculate_ngram=ngram)
    result = engine.generate(PROMPTS[1], params)
    same(result, plain_result(PROMPTS[1], params))
    assert (result.usage.drafted > 0) == (ngram == (1, 1)), (
        "the number of drafts does not fit the minimum length of a match"
    )


# ---- Passes


def test_quantized_weights_verify_drafts():
    """On a GPU in batch-invariant mode, because in bf16 the number of rows may change a text."""
    options = dict(device=str(DEVICE), max_seq_len=256, quantize="int8", batch_invariant=CUDA)
    with Engine.load(speculate="off", **options) as plain, Engine.load(speculate="ngram", **options) as engine:
        params = replace(PARAMS["greedy"], max_tokens=60, ignore_eos=True)
        engine.scheduler.answered = True  # Otherwise the engine captures verifying passes only after its first answer.
        result = engine.generate(PROMPTS[0] * 3, params)
        assert result.token_ids == plain.generate(PROMPTS[0] * 3, params).token_ids
        assert result.usage.drafted > 0


def right(*drafts: int) -> list[Acceptance]:
    """Return the state of requests that could use these numbers of drafts and whose drafts were always right."""
    sure = [1.0, 1.0, 1.0]
    return [Acceptance(each, [*sure], [*sure]) for each in drafts]


def best(requests: int, drafts: list[Acceptance], **allowed) -> int:
    """Return the best number of rows of each request."""
    return best_queries(typical_costs(requests), drafts, **allowed)


def test_number_of_rows_depends_on_the_requests():
    assert [max_queries(requests) for requests in (1, 2, 3, 4, 5, 8, 9, 17)] == [8, 8, 8, 8, 4, 4, 2, 1]
    assert [best(1, right(drafts)) for drafts in (0, 1, 2, 3, 4, 7)] == [1, 2, 4, 4, 8, 8]
    assert best(4, right(7, 7, 7, 7)) == 8 and best(64, right(*[7] * 64)) == 1
    assert best(2, right(0, 7)) == 8 and best(1, right(7), allowed=[1, 2]) == 2
    assert [verify_rows(requests) for requests in (1, 2, 4, 64)] == [8, 16, 32, 32]


def test_one_repetitive_request_does_not_slow_seven_others():
    assert best(8, [Acceptance(1), *right(*[0] * 7)]) == 1 and best(8, right(*[1] * 8)) == 2
    assert best(8, right(*[1] * 4, *[0] * 4)) == 2 and best(4, right(3, 0, 0, 0)) == 4


def test_number_of_rows_depends_on_measured_costs():
    cheap, dear = {1: 2e-3, 2: 2.1e-3, 8: 2.2e-3}, {1: 2e-3, 2: 3e-3, 8: 13e-3}
    assert best_queries(cheap, right(7)) == 8 and best_queries(dear, right(7)) == 2
    assert best_queries({1: 2e-3, 2: 4e-3}, right(7)) == 1 == best_queries({1: 2e-3}, right(7))
    assert best_queries(cheap, right(7), allowed=[2]) == 2 and best_queries(cheap, right(3), allowed=[1, 4]) == 1


@pytest.mark.parametrize("count", [1, 3, 7])
def test_drafts_are_verified_again_after_they_become_right(count):
    drafts = Acceptance(count)
    for _ in range(40):
        drafts.learn(count, 1, 0, count)
    assert best(1, [drafts]) == 1
    for _ in range(40):  # These passes had one row, and the device's own draft was right.
        drafts.learn(count, 0, 0, 7)
        drafts.requested_drafts = count
    assert best(1, [drafts]) > 1


def test_estimates_follow_recent_results():
    drafts = Acceptance()
    drafts.learn(0, 0, 0, 1)
    assert drafts == Acceptance(1), "a pass without drafts changed an estimate"
    drafts.learn(1, 3, 2, 3)  # The drafts were right, right and wrong.
    assert drafts.first == pytest.approx([0.9 * FIRST[0] + 0.1, *FIRST[1:]])
    assert drafts.following == pytest.approx([0.9 * (0.9 * NEXT + 0.1), NEXT, NEXT])
    drafts.learn(3, 0, 0, 1)  # The pass had one row. The device requests fewer drafts, because its draft was wrong.
    assert drafts.first[1] == pytest.approx(0.9 * FIRST[1]) and drafts.following[1:] == [NEXT, NEXT]
    assert drafts.requested_drafts == 1 and drafts.expected(8) == 1 + drafts.first[0] and drafts.expected(1) == 1


ROWS_OF_A_TILE = {
    # name: (dtype, batch-invariant mode, group, head_dim, whether one tile has all eight rows of a request)
    "fits": (torch.bfloat16, False, 4, 64, True),
    "large heads fit": (torch.bfloat16, False, 1, 128, True),
    "too many heads": (torch.bfloat16, False, 5, 64, False),
    "head size without a tile": (torch.bfloat16, False, 1, 80, False),
    "fp32": (torch.float32, False, 1, 64, False),
    "batch-invariant": (torch.bfloat16, True, 1, 64, False),
}


@pytest.mark.parametrize("case", ROWS_OF_A_TILE)
def test_attention_has_all_rows_of_a_request_in_one_tile(case):
    dtype, invariant, group, head_dim, together = ROWS_OF_A_TILE[case]
    spec = tiny_config(num_layers=1, num_heads=group, num_kv_heads=1, head_dim=head_dim)
    weights = random_weights(spec, torch.device("cpu"), dtype, seed=0)
    options = {"prompt_rows": 8, "batch_invariant": invariant, "speculate": True}
    model = make_model(spec, weights, 64, configs=interpreter_configs(spec, weights), **options)
    plan = model.for_queries(1, 8).attention(spec.layers[0].mixer)
    assert (plan.op is ATTENTION_QUERIES) == together and plan.writes_first != together


@pytest.mark.parametrize("kind, params", [("greedy", PARAMS["greedy"]), ("sample", PARAMS["penalties"])])
def test_kernels_match_references(kind, params):
    """Compare fp32 states after the same passes, with known tokens and with right and wrong drafts."""
    engines = [
        tiny_engine(backend, "none", torch.float32, capacity=64, num_layers=1, build={"speculate": "ngram"})
        for backend in ("triton", "torch")
    ]
    ids = [5, 17, 42, 8, 5, 17, 42, 8, 5, 17]
    for engine in engines:
        begin(engine, ids, 0, replace(params, seed=3))
        engine.model.workspace.meta[0, layout.DRAFT_LIMIT] = 3
    for tokens in (8, 1, 2, 8):
        for engine in engines:
            engine.steps.replay(kind, 1, tokens=tokens)
            engine.synchronize()
        kernels, refs = (engine.model.workspace for engine in engines)
        assert torch.equal(kernels.meta, refs.meta) and torch.equal(kernels.tokens, refs.tokens)
        assert torch.equal(kernels.out, refs.out) and torch.equal(kernels.counts, refs.counts)
        position = int(refs.meta[0, layout.POSITION])
        for a, b in zip(*(engine.model.kv.gather(0, position) for engine in engines)):
            assert torch.allclose(a, b, atol=1e-4)
    assert position > len(ids)
