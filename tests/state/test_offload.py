"""K/V pages in host memory: equal tokens, moving pages, memory plans and benchmarks."""

import gc
import random
from dataclasses import replace

import pytest
import torch
from models import BOTH, CUDA, DEVICE, no_allocations, planned, slowed, tiny_engine, use_h100
from util import assert_close, covering

from tridecode import Engine, SamplingParams
from tridecode import tensors as pinned
from tridecode.cli.bench import measure
from tridecode.cli.bench import offload as bench
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.cli.bench.rows import tables
from tridecode.cli.parser import make_parser
from tridecode.cli.terminal import Output
from tridecode.errors import DeviceError, ParameterError
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan import memory
from tridecode.plan.kv import plan_host_layers
from tridecode.plan.memory import plan_memory
from tridecode.state.kv import make_kv_cache
from tridecode.state.offload import Offload
from tridecode.state.prefix import PrefixCache
from tridecode.state.rewind import rewind_slots
from tridecode.step import decode
from tridecode.step.dispatch import BatchDescriptor, Dispatcher
from tridecode.step.graphs import DecodePasses, launcher
from tridecode.step.prompt import read
from tridecode.step.run import Recorder, launch, run_reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PAGE = 64 if CUDA else 16
LONG = [(11 * i + i // 7) % 300 for i in range(9 * PAGE + 5)]


def engine_of(
    pages=None, ring=0, host=40, slots=1, buffers=2, layers=3, context=16, on_host=0, family="qwen3", **build
):
    """Build an engine whose slots have `context` pages.

    Args:
        pages: pages on the device, or None to build without offload.
        host: pages in host memory.
    """
    build |= {"slots": slots, "page": PAGE, "pages": pages}
    if pages is not None:
        build["offload"] = Offload(host, ring, buffers)
    fields = dict(capacity=context * PAGE, max_position=16 * PAGE, num_layers=layers, tie_word_embeddings=False)
    fields |= BOTH[family]
    dtype = build.pop("dtype", torch.float32)
    engine = tiny_engine(dtype=dtype, build=build, on_host=on_host, **fields)
    # A second thread would cost more time than it saves, because the operations of a tiny model are short.
    engine.threads = 1
    return engine


@pytest.fixture(scope="module")
def plain_engine(request):
    """Engine without offload, which runs one request at a time."""
    return engine_of(family=getattr(request, "param", "qwen3"))


@pytest.fixture(scope="module")
def run_alone(plain_engine):
    """Generate with the plain engine."""
    return lambda ids, params=GREEDY: plain_engine.generate(ids, params, reuse_prefix=False).token_ids


def assert_sampled_alike(tokens, expected, prompt, engine):
    """Check that tokens are equal.

    On a GPU, passes of different sizes round differently. The first difference may be at a border: the sampler picks
    the first token whose cumulative probability exceeds a random number.
    """
    different = next((i for i, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), None)
    if not CUDA or different is None:
        assert tokens == expected
        return
    first, last = sorted((tokens[different], expected[different]))
    probabilities = engine.score([*prompt, *expected[:different]])[-1].softmax(-1)
    assert probabilities[first + 1 : last].sum() < 1e-4


def on_host(engine) -> int:
    """Return the number of pages of active requests that are in host memory."""
    return len(engine.scheduler.slots._ring_place)


@pytest.mark.parametrize("family, plain_engine", [*zip(BOTH, BOTH)], indirect=["plain_engine"], ids=BOTH)
@covering(1, pages=[4, 5, 8, 11, 16], buffers=[2, 3])
def test_tokens_do_not_depend_on_the_location_of_pages(pages, buffers, family, run_alone):
    engine = engine_of(pages, ring=16, buffers=buffers, family=family)
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=2 * PAGE, ignore_eos=True)):
        request = engine.submit(LONG, params, reuse_prefix=False)
        most = 0
        for _ in request:
            most = max(most, on_host(engine))
            engine.scheduler.assert_consistent()
        assert request.result().token_ids == run_alone(LONG, params)
        assert most >= min(10, max(10 - pages, 0)), "fewer pages were on the host than the device lacked"
        assert on_host(engine) == 0


