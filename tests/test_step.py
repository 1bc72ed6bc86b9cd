"""The token step: kernels against the reference buffer by buffer, replay against eager, state rules."""

import pytest
import torch
from models import CUDA, FAMILIES, tiny_config, tiny_engine

from tridecode import decode, meta, reference
from tridecode.model import make_model
from tridecode.sampling import SamplingParams
from tridecode.workspace import named_tensors

needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA graphs exist on a GPU only")
GREEDY = SamplingParams(temperature=0.0, seed=1)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.2,
    frequency_penalty=0.1, logit_bias={3: 2.0}, seed=7,
)  # fmt: skip
PROMPT = [5, 17, 300, 42, 8, 8, 99]


def run_steps(engine, params, steps, ids=PROMPT):
    """Tokens that `steps` bare steps leave, without the engine's streaming around them."""
    engine._begin(ids, 0, params, (), limit=len(ids) + steps + 1)
    for _ in range(len(ids) - 1 + steps):
        engine.enqueue(params)
    engine._synchronize()
    return engine.model.workspace.tokens[0, : len(ids) + steps].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_buffer_matches_the_reference_step_by_step(family):
    dtype = torch.bfloat16 if CUDA else torch.float32
    triton = tiny_engine("triton", "none", dtype, **FAMILIES[family])
    oracle = tiny_engine("torch", "none", dtype, **FAMILIES[family])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    ids = [(7 * i) % 331 for i in range(70)]
    for engine in (triton, oracle):
        engine._begin(ids, 0, GREEDY, (), limit=len(ids) + 1)
    for step in range(len(ids)):
        checked = step in (0, 1, 24, 69)
        if checked:  # every step is judged from the same state
            for mine, other in zip((*triton.model.kv.k, *triton.model.kv.v), (*oracle.model.kv.k, *oracle.model.kv.v)):
                mine.copy_(other)
            triton.model.workspace.meta.copy_(oracle.model.workspace.meta)
            decode.step(triton.model, "greedy")
        reference.step(oracle.model, "greedy")
        if not checked:
            continue
        triton._synchronize()
        for name in ("hidden", "normed", "qkv", "attn_out", "act", "logits"):
            a, b = (getattr(e.model.workspace, name).double() for e in (triton, oracle))
            error = ((a - b).norm() / b.norm()).item()
            assert error < tolerance, f"step {step}: {name} differs by {error:.1e}"
        for layer in range(2):
            for a, b in ((triton.model.kv.k, oracle.model.kv.k), (triton.model.kv.v, oracle.model.kv.v)):
                error = ((a[layer] - b[layer]).double().norm() / b[layer].double().norm()).item()
                assert error < tolerance, f"step {step}: cache of layer {layer} differs by {error:.1e}"
        state = slice(meta.DEVICE_FIELDS, meta.META_WIDTH)
        assert torch.equal(triton.model.workspace.meta[:, state], oracle.model.workspace.meta[:, state])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fp32_tokens_equal_the_reference(params):
    expected = run_steps(tiny_engine("torch", dtype=torch.float32), params, 6, PROMPT[:3])
    assert run_steps(tiny_engine("triton", "none", dtype=torch.float32), params, 6, PROMPT[:3]) == expected


@needs_gpu
@pytest.mark.parametrize("kind", decode.KINDS)
def test_replay_is_bit_equal_to_eager(kind):
    params = {"greedy": GREEDY, "sample": SAMPLED, "logprobs": SamplingParams(seed=3, logprobs=5)}[kind]
    engines = [tiny_engine("triton", graph, hidden_size=896, intermediate_size=2432) for graph in ("full", "none")]
    for ids in (PROMPT, [1], list(range(200))):
        outputs = []
        for engine in engines:
            run_steps(engine, params, 40, ids)
            outputs.append(named_tensors(engine.model.workspace) | dict(enumerate(engine.model.kv.k)))
        for name, replayed in outputs[0].items():
            eager = outputs[1][name]
            assert torch.equal(replayed.cpu(), eager.cpu()), f"{kind}: {name} differs"


@needs_gpu
def test_no_allocation_over_200_steps():
    for graph in ("full", "none"):
        engine = tiny_engine("triton", graph)
        for params in (GREEDY, SAMPLED):
            run_steps(engine, params, 2)
            engine._begin(PROMPT, 0, params, (), limit=250)
            before = torch.cuda.memory_stats()
            for _ in range(200):
                engine.enqueue(params)
            engine._synchronize()
            after = torch.cuda.memory_stats()
            for name in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.allocated"):
                assert before[name] == after[name], f"graph={graph}: {name}"


@needs_gpu
def test_no_capture_after_load_and_addresses_hold():
    engine = tiny_engine("triton", "full")
    engine.graphs.check_addresses = True
    captures = engine.graphs.captures
    for params in (GREEDY, SAMPLED, SamplingParams(temperature=1.3, top_k=3, seed=2, logprobs=2)):
        for ids in (PROMPT, [4] * 100):
            assert len(engine.generate(ids, params.__class__(**{**vars(params), "max_tokens": 9})).token_ids) == 9
    assert engine.graphs.captures == captures == len(decode.KINDS)


