"""Snapshots of recurrent state: later requests resume from them and have the text of the same request alone."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from block_check import REFERENCES, reference_logits
from hybrid import GREEDY, REPEATING, SPEC, hybrid_engine, hybrid_weights, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CUDA, interpreter_configs, planned, tiny_config
from util import relative_rms

from tridecode.errors import DeviceError, ParameterError
from tridecode.layout import packed
from tridecode.plan.kv import MAX_SLOT_SNAPSHOTS
from tridecode.plan.memory import GIB
from tridecode.state.records import snapshot_bytes
from tridecode.state.snapshots import INTERVAL, last_messages, snapshot_positions
from tridecode.text.prompt import Encoded

SHORT = replace(GREEDY, max_tokens=8)
COMMON = prompt_of(1, 150)


@pytest.fixture(scope="module")
def weights():
    return hybrid_weights()


@pytest.fixture(scope="module")
def run_alone(weights):
    """Return the tokens of a request that a separate engine computes without reuse."""
    return texts_of(hybrid_engine(weights))


def texts_of(engine):
    return cache(lambda ids, max_tokens=8: engine.generate(ids, params_of(max_tokens), reuse_prefix=False).token_ids)


def params_of(max_tokens: int):
    return replace(GREEDY, max_tokens=max_tokens)


def generated(engine, run_alone, ids, max_tokens=8) -> tuple[int, list[int]]:
    """Generate, check the text, and return the reused tokens and the prompt with the answer."""
    result = engine.generate(ids, params_of(max_tokens))
    assert result.token_ids == run_alone(tuple(ids), max_tokens)
    check(engine)
    return result.usage.reused_tokens, [*ids, *result.token_ids]


def check(engine) -> None:
    """Check the counts of the engine, and that the records of snapshots contain as many positions as they should."""
    engine.scheduler.assert_consistent()
    for snapshot in engine.scheduler.slots.cache.snapshots():
        for layer in engine.model.recurrent.layers:
            assert (layer.covered[snapshot.record] == snapshot.position).all()


def computed(engine) -> int:
    """Return the number of prompt tokens that prompt passes have read so far."""
    return sum(stat.rows * stat.count for stat in engine.graph_stats() if stat.kind in ("prompt", "mixed"))


def snapshots(engine) -> list[int]:
    return sorted(snapshot.position for snapshot in engine.scheduler.slots.cache.snapshots())


BUILDS = ({}, {"slots": 2}, {"slots": 2, "page": 16}, {"chunk_tokens": 50}, {"slots": 2, "kv_offload": 0.001})


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_request_with_a_common_prefix_computes_only_the_rest(weights, run_alone, build):
    engine = hybrid_engine(weights, **build)
    assert generated(engine, run_alone, COMMON)[0] == 0
    before = computed(engine)
    assert generated(engine, run_alone, [*COMMON[:140], 5, 6, 7])[0] == 128, (
        "the request did not resume at the last multiple of 64"
    )
    load = engine.scheduler.load()
    assert computed(engine) - before == 15 and load.snapshot_hits == 1
    assert load.snapshots == len(snapshots(engine)) > 0


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("slots", [1, 2])
def test_next_turn_resumes_at_the_end_of_the_last_one(slots, speculate):
    """Accepted drafts of the last pass are computed again."""
    weights = hybrid_weights(REPEATING)
    engine, alone, accepted = hybrid_engine(weights, slots=slots, speculate=speculate), hybrid_engine(weights), 0
    engine.steps.costs = {}  # with the measured costs of so small a model, a GPU may never verify drafts
    text = prompt_of(2, 21)
    for turn in range(4):
        params = params_of(40)  # long enough to repeat itself, with the weights of a CPU and of a GPU
        result = engine.generate(text, params)
        assert result.token_ids == alone.generate(text, params, reuse_prefix=False).token_ids
        if turn:
            missing = len(text) - 3 - 1 - result.usage.reused_tokens  # the last token of an answer has no state yet
            assert missing == 0 if speculate == "off" else 0 <= missing <= 7
        accepted += result.usage.accepted
        text += [*result.token_ids, 9, 8, 7]
        check(engine)
    assert (accepted > 0) == (speculate == "ngram")


def test_snapshot_is_taken_where_prompts_diverge(weights, run_alone):
    engine = hybrid_engine(weights, slots=2)
    base = prompt_of(4, 220)
    generated(engine, run_alone, base)
    assert [generated(engine, run_alone, [*base[:140], 9, i, *base[:30]])[0] for i in range(3)] == [0, 128, 128]


def test_concurrent_requests_compute_a_common_prefix_once(weights, run_alone):
    engine = hybrid_engine(weights, slots=3, chunk_tokens=64)
    prompts = [[*COMMON, *prompt_of(i + 7, 10)] for i in range(5)]
    results = engine.generate_many(prompts, SHORT)
    assert [result.token_ids for result in results] == [run_alone(tuple(ids)) for ids in prompts]
    assert [result.usage.reused_tokens for result in results] == [0, 128, 128, 128, 128]
    check(engine)


def test_edited_conversation_resumes_before_the_edit(weights, run_alone):
    engine, text, ends = hybrid_engine(weights, slots=2), prompt_of(3, 40), []
    for turn in range(4):
        ends.append(len(text))
        text = [*generated(engine, run_alone, text)[1], 20 + turn, 21]
    edited = [*text[: ends[2]], 99, 98]
    assert generated(engine, run_alone, edited)[0] == ends[2] - 3, (
        "the request did not resume at the end of the answer before the edit"
    )


def test_least_recently_used_snapshots_are_dropped(weights, run_alone):
    engine = hybrid_engine(weights, slots=2, snapshot_memory=0.00018)
    pool = engine.scheduler.slots.snapshots
    assert pool.size == engine.plan.snapshots == 4
    prompts = [prompt_of(seed, 70) for seed in range(20, 24)]
    assert [generated(engine, run_alone, ids)[0] for ids in prompts] == [0, 0, 0, 0]
    assert pool.count == 4 and snapshots(engine) == [64, 64, 77, 77]
    assert [generated(engine, run_alone, [*prompts[i][:68], 1])[0] for i in (2, 2, 0, 2)] == [64, 64, 0, 64]


def test_engine_without_snapshots_shares_nothing(weights, run_alone):
    engine = hybrid_engine(weights, slots=2, snapshot_memory=0)
    assert not engine.plan.prefix_sharing
    assert [generated(engine, run_alone, COMMON)[0] for _ in range(2)] == [0, 0]


def test_preempted_request_resumes_at_a_snapshot(weights, run_alone):
    engine = hybrid_engine(weights, slots=2, page=16, pages=18, chunk_tokens=64)
    prompts = [prompt_of(seed, 100) for seed in (30, 31)]
    requests = [engine.submit(ids, params_of(60)) for ids in prompts]
    assert [request.result().token_ids for request in requests] == [run_alone(tuple(ids), 60) for ids in prompts]
    assert engine.scheduler.preemptions > 0 and computed(engine) < 200 + 36 * engine.scheduler.preemptions + 60
    check(engine)


@pytest.mark.parametrize("steps", range(5))
def test_cancelled_request_leaves_no_record(weights, run_alone, steps):
    engine = hybrid_engine(weights, slots=2, chunk_tokens=64)
    slots = engine.scheduler.slots
    requests = [engine.submit(prompt_of(seed, 140), GREEDY) for seed in (40, 41)]
    for _ in range(steps):
        engine.step()
    for request in requests:
        request.cancel()
    check(engine)
    generated(engine, run_alone, prompt_of(40, 140))
    slots.cache.clear()
    assert slots.snapshots.count == 0
    check(engine)


def test_batch_invariant_logits_are_equal_after_a_hit():
    """The state at a snapshot is bit-equal, because prompts are cut at multiples of the chunk."""
    weights = hybrid_weights(dtype=torch.bfloat16 if CUDA else torch.float32)
    params = replace(SHORT, max_tokens=1, logprobs=20)
    engine = hybrid_engine(weights, batch_invariant=True, chunk_tokens=128, slots=2)
    cold = engine.generate([*COMMON, 3], params, reuse_prefix=False)
    warm = engine.generate([*COMMON, 3], params)
    hit = engine.generate([*COMMON, 3], params)
    assert hit.usage.reused_tokens == 128 and cold.logprobs == warm.logprobs == hit.logprobs
    assert all(position % 64 == 0 for position in snapshots(engine))


def test_state_with_nan_is_not_reused(weights):
    weights = hybrid_weights()
    weights.embed[301] = float("nan")
    engine = hybrid_engine(weights, slots=2)
    for _ in range(2):
        result = engine.generate([*COMMON, 301, *COMMON[:60]], SHORT)
        assert result.finish_reason == "error" and result.usage.reused_tokens == 0
        check(engine)


def test_interrupt_loses_no_record(weights, run_alone, monkeypatch):
    engine = hybrid_engine(weights, slots=2, chunk_tokens=64)
    slots, calls = engine.scheduler.slots, []
    generated(engine, run_alone, COMMON)

    def interrupted(*args):
        calls.append(args)
        raise KeyboardInterrupt

    for owner, name in (
        (engine.prompts, "read"), (slots.cache, "insert"), (slots.cache, "_attach"), (slots.cache, "take_snapshots"),
        (slots.snapshots, "take"), (slots.snapshots, "use"), (slots.snapshots, "free"), (slots, "_give_record"),
    ):  # fmt: skip
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            engine.generate([*COMMON, *prompt_of(5, 30)], SHORT)
            slots.cache.clear()
            raise KeyboardInterrupt  # the function was not called
        engine.scheduler._incomplete = True
        check(engine)
        generated(engine, run_alone, COMMON)
    assert len(calls) >= 6


@pytest.mark.skipif(CUDA, reason="on a GPU, the other tests of this file run the kernels")
def test_kernels_resume_from_a_snapshot_in_the_interpreter(weights):
    engine = hybrid_engine(weights, 128, "triton", "none", interpreter_configs(SPEC, weights), page=64)
    for ids, reused in ((COMMON[:66], 0), ([*COMMON[:65], 4, 5], 64)):
        assert engine.generate(ids, params_of(1)).usage.reused_tokens == reused
        exact = reference_logits(SPEC, weights, ids, REFERENCES)
        assert relative_rms(engine.model.workspace.logits[0], exact[-1]) < 1e-5


def test_positions_of_snapshots():
    assert snapshot_positions(0, 1000, 0, [], 32) == {960}
    assert snapshot_positions(0, 1000, 700, [500, 990], 32) == {448, 640, 960}
    assert snapshot_positions(448, 1000, 700, [500, 990], 32) == {640, 960}
    assert snapshot_positions(0, 10_000, 0, [], 32) == {*range(INTERVAL, 10_000, INTERVAL), 9984}
    assert len(snapshot_positions(0, 100_000, 0, [], 32)) <= 9, "a long prompt takes more than its share of the records"
    assert snapshot_positions(0, 63, 0, [], 32) == set()


def test_chat_takes_snapshots_before_its_last_messages(weights, run_alone):
    """Token 0 begins each message. The next prompt has another note at the end of the last message of the user."""
    engine = hybrid_engine(weights, slots=2)
    messages = [[0, *range(1 + i, 1 + i + count)] for i, count in enumerate((70, 80, 60, 6))]
    prompt = [token for message in messages for token in message]
    engine.generate(Encoded(packed(prompt), chat=True), SHORT)
    assert snapshots(engine) == [128, 192, len(prompt) + 7]
    noted = [*prompt[:185], 99, 98]
    assert generated(engine, run_alone, noted)[0] == 128


def test_last_messages_begin_with_the_first_token():
    assert last_messages([7, 1, 2, 7, 3, 7, 4, 7, 5]) == [5, 7]
    assert last_messages([7, 1, 2, 7, 3]) == [3]
    assert last_messages([7, 1, 2]) == last_messages([7]) == last_messages([]) == []


REQUEST = st.tuples(
    st.integers(0, 2), st.sampled_from([1, 40, 64, 70, 130, 150]), st.sampled_from([0, 0, 60, 66, 128]),
    st.sampled_from([1, 9, 40]), st.booleans(), st.booleans(),
)  # fmt: skip
ACTION = st.one_of(
    *[st.tuples(st.just("submit"), REQUEST)] * 3,
    *[st.tuples(st.just("continue"), st.integers(0, 9))] * 3,
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
)


@pytest.fixture(scope="module")
def small():
    """Engines without and with drafts, with pages for little more than one request and few snapshots."""
    options = dict(slots=3, page=16, pages=22, chunk_tokens=100, snapshot_memory=0.0003)
    weights = {"off": hybrid_weights(), "ngram": hybrid_weights(REPEATING)}
    return [(hybrid_engine(w, speculate=how, **options), texts_of(hybrid_engine(w))) for how, w in weights.items()]


@pytest.mark.parametrize("drafts", [False, True])
@settings(max_examples=25, deadline=None)
@given(actions=st.lists(ACTION, min_size=4, max_size=20), lookahead=st.integers(0, 1))
def test_any_schedule_gives_the_texts_of_single_requests(small, drafts, actions, lookahead):
    """Without a GPU, a pass is kept in flight as on a GPU: the state is then one pass ahead of the known tokens."""
    (engine, run_alone), requests = small[drafts], []
    scheduler = engine.scheduler
    scheduler.lookahead = 1 if CUDA else lookahead
    for action, value in actions:
        if action == "submit":
            base, length, edit, max_tokens, reuse, stops = value
            ids = prompt_of(base, length)
            if edit < length:
                ids[edit:] = [9, *ids[edit + 1 :]]
            text, params = run_alone(tuple(ids), max_tokens), params_of(max_tokens)
            if stops:
                params = replace(params, stop_token_ids=(text[len(text) // 2],))
                text = text[: text.index(params.stop_token_ids[0]) + 1]
            requests.append((engine.submit(ids, params, reuse_prefix=reuse), text))
        elif action == "step":
            for _ in range(value):
                scheduler.step()
                check(engine)
        elif requests and action == "continue":  # the next turn of a chat
            request = requests[value % len(requests)][0]
            ids = [*request.tokens, value] if len(request.tokens) < 200 else prompt_of(0, 9)
            requests.append((engine.submit(ids, params_of(9)), run_alone(tuple(ids), 9)))
        elif requests:
            request = requests[value % len(requests)][0]
            request.cancel() if action == "cancel" else request.drop()
        check(engine)
    while engine.step():
        pass
    for request, expected in requests:
        result = request.result()
        assert result.token_ids == expected[: len(result.token_ids)]
        assert result.finish_reason == "cancelled" or len(result.token_ids) == len(expected)
    check(engine)
    slots = scheduler.slots
    slots.cache.clear()
    assert slots.snapshots.count == 0 and slots.pages.free == 22
    check(engine)


def test_memory_of_snapshots_is_planned():
    plan = planned(SPEC, "cpu", slots=2)
    size = snapshot_bytes(SPEC, plan.dtype)
    assert plan.snapshots == 2 * MAX_SLOT_SNAPSHOTS and plan.pools["snapshots"] == plan.snapshots * size
    without = planned(SPEC, "cpu", slots=2, snapshot_memory=0)
    assert "snapshots" not in without.pools and not without.prefix_sharing
    assert plan.memory.fixed - without.memory.fixed == plan.pools["snapshots"]
    assert planned(SPEC, "cpu", snapshot_memory=5.5 * size / GIB).snapshots == 5
    assert planned(SPEC, "cpu", prefix_sharing=False).snapshots == 0


def test_memory_for_snapshots_that_does_not_fit_is_refused():
    message = r"^not enough memory on cpu: snapshot_memory requests 1,000,000\.00 GiB; at most [\d,.]+ GiB fit$"
    with pytest.raises(DeviceError, match=message):
        planned(SPEC, "cpu", snapshot_memory=1e6)
    for spec, options, code in (
        (SPEC, {"snapshot_memory": 1e-9}, "range"),
        (tiny_config(), {"snapshot_memory": 1}, "conflict"),
        (SPEC, {"snapshot_memory": 1, "prefix_sharing": False}, "conflict"),
    ):
        with pytest.raises(ParameterError) as refused:
            planned(spec, "cpu", **options)
        assert (refused.value.argument, refused.value.code) == ("snapshot_memory", code)
