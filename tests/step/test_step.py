"""The decode pass: kernels against references buffer by buffer, replays against launches, and the rules for state."""

from dataclasses import replace

import pytest
import torch
from models import CUDA, FAMILIES, begin, interpreter_configs, no_allocations, tiny_config, tiny_engine
from util import assert_close

from tridecode import layout
from tridecode.cli.bench.passes import enqueue
from tridecode.kernels.attention.attention import AttentionConfig
from tridecode.sampling import SamplingParams
from tridecode.state.slots import Slots
from tridecode.step import decode
from tridecode.step.graphs import DecodePasses, launcher
from tridecode.step.model import make_model
from tridecode.step.prompt import prefill
from tridecode.step.run import run_reference
from tridecode.step.workspace import named_tensors

needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA graphs exist on a GPU only")
GREEDY = SamplingParams(temperature=0.0, seed=1)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.2,
    frequency_penalty=0.1, logit_bias={3: 2.0}, seed=7,
)  # fmt: skip
PROMPT = [5, 17, 300, 42, 8, 8, 99]


def run_steps(engine, params, steps, ids=PROMPT):
    """Run decode passes for one request without the engine's scheduler. Return its tokens."""
    begin(engine, ids, 0, params, limit=len(ids) + steps + 1)
    for _ in range(len(ids) - 1 + steps):
        enqueue(engine, params)
    engine.synchronize()
    return engine.model.workspace.tokens[0, : len(ids) + steps].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_buffer_matches_the_reference_step_by_step(family):
    dtype = torch.bfloat16 if CUDA else torch.float32
    triton = tiny_engine("triton", "none", dtype, **FAMILIES[family])
    oracle = tiny_engine("torch", "none", dtype, **FAMILIES[family])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    ids = [(7 * i) % 331 for i in range(70)]
    for engine in (triton, oracle):
        begin(engine, ids, 0, GREEDY, limit=len(ids) + 1)
    for step in range(len(ids)):
        checked = step in (0, 1, 24, 69)
        if checked:  # Both engines begin this step with the same state.
            set_cache(triton.model, oracle.model.kv.gather(0, step))
            triton.model.workspace.meta.copy_(oracle.model.workspace.meta)
            triton.steps.replay("greedy")
        oracle.steps.replay("greedy")
        if not checked:
            continue
        triton.synchronize()
        for name in ("hidden", "normed", "attention.qkv", "attention.attended", "mlp.act", "logits"):
            a, b = (named_tensors(e.model.workspace)[name] for e in (triton, oracle))
            assert_close(a, b, tolerance, f"step {step}: {name}")
        for layer, (a, b) in enumerate(zip(*(e.model.kv.gather(0, step + 1) for e in (triton, oracle)))):
            assert_close(a, b, tolerance, f"step {step}: cache of layer {layer}")
        state = slice(layout.DEVICE_FIELDS, layout.META_WIDTH)
        assert torch.equal(triton.model.workspace.meta[:, state], oracle.model.workspace.meta[:, state])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fp32_tokens_equal_the_reference(params):
    expected = run_steps(tiny_engine("torch", dtype=torch.float32), params, 6, PROMPT[:3])
    assert run_steps(tiny_engine("triton", "none", dtype=torch.float32), params, 6, PROMPT[:3]) == expected


@needs_gpu
def test_no_allocation_over_200_steps():
    for graph in ("full", "none"):
        engine = tiny_engine("triton", graph)
        for params in (GREEDY, SAMPLED):
            run_steps(engine, params, 2)
            begin(engine, PROMPT, 0, params, limit=250)
            with no_allocations():
                for _ in range(200):
                    enqueue(engine, params)
                engine.synchronize()


@needs_gpu
def test_long_replays_are_bit_equal_to_eager_launches():
    """Attention splits the positions. Hidden sizes are not powers of two."""
    engines = [tiny_engine("triton", graph, hidden_size=896, intermediate_size=2432) for graph in ("full", "none")]
    for params in (SAMPLED, SamplingParams(seed=3, logprobs=5)):
        outputs = []
        for engine in engines:
            run_steps(engine, params, 40, list(range(200)))
            outputs.append(named_tensors(engine.model.workspace) | {"pool": engine.model.kv.pool})
        for name, replayed in outputs[0].items():
            assert torch.equal(replayed.cpu(), outputs[1][name].cpu()), name