# ---- several requests

SHORT = SamplingParams(temperature=0, max_tokens=PAGE + 3, ignore_eos=True)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[(7 * i + 31 * number + i // 5) % 300 for i in range(length)] for number, length in enumerate(lengths)]


def drive(engine, requests) -> None:
    """Step until all requests have ended, and check the slots after each step."""
    for _ in range(40 * PAGE):
        if all(request.finish_reason for request in requests):
            return
        engine.step()
        engine.scheduler.assert_consistent()
    raise AssertionError("the requests did not end")


def test_slots_share_the_device_and_the_ring(run_alone):
    engine = engine_of(10, ring=20, host=30, slots=3, chunk_tokens=2 * PAGE)
    prompts = prompts_of(7 * PAGE + 3, 2 * PAGE, 9 * PAGE - 1, 5 * PAGE)
    requests = [engine.submit(prompt, SHORT) for prompt in prompts]
    drive(engine, requests)
    assert [request.result().token_ids for request in requests] == [run_alone(prompt, SHORT) for prompt in prompts]
    assert engine.scheduler.preemptions == 0


def test_prefix_on_the_host_is_shared_in_the_ring(run_alone):
    engine = engine_of(10, ring=8, slots=3, chunk_tokens=2 * PAGE)
    common = LONG[: 5 * PAGE]
    prompts = [[*common, 200 + i, 7, 9] for i in range(3)]
    requests = [engine.submit(prompt, SHORT) for prompt in [[*common, *LONG[: 4 * PAGE]], *prompts]]
    most = 0
    while not all(request.finish_reason for request in requests):
        engine.step()
        engine.scheduler.assert_consistent()
        held = [slot.pages for slot in engine.scheduler.slots]
        ring = engine.scheduler.slots._ring_place
        most = max(most, max((sum(page in pages for pages in held) for page in ring), default=0))
    assert most > 1, "no page in the ring was shared"
    for request, prompt in zip(requests[1:], prompts):
        assert request.result().token_ids == run_alone(prompt, SHORT)
        assert request.result().usage.reused_tokens == len(common)


def test_requests_beyond_device_and_ring_are_preempted(run_alone):
    engine = engine_of(10, ring=4, slots=3, context=10)
    prompts = prompts_of(6 * PAGE, 4 * PAGE - 2, 4 * PAGE - 2)
    long = SamplingParams(temperature=0, max_tokens=3 * PAGE, ignore_eos=True)
    requests = [engine.submit(prompt, long) for prompt in prompts]
    drive(engine, requests)
    assert [request.result().token_ids for request in requests] == [run_alone(prompt, long) for prompt in prompts]
    assert engine.scheduler.preemptions > 0


def test_load_counts_pages_of_device_and_ring():
    engine = engine_of(8, ring=6, host=40, context=8)
    load = engine.scheduler.load()
    assert (load.pages, load.free_pages) == (14, 14)
    engine.generate(LONG[: 5 * PAGE], GREEDY)
    assert engine.scheduler.load().free_pages == 14, "unused pages do not count as free"
    request = engine.submit(LONG[: 7 * PAGE], SHORT)
    engine.step()
    assert engine.scheduler.load().free_pages <= 7
    request.cancel()


@pytest.mark.parametrize("ring", [0, 6], ids=["swap", "ring"])
def test_conversation_on_the_host_is_copied_back(ring, run_alone):
    """The device has room for one of two conversations; neither is computed again."""
    engine = engine_of(8, ring=ring, context=8)
    texts = prompts_of(4 * PAGE, 5 * PAGE)
    for turn in range(3):
        for text in texts:
            text += [30 + turn, 31, 32]
            result = engine.generate(text, GREEDY)
            assert result.token_ids == run_alone(text)
            assert result.usage.reused_tokens == (0 if turn == 0 else len(text) - 4)
            text += result.token_ids
            engine.scheduler.assert_consistent()
            assert on_host(engine) == 0
    slots = engine.scheduler.slots
    assert any(slots._on_host(page) for page in slots.cache.pages()), "no page of a conversation is on the host"


def test_page_written_after_its_precopy_is_copied_again(run_alone):
    """A request that continues the last page of an earlier one makes the page's copy on the host outdated."""
    engine = engine_of(8, ring=20, slots=2, chunk_tokens=2 * PAGE)
    slots = engine.scheduler.slots
    text = prompts_of(PAGE + 3)[0]
    text += engine.generate(text, GREEDY).token_ids
    long = engine.submit(LONG, SHORT)
    while not slots._precopied:
        engine.step()
    assert slots.cache.match(text).tail.page in slots._precopied
    long.cancel()
    other = engine.generate([*text, 5], SHORT)
    assert other.token_ids == run_alone([*text, 5], SHORT) and other.usage.reused_tokens == len(text) - 1
    assert engine.generate(LONG, SHORT).token_ids == run_alone(LONG, SHORT)
    more = [*text, 5, *other.token_ids, 6]
    assert engine.generate(more, GREEDY).token_ids == run_alone(more)


def test_eviction_candidates_are_listed_once_per_chunk(monkeypatch):
    """The number of listings does not depend on the number of pages, with a full device and a full host."""
    engine = engine_of(10, ring=8, host=20)
    for prompt in prompts_of(*[8 * PAGE] * 4):
        engine.generate(prompt[::-1], GREEDY)
    chunks = lambda: sum(stat.count for stat in engine.graph_stats() if stat.kind == "prompt")  # noqa: E731
    walks, pages = [], PrefixCache.pages
    monkeypatch.setattr(PrefixCache, "pages", lambda self: walks.append(1) or pages(self))
    before = chunks()
    engine.generate(LONG, GREEDY)
    assert 0 < len(walks) <= 2 * (chunks() - before)


@pytest.mark.parametrize("pages", [4, 8], ids=lambda pages: f"{pages}_of_9_pages")
def test_scores_do_not_depend_on_the_location_of_pages(pages):
    """Scoring writes all pages with decode passes."""
    expected, found = engine_of().score(LONG[: 9 * PAGE]), engine_of(pages, ring=16).score(LONG[: 9 * PAGE])
    assert torch.equal(expected, found)


@pytest.mark.parametrize("ring", [0, 20], ids=["swap", "ring"])
def test_batch_invariant_results_with_offload(ring):
    """Requests are preempted and replay their outputs, and pages are copied back from the host."""
    chunk = 2 * PAGE if CUDA else 64
    build = dict(batch_invariant=True, chunk_tokens=chunk, dtype=None)
    single = engine_of(**build)
    engine = engine_of(chunk // PAGE + 10 if ring else 16, ring=ring, host=40, slots=3, **build)
    params = replace(GREEDY, max_tokens=3 * PAGE, logprobs=2)
    prompts = prompts_of(7 * PAGE + 3, 5 * PAGE, 9 * PAGE - 1, 2 * PAGE) * 2
    requests = [engine.submit(prompt, params) for prompt in prompts]
    drive(engine, requests)
    for request, prompt in zip(requests, prompts):
        expected, found = single.generate(prompt, params, reuse_prefix=False), request.result()
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert engine.scheduler.preemptions > 0 or ring


@pytest.mark.parametrize("when", range(0, 24, 3))
def test_cancel_frees_device_host_and_ring_places(when, run_alone):
    engine = engine_of(7, ring=10, slots=2, chunk_tokens=PAGE)
    first, second = prompts_of(8 * PAGE, 6 * PAGE)
    cancelled, kept = engine.submit(first, SHORT), engine.submit(second, SHORT)
    for _ in range(when):
        engine.step()
    cancelled.cancel()
    engine.scheduler.assert_consistent()
    drive(engine, [kept])
    assert kept.result().token_ids == run_alone(second, SHORT)
    again = engine.submit(first, SHORT)
    drive(engine, [again])
    assert again.result().token_ids == run_alone(first, SHORT)


def test_interrupt_at_any_copy_loses_no_page(run_alone, monkeypatch):
    engine = engine_of(6, ring=12)
    slots, moved = engine.scheduler.slots, []
    for name in ("_to_host", "_add_to_ring"):
        original = getattr(slots, name)

        def interrupted(page, original=original):
            moved.append(page)
            if len(moved) % 3 == 1 and len(moved) < 20:
                raise KeyboardInterrupt
            original(page)

        monkeypatch.setattr(slots, name, interrupted)
    request = engine.submit(LONG, GREEDY)
    interrupts = 0
    for _ in range(200):
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        engine.scheduler.assert_consistent()
    assert request.result().token_ids == run_alone(LONG) and interrupts > 1


@pytest.mark.parametrize("seed", [*range(6), 9, 30, 43, 52, 57, 68])
@pytest.mark.parametrize("ring", [0, 5], ids=["swap", "ring"])
def test_any_schedule_returns_the_tokens_of_single_requests(seed, ring, run_alone):
    choose = random.Random(seed)
    engine = engine_of(10, ring=ring, host=9, slots=3, context=10, chunk_tokens=PAGE + PAGE // 2)
    if not CUDA:
        engine.scheduler.lookahead = seed % 2
    kept, common = [], LONG[: 3 * PAGE]
    for _ in range(12):
        length, most = choose.choice([3, PAGE, 3 * PAGE - 1, 5 * PAGE]), choose.choice([2, PAGE, 2 * PAGE])
        text = common[: choose.choice([0, PAGE + 5, 3 * PAGE])] + prompts_of(*[length] * choose.randint(1, 3))[-1]
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        request = engine.submit(text, params)
        kept.append((request, text, params))
        for _ in range(choose.randint(0, 15)):
            engine.step()
            engine.scheduler.assert_consistent()
        if choose.random() < 0.3:
            choose.choice(kept)[0].cancel()
    drive(engine, [request for request, _, _ in kept])
    for request, text, params in kept:
        if request.finish_reason != "cancelled":
            assert request.result().token_ids == run_alone(text, params)


@pytest.mark.parametrize("ring", [0, 4], ids=["swap", "ring"])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_that_preempt_return_the_tokens_of_single_requests(seed, ring, plain_engine, run_alone):
    """Each round submits `n` answers to one or two prompts. The slots need far more pages than there are."""
    choose, rounds, preempted, resumed = random.Random(seed), 5, 0, 0
    engine = engine_of(13, ring=ring, host=9, slots=4, context=10, chunk_tokens=PAGE + PAGE // 2)
    if not CUDA:
        engine.scheduler.lookahead = seed % 2
    for number in range(rounds):
        before, kept = engine.scheduler.preemptions, []
        for prompt in range(choose.randint(1, 2)):
            length, most = choose.randint(PAGE, 3 * PAGE), choose.randint(5 * PAGE, 6 * PAGE)
            text = LONG[: choose.choice([0, PAGE])] + prompts_of(*[length] * (number % 3 + prompt + 1))[-1]
            for answer in range(choose.randint(2, 4)):
                params = SamplingParams(temperature=1.0, seed=100 * number + answer, max_tokens=most, ignore_eos=True)
                kept.append((engine.submit(text, params), text, params))
            for _ in range(choose.randint(0, 15)):
                engine.step()
                engine.scheduler.assert_consistent()
        if choose.random() < 0.3:
            choose.choice(kept)[0].cancel()
        drive(engine, [request for request, _, _ in kept])
        preempted += engine.scheduler.preemptions > before
        resumed += engine.scheduler.preemptions - before
        for request, text, params in kept:
            if request.finish_reason != "cancelled":
                assert_sampled_alike(request.result().token_ids, run_alone(text, params), text, plain_engine)
    assert preempted > rounds // 2 and resumed > rounds, "most rounds must preempt requests"


@covering(1, cut=[9 * PAGE + 2, 8 * PAGE + 7, 3 * PAGE + 7], pages=[4, 6, 8])
def test_edited_prompt_reuses_its_unchanged_prefix(pages, cut, run_alone):
    """The reused pages fill the device. A copy of the page in which the prompts diverge displaces one of them."""
    engine = engine_of(pages, ring=12)
    engine.generate(LONG, GREEDY)
    edited = [*LONG[:cut], 299, 298, 297]
    result = engine.generate(edited, GREEDY)
    assert result.token_ids == run_alone(edited) and result.usage.reused_tokens == cut
    engine.scheduler.assert_consistent()


@pytest.mark.parametrize("seed", range(16))
def test_random_conversations_with_edits(seed):
    choose = random.Random(seed)
    slots, ring = choose.choice([1, 2, 3]), choose.choice([0, 3, 6, 12])
    pages = max(choose.choice([4, 7, 10]), 3 * slots + 1)
    context, host = min(16, pages + ring), max(ring + 1, choose.choice([3, ring + 4, 20]))
    chunk = choose.choice([PAGE, PAGE + 8, 4 * PAGE])
    engine = engine_of(pages, ring, host, slots=slots, context=context, layers=1, chunk_tokens=chunk)
    run_alone = engine_of(layers=1)
    talks, submitted = [[(7 * i + 31 * k) % 300 for i in range(choose.randint(3, 3 * PAGE))] for k in range(3)], []
    for _ in range(10):
        talk, ids = choose.choice(list(enumerate(talks)))
        if choose.random() < 0.35:
            ids = ids[: choose.randint(1, len(ids))] + [choose.randrange(300) for _ in range(3)]
        answer = choose.choice([1, 3, PAGE])
        more = [choose.randrange(300) for _ in range(choose.choice([1, 5, PAGE, 4 * PAGE]))]
        ids = (ids + more)[: context * PAGE - answer - 1]
        request = engine.submit(ids, replace(GREEDY, max_tokens=answer))
        submitted.append((request, ids, answer))
        for _ in range(choose.choice([2, 10, 200])):
            engine.step()
            engine.scheduler.assert_consistent()
        if request.finish_reason:
            talks[talk] = [*ids, *request.result().token_ids]
        elif choose.random() < 0.3:
            request.cancel()
    drive(engine, [request for request, _, _ in submitted])
    for request, ids, answer in submitted:
        if request.finish_reason != "cancelled":
            expected = run_alone.generate(ids, replace(GREEDY, max_tokens=answer), reuse_prefix=False)
            assert request.result().token_ids == expected.token_ids


# ---- launches


def test_passes_without_offload_have_no_fetches():
    """There is no additional launch, and each layer reads the page table itself."""
    engine = engine_of()
    for lines in (lambda run: decode.decode_pass(run, engine.model, "greedy"), lambda run: read(run, engine.model, 5)):
        recorder = Recorder()
        lines(recorder)
        assert {"fetch", "fetched"}.isdisjoint(line.role for line in recorder.launches)
        tables = [line.args[3].table for line in recorder.launches if line.role == "attention"]
        assert tables and all(table is engine.model.kv.page_table for table in tables)
    assert engine.model.kv.k[1].data_ptr() == engine.model.kv.pool[:, 1, 0].data_ptr()


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_fetch_order_in_the_list_of_launches(buffers, kind):
    model = engine_of(5, ring=11, buffers=buffers, layers=5).model
    recorder = Recorder()
    if kind == "decode":
        decode.decode_pass(recorder, model, "greedy")
    else:
        read(recorder, model, 5, decoding=1)
    layers = 5 if kind == "decode" else 4  # A prompt pass launches the attention of the last layer at its end.
    lines = [line for line in recorder.launches if line.role in ("fetch", "attention", "decoding")]
    filled, fetched, attended = {}, 0, []
    for line in lines:
        if line.role == "fetch":
            source, buffer = line.args[2], line.args[3].data_ptr()
            assert source.data_ptr() == model.kv.offload.source[fetched].data_ptr()
            if buffer in filled:
                assert filled[buffer] in attended, "a buffer was refilled before its last reader ran"
            filled[buffer] = fetched
            fetched += 1
        else:
            layer = next(i for i in range(5) if line.args[3].table.data_ptr() == model.kv.tables[i].data_ptr())
            assert layer in filled.values()
            attended.append(layer)
    assert fetched == layers and sorted(set(attended)) == list(range(layers)) and len(filled) == buffers


def test_kernels_and_references_agree_with_offload():
    """Compare logits of the kernels, which read device pages and the ring, with those of the references."""
    found = []
    for run in (launch, run_reference):
        engine = engine_of(4, ring=8, layers=2, context=8)
        slots = engine.scheduler.slots
        generator = torch.Generator().manual_seed(2)
        pool = engine.model.kv.pool
        pool.copy_(torch.randn(pool.shape, generator=generator))
        params = replace(GREEDY, seed=1)
        rewind_slots(slots, [6 * PAGE + 5], params)
        slots.send(0, 6)
        host = engine.model.kv.offload.host
        host.copy_(torch.randn(host.shape, generator=generator))
        assert len(slots._ring_place) > 0
        DecodePasses(engine.model, run).replay("greedy")
        engine.synchronize()
        found.append(engine.model.workspace.logits[0].cpu().clone())
    assert_close(*found, 2e-2 if CUDA else 1e-4)


# ---- memory

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Simulate a device with 10 GiB and a host with 100 GiB."""
    free = {"cuda": 10 * GIB, "cpu": 100 * GIB}
    monkeypatch.setattr(memory, "free_memory", lambda device: free[device.type])
    use_h100(monkeypatch)
    return free


@pytest.mark.parametrize("slots, kv_tokens, ring", [(1, None, 2), (1, 4096, 3), (4, None, 3), (4, 20_000, 2)])
def test_plan_fits_and_matches_the_allocation(machine, slots, kv_tokens, ring):
    machine["cuda"] = 4 * GIB
    config, device = PRESETS["qwen3-0.6b"], torch.device("meta")
    options = dict(slots=slots, kv_tokens=kv_tokens, kv_offload=20, kv_ring=ring, chunk_tokens=512)
    kv = planned(config, max_seq_len=30_000, **options)
    assert kv.capacity == 30_000 and (kv.pages + kv.offload.ring) * 64 >= 30_000
    assert kv.offload.ring < kv.offload.host, "no host page is free for an exchange of pages"
    assert kv_tokens is None or kv.kv_tokens == -(-kv_tokens // 64) * 64
    cache = make_kv_cache(config, kv.capacity, device, torch.bfloat16, slots, 64, kv.pages, kv.offload)
    plan, plain = (
        kv.memory,
        plan_memory(config, torch.bfloat16, torch.device("cuda"), slots, 512, torch_prompt_attention=False),
    )
    needed = plan.needed(kv.capacity, kv.kv_tokens)
    assert needed + cache.offload.tables.nbytes <= plan.usable
    beside = plan.needed(kv.capacity, 0) - plan.fixed + plain.fixed
    assert cache.offload.cells.nbytes == pytest.approx(needed - beside, rel=1e-4)
    assert kv_tokens or needed > 0.98 * plan.usable or kv.kv_tokens == slots * 30_016, "the plan left memory unused"


def test_no_ring_if_all_pages_fit_on_the_device(machine):
    kv = planned(PRESETS["qwen3-0.6b"], max_seq_len=30_000, kv_offload=4, chunk_tokens=512)
    assert kv.offload.ring == 0 and kv.kv_tokens == 30_016 and kv.offload.host * 64 * 114_688 <= 4 * GIB


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(kv_offload="much"), 'kv_offload must be a number from 0.001 to 1,000,000 or "auto", got'),
        (dict(kv_offload=True), "kv_offload must be a number"),
        (dict(kv_offload=120), "kv_offload: 120.0 GiB are requested, but the host has 100.0"),
        (dict(kv_offload=0.005), "kv_offload: a page takes 0.0068 GiB of host memory, more"),
        (dict(kv_ring=3), "kv_ring: no K/V are on the host; use it with kv_offload"),
        (dict(kv_offload=4, kv_ring=-1), "kv_ring must be an integer from 0 to 16"),
        (dict(kv_offload=4, kv_tokens=64), "kv_tokens must be an integer from 256"),
        (dict(kv_offload=4, kv_tokens=30_000, max_seq_len=2000), "what 1 slot of 2,000 positions can have, 2,000,"),
        (dict(kv_offload=0.5, max_seq_len=40_000), "kv_offload: 40,000 positions are requested, "),
        (dict(kv_offload=4, kv_tokens=40_000), "not enough memory on cuda: kv_tokens requests 40,000 positions"),
    ],
    ids=lambda value: value if type(value) is str else "",
)
def test_impossible_offload_options_are_one_line(machine, options, words):
    machine["cuda"] = 3 * GIB
    with pytest.raises((ParameterError, DeviceError)) as raised:
        planned(PRESETS["qwen3-0.6b"], chunk_tokens=512, **options)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_fp8_kv_cannot_be_offloaded(machine):
    with pytest.raises(ParameterError, match="^kv_offload: K/V in kv_dtype fp8 are kept on the device; use"):
        planned(PRESETS["qwen3-0.6b"], kv_dtype="fp8", kv_offload=4)
    with pytest.raises(ParameterError, match="^kv_offload: K/V in kv_dtype fp8"):
        Engine.load(device=str(DEVICE), kv_dtype="fp8", kv_offload=0.1)


@pytest.fixture
def benched(monkeypatch):
    """Run `bench offload` with an engine of this machine and otherwise default options."""
    made = []

    def engine_made(args, capacity, pages, plan):
        kept = (pages, plan.ring, plan.host) if plan else ()
        options = EngineOptions(weights_offload=args.weights)
        on_host = plan_host_layers(options, PRESETS[args.preset], torch.bfloat16)
        engine = engine_of(*kept, context=-(-capacity // PAGE), layers=5, on_host=on_host)
        engine.plan = replace(engine.plan, host_layers=on_host)
        made.append(engine)
        return engine

    monkeypatch.setattr(bench, "offload_engine", engine_made)
    monkeypatch.setattr(bench, "PAGE", PAGE)
    monkeypatch.setattr(bench, "need_gpu", lambda: None)
    monkeypatch.setattr(measure, "run_facts", lambda device: {})
    monkeypatch.setattr(bench.torch.cuda, "max_memory_allocated", lambda *_: 0)
    options = ["--preset", "qwen3-0.6b", "--steps", "4", "--runs", "2"]

    def benched(*argv):
        return bench.offload(make_parser().parse_args(["bench", "offload", *options, *argv]), Output())

    return benched


def test_bench_of_returning_conversations(benched, monkeypatch):
    monkeypatch.setattr(bench, "SWAP_ROOM", 2 * PAGE)
    (row,) = benched("--swap", "--context", str(4 * PAGE))
    assert row.bench == "offload-swap" and row.back_ms > 0 and row.anew_ms > 0
    assert len(tables([row])) == 1


def test_bench_of_long_prompts(benched, monkeypatch):
    tokens = 9 * PAGE
    gib = 5 * PAGE * bench.kv_bytes_per_token(PRESETS["qwen3-0.6b"], torch.bfloat16) / GIB
    (row,) = benched("--prompt-tokens", str(tokens), "--kv-gib", str(gib + 1e-9))
    assert (row.device_pages, row.host_pages, row.tokens_equal) == (5, 5, True)
    assert row.ttft_s > 0 and len(tables([row])) == 1


# ---- on a GPU: one graph, two streams

needs_gpu = pytest.mark.skipif(not CUDA, reason="streams and graphs need a GPU")


@needs_gpu
def test_bench_has_a_row_for_each_share_and_variant(benched):
    rows = benched("--context", str(6 * PAGE), "--host", "1,0.5,0")
    named = [(row.host, row.variant) for row in rows]
    assert len(set(named)) == len(named) >= 9
    assert [row.captures for row in rows if row.variant == "one graph"] == [2 * len(decode.KINDS)] * 3
    assert all(row.us_per_token > 0 for row in rows) and len(tables(rows)) == 1


@needs_gpu
def test_bench_of_weights(benched):
    rows = benched("--context", str(6 * PAGE), "--weights", "0.1")
    assert [row.variant for row in rows] == ["eager", "a graph a layer", "one graph"]
    assert all(row.over_needed > 0 and row.host_layers == 3 for row in rows) and len(tables(rows)) == 1


SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=2 * PAGE, ignore_eos=True)


def gpu_engine(pages=None, ring=0, context=16, **build):
    """Build an engine in bf16 with heads of 128."""
    build |= {"pages": pages, "page": PAGE}
    if pages is not None:
        build["offload"] = Offload(40, ring)
    fields = dict(num_layers=5, head_dim=128, num_heads=8, num_kv_heads=2, max_position=16 * PAGE)
    return tiny_engine(graph=build.pop("graph", "full"), capacity=context * PAGE, build=build, **fields)


@needs_gpu
@covering(1, graph=["full", "piecewise", "none"], pages=[4, 7, 10, 16])
def test_tokens_are_equal_for_each_graph_mode_and_host_share(graph, pages):
    """Attention splits positions in the same way and order, so logits are bit-equal."""
    chunk = (pages - 3) * PAGE if pages < 16 else 2048
    plain, engine = gpu_engine(chunk_tokens=chunk), gpu_engine(pages, ring=16, graph=graph, chunk_tokens=chunk)
    for params in (GREEDY, replace(SAMPLED, logprobs=2)):
        for prompt in (LONG, LONG[:70]):
            expected, result = (e.generate(prompt, params, reuse_prefix=False) for e in (plain, engine))
            assert result.token_ids == expected.token_ids
            if result.logprobs:
                assert [each.logprob for each in result.logprobs] == [each.logprob for each in expected.logprobs]


@needs_gpu
def test_graph_is_captured_once_while_the_context_grows():
    engine = gpu_engine(4, ring=16)
    engine.steps.check_addresses = True
    captures, graphs = engine.steps.captures, dict(engine.steps.graphs)
    engine.generate(LONG[:5], replace(SAMPLED, max_tokens=12 * PAGE))
    assert engine.steps.captures == captures == 2 * len(decode.KINDS) and engine.steps.graphs == graphs
    assert {stat.mode for stat in engine.graph_stats() if stat.kind in decode.KINDS} == {"full"}


def logits_of(engine, run) -> torch.Tensor:
    """Return the logits of one pass at a position after 9 pages on the host; the ring contains NaN before."""
    steps = DecodePasses(engine.model, run, Dispatcher("full", (1,)), batches=[BatchDescriptor("greedy", 1)])
    position = 9 * PAGE + 3
    rewind(engine, position, replace(GREEDY, seed=1))
    engine.scheduler.slots.send(0, 9)
    generator = torch.Generator().manual_seed(5)
    for tensor in (engine.model.kv.offload.host, engine.model.kv.pool):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for buffer in engine.model.kv.offload.target:
        buffer.fill_(-1)  # These bytes are NaN in every number format.
    steps.replay("greedy", 1)
    engine.synchronize()
    return engine.model.workspace.logits[0].clone()


@needs_gpu
@pytest.mark.parametrize("late", ["fetch", "attention", "down"])
def test_streams_wait_for_each_other(late):
    """Delay the fetches or the pass, so that a missing wait changes the logits."""
    engine = gpu_engine(4, ring=16, context=10)
    expected = logits_of(engine, launch)
    assert expected.isfinite().all() and torch.equal(logits_of(engine, slowed(late)), expected)
    assert torch.equal(logits_of(engine, launcher(engine.model)), expected), "the logits differ with dependent launches"


@needs_gpu
def test_passes_enqueue_without_waiting_or_allocating():
    engine = gpu_engine(4, ring=16, context=10)
    rewind(engine, 9 * PAGE + 3, replace(GREEDY, seed=1))
    engine.scheduler.slots.send(0, 9)
    enqueue(engine, GREEDY)
    engine.synchronize()
    with torch.cuda.device(engine.device), no_allocations():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                enqueue(engine, GREEDY)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.synchronize()


@needs_gpu
def test_close_unregisters_host_pages(monkeypatch):
    given, unregister = [], pinned._unregister
    monkeypatch.setattr(pinned, "_unregister", lambda *args: (unregister(*args), given.append(args[1])))
    for pieces in range(1, 3):
        engine = gpu_engine(4, ring=16)
        assert engine.model.kv.offload.host.is_pinned()
        engine.close()
        del engine
        gc.collect()
        assert len(given) == pieces