@needs_gpu
def test_moved_buffer_is_caught():
    engine = tiny_engine("triton", "full")
    engine.graphs.check_addresses = True
    object.__setattr__(engine.model.workspace, "act", engine.model.workspace.act.clone())
    with pytest.raises(AssertionError, match="workspace.act"):
        engine.graphs.replay("greedy")


def step_backends():
    return ["triton", "torch"]


def snapshot(engine):
    tensors = named_tensors(engine.model.workspace) | {"k": engine.model.kv.k[0], "v": engine.model.kv.v[0]}
    return {name: t.clone() for name, t in tensors.items()}


@pytest.mark.parametrize("backend", step_backends())
@pytest.mark.parametrize("status", [meta.STOP, meta.LIMIT_REACHED, meta.NAN], ids=["stop", "limit", "nan"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_step_past_the_end_changes_nothing(backend, status, params):
    engine = tiny_engine(backend, "none")
    run_steps(engine, params, 1, PROMPT[:2])
    engine.model.workspace.meta[0, meta.STATUS] = status
    before = snapshot(engine)
    engine.enqueue(params)
    engine._synchronize()
    for name, tensor in snapshot(engine).items():
        assert torch.equal(tensor, before[name]), f"{name} changed"


@pytest.mark.parametrize("backend", step_backends())
def test_stop_limit_and_known_tokens(backend):
    engine = tiny_engine(backend, "none")
    free = run_steps(engine, GREEDY, 4, PROMPT[:2])
    ws = engine.model.workspace
    row = ws.meta[0].tolist()
    assert (row[meta.STATUS], row[meta.POSITION], row[meta.STEP]) == (meta.RUN, 5, 5)
    stop = free[3]
    engine._begin(PROMPT[:2], 0, GREEDY, (stop,), limit=100)
    for _ in range(6):
        engine.enqueue(GREEDY)
    engine._synchronize()
    row, first = ws.meta[0].tolist(), free.index(stop, 2)
    assert row[meta.STATUS] == meta.STOP
    assert row[meta.POSITION] == first
    assert ws.tokens[0, : first + 1].tolist() == free[: first + 1]


@pytest.mark.parametrize("backend", step_backends())
def test_the_capacity_limit_is_never_passed(backend):
    capacity = 8
    engine = tiny_engine(backend, "none", capacity=capacity)
    engine._begin([1, 2, 3, 4, 5], 0, GREEDY, (), limit=capacity + 1)
    for _ in range(capacity + 4):
        engine.enqueue(GREEDY)
    engine._synchronize()
    row = engine.model.workspace.meta[0].tolist()
    assert row[meta.STATUS] == meta.LIMIT_REACHED
    assert (row[meta.POSITION], row[meta.STEP]) == (capacity, capacity)
    page = engine.model.kv.k[0]
    assert page[0, :, capacity:].eq(0).all(), "K was written past the capacity"
    assert page[0, :, capacity - 1].ne(0).any()


@pytest.mark.parametrize("backend", step_backends())
def test_non_finite_logits_end_the_generation_and_draw_nothing(backend):
    engine = tiny_engine(backend, "none")
    engine.model.weights.final_norm[3] = float("nan")
    for params in (GREEDY, SamplingParams(seed=1)):
        engine._begin(PROMPT[:2], 1, params, (), limit=50)
        engine.model.workspace.tokens[0, 2] = -7
        engine.enqueue(params)
        engine._synchronize()
        row = engine.model.workspace.meta[0].tolist()
        assert (row[meta.STATUS], row[meta.POSITION], row[meta.STEP]) == (meta.NAN, 1, 1)
        assert engine.model.workspace.tokens[0, 2] == -7
        assert engine.model.workspace.out[0, 0] == 0xFFFFFFFF


def test_slots_of_one_model_are_bit_equal():
    """Two slots with the same request take the same step, at different pages."""
    engine = tiny_engine("triton" if CUDA else "torch", "none")
    model = make_model(tiny_config(), engine.model.weights, 64, slots=2)
    row, samp = meta.request_rows(SAMPLED, position=0, n_known=2, limit=60, stop_ids=(), seed=7, page_row=0)
    ws = model.workspace
    ws.meta[:], ws.samp[:] = row, samp
    ws.meta[1, meta.PAGE_ROW] = 1
    ws.tokens[:, :2] = torch.tensor([5, 9], dtype=torch.int32)
    for _ in range(4):
        (decode if CUDA else reference).step(model, "sample")
    if CUDA:
        torch.cuda.synchronize()
    assert torch.equal(ws.logits[0], ws.logits[1])
    assert torch.equal(ws.tokens[0], ws.tokens[1])
    assert torch.equal(model.kv.k[1][0], model.kv.k[1][1])