@needs_gpu
def test_host_waits_only_for_tokens_and_captures_nothing_after_load():
    """From one request to the next, no copy waits, nothing synchronizes, and no buffer moves."""
    engine = tiny_engine("triton", "full")
    engine.steps.check_addresses = True
    captures = engine.steps.captures
    engine.generate(PROMPT, replace(SAMPLED, max_tokens=3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for params in (GREEDY, SAMPLED, SamplingParams(seed=3, logprobs=2)):
            for ids in (PROMPT, [4] * 100, [*PROMPT, 9]):
                assert len(engine.generate(ids, replace(params, max_tokens=5)).token_ids) == 5
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.steps.captures == captures == 2 * len(decode.KINDS), "a wrong number of graphs was captured"


@needs_gpu
def test_failed_capture_does_not_affect_later_captures():
    engine, fails = tiny_engine("triton", "full"), True
    expected = run_steps(engine, GREEDY, 4)

    def run(role, op, *args, **options):
        if fails and role == "down" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no more")
        launcher(engine.model)(role, op, *args, **options)

    engine.steps.run = run
    batch = replace(engine.steps.dispatcher.plan("greedy", 1)[1], masked=True)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="no more"):
            engine.steps.capture(batch)
        assert run_steps(engine, GREEDY, 4) == expected
        fails = False
        engine.steps.capture(batch)  # A second capture on the same stream must work.
        assert engine.steps.graphs[batch]


def step_backends():
    return ["triton", "torch"]


def snapshot(engine):
    tensors = named_tensors(engine.model.workspace) | {"pool": engine.model.kv.pool}
    return {name: t.clone() for name, t in tensors.items()}


@pytest.mark.parametrize("backend", step_backends())
@pytest.mark.parametrize("status", [layout.STOP, layout.LIMIT_REACHED, layout.NAN], ids=["stop", "limit", "nan"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_pass_after_the_end_changes_nothing(backend, status, params):
    engine = tiny_engine(backend, "none")
    run_steps(engine, params, 1, PROMPT[:2])
    engine.model.workspace.meta[0, layout.STATUS] = status
    before = snapshot(engine)
    enqueue(engine, params)
    engine.synchronize()
    for name, tensor in snapshot(engine).items():
        assert torch.equal(tensor, before[name]), f"{name} changed"


@pytest.mark.parametrize("backend", step_backends())
def test_stop_limit_and_known_tokens(backend):
    engine = tiny_engine(backend, "none")
    free = run_steps(engine, GREEDY, 4, PROMPT[:2])
    ws = engine.model.workspace
    row = ws.meta[0].tolist()
    assert (row[layout.STATUS], row[layout.POSITION], row[layout.STEP]) == (layout.RUN, 5, 5)
    stop = free[3]
    begin(engine, PROMPT[:2], 0, GREEDY, (stop,), limit=100)
    for _ in range(6):
        enqueue(engine, GREEDY)
    engine.synchronize()
    row, first = ws.meta[0].tolist(), free.index(stop, 2)
    assert row[layout.STATUS] == layout.STOP
    assert row[layout.POSITION] == first
    assert ws.tokens[0, : first + 1].tolist() == free[: first + 1]


@pytest.mark.parametrize("backend", step_backends())
def test_no_position_exceeds_the_capacity(backend):
    capacity = 8
    engine = tiny_engine(backend, "none", capacity=capacity)
    begin(engine, [1, 2, 3, 4, 5], 0, GREEDY, limit=capacity + 1)
    for _ in range(capacity + 4):
        enqueue(engine, GREEDY)
    engine.synchronize()
    row = engine.model.workspace.meta[0].tolist()
    assert row[layout.STATUS] == layout.LIMIT_REACHED
    assert (row[layout.POSITION], row[layout.STEP]) == (capacity, capacity)
    (page,) = engine.model.kv.pool
    assert page[:, :, :, capacity:].eq(0).all(), "a pass wrote K/V beyond the capacity"
    assert page[:, :, :, capacity - 1].ne(0).any()


@pytest.mark.parametrize("backend", step_backends())
def test_non_finite_logits_end_the_generation_without_a_token(backend):
    engine = tiny_engine(backend, "none")
    engine.model.weights.final_norm[3] = float("nan")
    for params in (GREEDY, SamplingParams(seed=1)):
        begin(engine, PROMPT[:2], 1, params, limit=50)
        engine.model.workspace.tokens[0, 2] = -7
        enqueue(engine, params)
        engine.synchronize()
        row = engine.model.workspace.meta[0].tolist()
        assert (row[layout.STATUS], row[layout.POSITION], row[layout.STEP]) == (layout.NAN, 1, 1)
        assert engine.model.workspace.tokens[0, 2] == -7
        entry = int(engine.model.workspace.out[0, 0])
        assert entry & layout.NO_TOKEN == layout.NO_TOKEN and entry >> layout.STEP_SHIFT & layout.STEP_MASK == 0


def set_cache(model, cached, slot=0):
    """Write K/V [layers, 2, kv_heads, positions, head_dim] into a slot's pages."""
    for position in range(cached.shape[3]):
        page = model.kv.page_table[slot, position // model.kv.page].long()
        model.kv.pool[page, :, :, :, position % model.kv.page] = cached[:, :, :, position]


def two_slots(weights, **config):
    """Return a model with two slots, whose pages of 16 positions are shuffled, and whose K/V are poisoned."""
    spec = tiny_config(**config)
    configs = None if CUDA else small_tiles(spec, weights)
    model = make_model(spec, weights, 64, slots=2, page=16, configs=configs)
    slots, order = Slots(model), torch.randperm(8, generator=torch.Generator().manual_seed(4)).tolist()
    slots.pages.take(8)
    slots[0].pages, slots[1].pages = order[:4], order[4:]
    model.kv.pool.fill_(float("nan"))
    return model, slots


def start(slots, slot, params, ids, position=0):
    slots.write_tokens(slots[slot], ids, 60)
    slots.begin(slots[slot], slot, params, position=position, n_known=len(ids), limit=60, stop_ids=())


def run_steps_of(model, kind, steps, backend):
    runner = DecodePasses(model, launcher(model) if backend == "triton" else run_reference)
    for _ in range(steps):
        runner.replay(kind)
    if CUDA:
        torch.cuda.synchronize()


def small_tiles(spec, weights):
    configs = interpreter_configs(spec, weights)[1]
    return {1: replace(configs, attention=dict.fromkeys(configs.attention, AttentionConfig(block_t=16, splits=2)))}


IDS = [(11 * i + 3) % 331 for i in range(40)]


@pytest.mark.parametrize("backend", step_backends())
def test_result_does_not_depend_on_the_pages_of_a_slot(backend):
    model, slots = two_slots(tiny_engine("torch", "none").model.weights)
    for slot in range(2):
        start(slots, slot, SAMPLED, [5, 9])
    run_steps_of(model, "sample", 4, backend)
    ws = model.workspace
    assert ws.logits.isfinite().all()
    assert torch.equal(ws.logits[0], ws.logits[1])
    assert torch.equal(ws.tokens[0], ws.tokens[1])
    assert torch.equal(model.kv.gather(0, 4), model.kv.gather(1, 4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("slot", [0, 1])
def test_prompt_and_decode_passes_share_the_pages_of_a_slot(family, slot):
    """A model with one slot and its pages in order generates the same tokens."""
    config = FAMILIES[family]
    plain = tiny_engine(graph="none", dtype=torch.float32, **config)
    expected = plain.generate(IDS, replace(GREEDY, max_tokens=4)).token_ids
    model, slots = two_slots(plain.model.weights, **config)
    model.workspace.meta[1 - slot, layout.STATUS] = layout.STOP
    start(slots, slot, GREEDY, IDS, position=len(IDS) - 1)
    for first, end in ((0, 17), (17, len(IDS) - 1)):  # The second part attends to the first part in the cache.
        prefill(model, first, end, slot)
    run_steps_of(model, "greedy", 4, "triton" if CUDA else "torch")
    assert model.workspace.tokens[slot, len(IDS) : len(IDS) + 4].tolist() == list(expected)


@pytest.mark.parametrize("backend", step_backends())
def test_starting_a_request_does_not_change_other_slots(backend):
    """A running request samples the same tokens, whether or not another request starts. All other state is poisoned."""
    results = []
    for disturbed in (False, True):
        model, slots = two_slots(tiny_engine("torch", "none").model.weights)
        ws, other = model.workspace, 0
        for tensor in (ws.meta, ws.tokens, ws.counts):
            tensor[other] = -1
        for tensor in (ws.samp, ws.bias):
            tensor[other] = float("nan")
        ws.meta[other, layout.STATUS] = layout.STOP
        start(slots, 1, SAMPLED, [5, 9])
        run_steps_of(model, "sample", 3, backend)
        before = {name: t[1].clone() for name, t in state_of(ws).items()}
        if disturbed:
            start(slots, other, replace(SAMPLED, seed=1, logit_bias={4: -3.0}), IDS, position=len(IDS) - 1)
            prefill(model, 0, len(IDS) - 1, other)
            assert all(torch.equal(t[1], before[name]) for name, t in state_of(ws).items())
        run_steps_of(model, "sample", 3, backend)
        results.append({name: t[1].clone() for name, t in state_of(ws).items()} | {"held": model.kv.gather(1, 6)})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def state_of(ws):
    return {name: getattr(ws, name) for name in ("meta", "samp", "tokens", "counts", "bias", "out")}


def test_entries_of_an_earlier_request_are_ignored():
    engine = tiny_engine()
    first = engine.generate(PROMPT, replace(SAMPLED, max_tokens=5), reuse_prefix=False)
    ring = engine.model.workspace.out[0].tolist()
    second = engine.generate(PROMPT, replace(SAMPLED, max_tokens=5, seed=8), reuse_prefix=False)
    again = engine.model.workspace.out[0].tolist()
    assert [entry >> layout.GENERATION_SHIFT for entry in ring[:6]] == [1] * 5 + [0]
    assert [entry >> layout.GENERATION_SHIFT for entry in again[:6]] == [2] * 5 + [0]
    assert first.token_ids == tuple(entry & layout.NO_TOKEN for entry in ring[:5])
    assert second.token_ids == tuple(entry & layout.NO_TOKEN for entry in again[:5])
