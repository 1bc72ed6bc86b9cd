"""Runners of passes, with graphs of references on a CPU: modes, times and failures of captures, drafts."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import captures
import pytest
import torch
from models import BOTH, CUDA, tiny_engine
from triton.runtime.errors import OutOfResources

from tridecode import SamplingParams, layout
from tridecode.cli.bench.passes import rewind
from tridecode.kernels.attention.attention import attention_bytes, attention_ref
from tridecode.kernels.op import Op
from tridecode.state.acceptance import Acceptance
from tridecode.step import graphs
from tridecode.step.costs import PASSES, measure_costs
from tridecode.step.decode import KINDS
from tridecode.step.dispatch import MODES, BatchDescriptor, Dispatcher, PromptDescriptor, max_queries
from tridecode.step.graphs import DecodePasses, idle, make_passes
from tridecode.step.prompt_graphs import PromptPasses, make_prompts
from tridecode.step.run import Launch, run_reference

pytestmark = pytest.mark.skipif(CUDA, reason="a GPU captures real graphs")

LAYERS, SIZES, PROMPTS = 2, (1, 3), (8, 32)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=1)
PARAMS = (  # One request for each kind of sampling. The kinds that need less work run longer.
    replace(GREEDY, max_tokens=6),
    replace(GREEDY, temperature=0.9, top_p=0.9, max_tokens=5),
    replace(GREEDY, temperature=0.8, logprobs=2),
)
CAPTURED = [mode for mode in MODES if mode != "none"]


def ids(n: int, base: int = 1) -> list[int]:
    """Return n token ids."""
    return [(base * 41 + 13 * i) % 300 for i in range(n)]


def engine_of(mode="none", slots=3, sizes=SIZES, prompts=PROMPTS, attention=None, family="qwen3", **build):
    """An engine whose passes are captured in `mode`. `captures.install` must have been called."""
    build = {"slots": slots, "page": 16} | build
    engine = tiny_engine("torch", "none", torch.float32, 128, build=build, **BOTH[family])
    engine.threads = 1
    if mode != "none":
        dispatcher = Dispatcher(mode, sizes, prompts)
        engine.steps = steps = DecodePasses(engine.model, captures.run, dispatcher, attention, between=captures.run)
        engine.prompts = PromptPasses(engine.model, steps, captures.run)
        engine.prompts.capture_all(None if slots > 1 else 0)
    return engine


def passes(engine, kind, count=3, rows=3, masked=False, tokens=1, known=0):
    """Run decode passes from a position with random K/V. Return the resulting state.

    known is the number of known tokens after the position.
    """
    start(engine, kind, rows, known)
    for _ in range(count):
        engine.steps.replay(kind, rows, masked, tokens)
    return state(engine)


def finish(engine, kind, rows=3, masked=False):
    """Fill the buffers of a prompt pass with random values, run its head and sampler, and return the state."""
    start(engine, kind, rows)
    for tensor in read_buffers(engine.model):
        tensor.normal_(generator=torch.Generator().manual_seed(4))
    engine.prompts.finish(kind, rows, masked)
    return state(engine)


def read_buffers(model):
    """Return the buffers of a prompt pass that `finish` reads."""
    return model.prompt.hidden, model.prompt.buffers(model.spec.layers[-1].mixer)["qkv"]


def start(engine, kind, rows, known=0):
    engine.model.kv.fill(torch.Generator().manual_seed(3))
    engine.model.workspace.tokens.zero_()
    rewind(engine, 20, PARAMS[KINDS.index(kind)], rows, known)


def state(engine):
    ws = engine.model.workspace
    named = {name: getattr(ws, name).clone() for name in ("meta", "tokens", "counts", "logits", "out")}
    # These values depend on the number of earlier requests of a slot.
    named["meta"][:, layout.GENERATION] = named["out"][:] = 0
    return named | {"pool": engine.model.kv.pool.clone()}


def assert_same(actual, expected, rows=3):
    for name, tensor in expected.items():
        if name in ("meta", "logits"):
            tensor, actual[name] = tensor[:rows], actual[name][:rows]
        assert torch.equal(actual[name], tensor), name


@pytest.fixture(autouse=True)
def cpu_graphs(monkeypatch):
    captures.install(monkeypatch)
    yield
    assert not captures.CAPTURING, "a capture is still open"


# ---- modes


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("mode", CAPTURED)
def test_every_mode_generates_the_texts_of_launched_passes(mode, family):
    plain, engine = (engine_of(each, family=family) for each in ("none", mode))
    at_load, prompts = engine.steps.captures, [ids(n, n) for n in (5, 20, 1, 30)]
    results = [each.generate_many(prompts, [*PARAMS, GREEDY], reuse_prefix=False) for each in (plain, engine)]
    assert [r.token_ids for r in results[1]] == [r.token_ids for r in results[0]]
    reads = {stat.mode for stat in engine.graph_stats() if stat.kind in ("prompt", "mixed")}
    decoded = {stat.mode for stat in engine.graph_stats() if stat.kind in KINDS}
    assert (reads, decoded) == tuple({each} for each in MODES[mode])
    assert {stat.mode for stat in plain.graph_stats()} == {"none"}
    parts = LAYERS + 1 if MODES[mode][1] == "piecewise" else 1
    assert engine.steps.captures == at_load == 2 * len(KINDS) * len(SIZES) * parts, (
        "a wrong number of graphs was captured"
    )
    assert set(engine.steps.place.modes) == {*MODES[mode]} - {"none"}


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", CAPTURED)
def test_a_graph_is_bit_equal_to_launches_of_the_same_key(mode, kind, family):
    assert_same(passes(engine_of(mode, family=family), kind), passes(engine_of(family=family), kind))


def test_passes_are_padded_to_captured_sizes_and_larger_ones_are_launched():
    engine = engine_of("full", sizes=(1, 2))
    for rows in (1, 2, 3):
        rewind(engine, 20, GREEDY, rows)
        engine.steps.replay("greedy", rows)
    engine.steps.replay("greedy", 3, masked=True)
    found = [(s.kind, s.rows, s.padded, s.mode) for s in engine.graph_stats()]
    assert found == [
        ("greedy", 1, 1, "full"), ("greedy", 2, 2, "full"), ("greedy", 3, 3, "none"), ("greedy+mask", 3, 3, "none"),
    ]  # fmt: skip
    assert len(engine.steps.graphs) == 2 * 2 * len(KINDS), "a pass was captured after the load"
    padded, exact = engine_of("full"), engine_of()
    for each in (padded, exact):
        rewind(each, 20, GREEDY, rows=3)
        each.model.workspace.meta[2, layout.STATUS] = layout.STOP
        each.steps.replay("greedy", 2 if each is padded else 3)
    assert_same(state(padded), state(exact))


def test_smaller_passes_are_captured_after_larger_ones():
    batches = list(engine_of("full").steps.graphs)
    assert [batch.rows for batch in batches] == 6 * [3] + 6 * [1] and {batch.kind for batch in batches} == {*KINDS}


def test_reference_runner_captures_nothing():
    engine = tiny_engine("torch", "none", torch.float32, 64)
    steps = make_passes(engine.model, "torch", Dispatcher("full", (1,), (8,)))
    prompts = make_prompts(engine.model, steps, "torch")
    assert steps.place is None and prompts.attention is None
    assert steps.run is run_reference and prompts.run is run_reference
    assert not prompts.capture_next() and prompts.capture_all() is None
    assert prompts.decoding(2) == 2 and prompts.tokens_within(1e-9, 0, 77) == 77


def test_buffers_that_moved_are_reported_before_a_pass():
    engine = engine_of("full")
    engine.steps.check_addresses = True
    engine.steps.replay("greedy", 1)
    own = engine.model.workspace.blocks[engine.config.layers[0].ffn]
    act, own["act"] = own["act"], own["act"].clone()
    with pytest.raises(AssertionError, match="buffers moved since capture: workspace.mlp.act"):
        engine.steps.replay("greedy", 1)
    own["act"] = act
    ((key, (cos, sin)),) = engine.model.ropes.items()
    object.__setattr__(engine.model, "ropes", {key: (cos.clone(), sin)})
    with pytest.raises(AssertionError, match="buffers moved since capture: rope.0.cos"):
        engine.steps.replay("greedy", 1)


# ---- prompt passes


def test_prompt_sizes_are_captured_from_the_largest_and_up_to_a_limit():
    engine = engine_of("full", slots=1)
    prompts = engine.prompts
    assert not prompts.seconds and prompts.capture_next() and [*prompts.seconds] == [(32, 0, False)]
    prompts.capture_all(8)
    assert [*prompts.seconds] == [(32, 0, False), (8, 0, False)] and not prompts.capture_next()
    prompts = engine_of("full").prompts
    assert [key[:2] for key in prompts.seconds] == [(32, 0), (32, 3), (8, 0), (8, 3)] and not prompts.capture_next()
    assert [prompts.decoding(rows) for rows in (0, 1, 3)] == [0, 3, 3]
    assert prompts.tokens_within(1.0, 0, 100) == 32 and prompts.tokens_within(1e-9, 0, 100) == 8
    assert not engine_of("full_decode_only").prompts.seconds


def test_one_slot_captures_a_prompt_size_at_its_second_use(caplog):
    caplog.set_level("DEBUG", "tridecode")
    plain, engine = engine_of(slots=1), engine_of("full", slots=1)
    for n in (20, 25, 20, 40, 40, 5):
        found = [each.generate(ids(n, n), GREEDY, reuse_prefix=False).token_ids for each in (plain, engine)]
        assert found[0] == found[1]
    reads = [(s.rows, s.padded, s.mode, s.count) for s in engine.graph_stats() if s.kind == "prompt"]
    launched, captured = [(5, 5, "none", 1), (20, 20, "none", 1)], [(20, 32, "full", 1), (25, 32, "full", 1)]
    assert reads == [*launched, *captured, (40, 40, "none", 2)]
    assert [*engine.prompts.seconds] == [(32, 0, False)]
    assert "captured a pass of 32 prompt tokens and 0 decoding rows (full) in " in caplog.text
    assert "a pass of 32 prompt tokens and 0 decoding rows takes 1.00 ms without attention" in caplog.text


def test_fixed_chunks_end_in_decode_passes():
    build = dict(slots=2, sizes=(2,), prompts=(64,), chunk_tokens=64, batch_invariant=True, page=None)
    plain, engine = engine_of(**build), engine_of("full", **build)
    found = [each.generate(ids(100), GREEDY, reuse_prefix=False).token_ids for each in (plain, engine)]
    assert found[0] == found[1] and [*engine.prompts.seconds] == [(64, 0, False)]
    reads = [(s.rows, s.padded, s.mode, s.count) for s in engine.graph_stats() if s.kind == "prompt"]
    assert reads == [(35, 64, "full", 1), (64, 64, "full", 1)]


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_prompt_attention_reads_the_chunks_of_each_pass(mode):
    """During a capture, attention gets no chunks. Then it gets the chunks of each pass."""
    engine, chunks, seen = engine_of("full", prompts=()), [layout.Chunk(0, 0, 4, 0)], []
    lines = Op(lambda *args: seen.append([chunk.count for chunk in chunks]), None, None)
    steps = DecodePasses(engine.model, captures.run, Dispatcher(mode, SIZES, (32,)))
    prompts = PromptPasses(engine.model, steps, captures.run, lines, chunks)
    prompts.capture_all()
    assert seen == ([[]] * 2 * (1 + 2) if mode == "piecewise" else []), (
        "attention got chunks during a capture, or ran a wrong number of times"
    )
    for counts in ([7, 5], [20], [40]):
        seen.clear()
        prompts.read([layout.Chunk(0, 0, count, 0) for count in counts], sum(counts), prompts.decoding(2))
        assert seen == [counts]
    assert [(stat.kind, stat.mode) for stat in steps.dispatcher.stats()] == [
        ("mixed", mode), ("mixed", mode), ("mixed", "none")
    ]  # fmt: skip


# ---- late captures


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_passes_with_masks_are_captured_at_load(mode, caplog):
    caplog.set_level("DEBUG", "tridecode")
    engine, plain = engine_of(mode), engine_of()
    at_load = engine.steps.captures
    for _ in range(2):
        assert_same(passes(engine, "sample", masked=True), passes(plain, "sample", masked=True))
        assert_same(finish(engine, "sample", masked=True), finish(plain, "sample", masked=True))
    assert engine.steps.captures == at_load
    assert f"captured a pass of 3 rows with masks ({mode}) in " in caplog.text
    assert {stat.mode for stat in engine.graph_stats()} == {mode}


def test_a_prompt_size_is_captured_while_rows_run():
    engine, plain = engine_of("full", slots=1), engine_of(slots=1)
    for each in (engine, plain):
        rewind(each, 20, GREEDY)
        each.steps.replay("greedy")
    chunk = layout.Chunk(0, 0, 3, 0)
    engine.scheduler.slots.write_chunks([chunk])
    before = engine.model.prompt.chunks.clone(), state(engine)
    engine.prompts.capture_next()
    assert torch.equal(engine.model.prompt.chunks, before[0]) and before[0].any(), (
        "the capture changed the table of chunks"
    )
    assert_same(state(engine), before[1])
    for each in (engine, plain):
        each.steps.replay("greedy")
    assert_same(state(engine), state(plain))


def test_captures_at_load_change_no_state_of_running_rows():
    engine = engine_of()
    start(engine, "greedy", rows=3)
    for tensor in read_buffers(engine.model):
        tensor.zero_()
    before = state(engine)
    steps = DecodePasses(engine.model, captures.run, Dispatcher("full", SIZES, PROMPTS))
    assert_same(state(engine), before)
    PromptPasses(engine.model, steps, captures.run).capture_all()
    assert_same(state(engine), before)


def test_decode_passes_with_loaded_kernels_are_captured_without_a_launch():
    launched = []

    def run(role, *args, **options):
        if not captures.CAPTURING:
            launched.append(role)
        captures.run(role, *args, **options)

    steps = DecodePasses(engine_of().model, run, Dispatcher("full", SIZES, PROMPTS), compiled=True)
    assert steps.captures and not launched
    steps.launch(next(iter(steps.graphs)))
    assert launched, "a pass without a graph was not launched"


def test_idle_rows_and_chunks_are_restored_after_an_error():
    engine = engine_of(slots=2, speculate="ngram")
    rewind(engine, 20, GREEDY, rows=2)
    engine.scheduler.slots.write_chunks([layout.Chunk(1, 0, 3, 0)])
    model = engine.model
    before = model.workspace.meta.clone(), model.prompt.chunks.clone()
    assert before[0][:, layout.STATUS].eq(layout.RUN).all() and before[1].any()
    model.verify.meta[:, layout.STATUS] = layout.RUN
    with pytest.raises(ZeroDivisionError), idle(model):
        for workspace in (model.workspace, model.verify):
            assert workspace.meta[:, layout.STATUS].eq(layout.LIMIT_REACHED).all()
        assert not model.prompt.chunks.any()
        raise ZeroDivisionError
    assert torch.equal(model.workspace.meta, before[0]) and torch.equal(model.prompt.chunks, before[1])


def failing(monkeypatch, runner, role="down", error=None):
    """Let lines with this role fail in captures. Return the list of the failures."""
    failures, run = [], runner.run

    def run_failing(name, *args, **options):
        if captures.CAPTURING and name == role:
            failures.append(name)
            raise error or RuntimeError("out of\nmemory")
        run(name, *args, **options)

    monkeypatch.setattr(runner, "run", run_failing)
    return failures


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_a_pass_with_masks_that_cannot_be_captured_is_launched(mode, monkeypatch, caplog):
    engine, plain = engine_of(mode), engine_of()
    error = OutOfResources(300, 200, "shared memory") if mode == "full" else RuntimeError("out of\nmemory")
    failures = failing(monkeypatch, engine.steps, "mask", error)
    engine.steps = DecodePasses(engine.model, engine.steps.run, Dispatcher(mode, SIZES, PROMPTS), between=captures.run)
    engine.prompts = PromptPasses(engine.model, engine.steps, captures.run)
    assert len(failures) == 2 * len(KINDS) * len(SIZES), "a wrong number of captures was attempted"
    assert "a pass of 3 rows with masks cannot be captured, so it is launched: out of " in caplog.text
    for _ in range(2):
        assert_same(passes(engine, "greedy", masked=True), passes(plain, "greedy", masked=True))
        assert_same(finish(engine, "greedy", masked=True), finish(plain, "greedy", masked=True))
        assert_same(passes(engine, "greedy"), passes(plain, "greedy"))
    assert len(failures) == 2 * len(KINDS) * len(SIZES), "a failed capture was attempted again"
    assert {(stat.kind, stat.mode) for stat in engine.graph_stats()} == {("greedy", mode), ("greedy+mask", "none")}


def test_prompt_size_that_cannot_be_captured_is_launched(monkeypatch, caplog):
    engine, plain = engine_of("full", slots=1), engine_of(slots=1)
    failures = failing(monkeypatch, engine.prompts)
    for n in (20, 21, 22):
        found = [each.generate(ids(n), GREEDY, reuse_prefix=False).token_ids for each in (engine, plain)]
        assert found[0] == found[1]
    assert len(failures) == 1 and not engine.prompts.seconds
    assert (
        "a pass of 32 prompt tokens and 0 decoding rows cannot be captured, so it is launched: out of memory"
        in caplog.text
    )
    assert engine.prompts.capture_next() is False, "a size is still left to capture"
    assert {stat.mode for stat in engine.graph_stats() if stat.kind == "prompt"} == {"none"}


def test_a_failure_at_load_is_an_error():
    def run(role, *args, **options):
        if captures.CAPTURING and role == "lm_head":
            raise RuntimeError("no more")
        captures.run(role, *args, **options)

    with pytest.raises(RuntimeError, match="no more"):
        DecodePasses(engine_of().model, run, Dispatcher("full", (1,)))


# ---- passes that verify drafts


def test_passes_that_verify_drafts_are_captured_at_load(monkeypatch):
    compiled = []
    monkeypatch.setattr(graphs, "compile_lists", lambda lists, *_: compiled.append(len([*lists])))
    steps = engine_of("full", speculate="ngram").steps
    sizes = [(tokens, rows) for rows in (3, 1) for tokens in (2, 4, 8) if tokens <= max_queries(rows)]
    verifying = [batch for batch in steps.graphs if batch.tokens > 1]
    assert {(batch.tokens, batch.rows) for batch in verifying} == {*sizes} and len(verifying) == len(KINDS) * len(sizes)
    assert compiled == [steps.captures] == [2 * len(KINDS) * len(SIZES) + len(verifying)]
    assert steps.tokens("greedy", 1, [Acceptance(7)]) == 8 and steps.tokens("greedy", 1, [Acceptance()]) == 1
    del steps.graphs[BatchDescriptor("greedy", 1, 8)]
    assert steps.tokens("greedy", 1, [Acceptance(7)]) == 4, "a pass without a graph was chosen"


def test_a_pass_without_a_graph_is_launched_and_not_captured():
    engine, plain = engine_of("full", sizes=(1,)), engine_of()
    del engine.steps.graphs[BatchDescriptor("greedy", 1)]
    captured = engine.steps.captures
    assert_same(passes(engine, "greedy", 2, 1), passes(plain, "greedy", 2, 1), 1)
    assert engine.steps.captures == captured
    assert [(stat.mode, stat.count) for stat in engine.graph_stats()] == [("none", 2)]


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("kind", ["greedy", "logprobs"])
def test_verifying_passes_are_bit_equal_to_launched_ones(mode, kind):
    """All drafts are accepted. Then each request has one row, without and with masks."""
    engine, plain = engine_of(mode, speculate="ngram"), engine_of(speculate="ngram")
    for tokens, masked in ((4, False), (4, False), (1, False), (1, True)):
        captured, launched = (passes(each, kind, 2, 3, masked, tokens, known=16) for each in (engine, plain))
        assert_same(captured, launched)
        assert captured["meta"][0, layout.POSITION] == 20 + 2 * tokens
    assert plain.steps.tokens("greedy", 3, 3 * [Acceptance(3)]) == 4, (
        "a number of rows was excluded because no graph with this number was captured"
    )


# ---- lines


def test_other_attention_runs_between_the_parts_of_a_graph():
    calls = []

    def counted(*args):
        assert not captures.CAPTURING, "the attention was captured in a graph"
        calls.append(args)
        attention_ref(*args)

    attention = Op(counted, attention_ref, attention_bytes)
    engine, plain = engine_of("piecewise", attention=attention, sizes=(1, 2)), engine_of()
    for rows in (2, 3):
        calls.clear()
        assert_same(passes(engine, "greedy", 1, rows), passes(plain, "greedy", 1, rows), rows)
        assert len(calls) == LAYERS
        assert_same(finish(engine, "greedy", rows), finish(plain, "greedy", rows), rows)
        assert len(calls) == LAYERS + 1, "the end of a prompt pass did not run the attention of decode passes"


@pytest.mark.parametrize("mode, parts", [("full", 1), ("piecewise", 3)])
def test_parts_of_a_graph_end_at_attention_and_at_fetches(mode, parts):
    log, made = [], []
    roles = ["fetch", "embed", "fetched", "qkv", "attention", "fetch", "o_proj", "down"]
    op = Op(None, log.append, None)

    def between():
        made.append(None)
        return lambda role, op, name: log.append(f"{name} between")

    lines = lambda run: [run(role, op, role) for role in roles]  # noqa: E731
    replay, count = captures.Place("cuda").capture(mode, captures.run, between, lines)
    assert count == parts and log == made == [], "the capture ran an op"
    for passes_run in (1, 2):
        log.clear()
        replay()
        eager = ("fetch", "fetched", "attention") if mode == "piecewise" else ()
        assert log == [f"{role} between" if role in eager else role for role in roles]
        assert len(made) == (passes_run if mode == "piecewise" else 0), "a pass did not get its own runner"


class Pair(NamedTuple):
    ptr: torch.Tensor
    stride: int


@dataclass
class Sizes:
    pair: Pair
    count: int | None = None


def test_launches_with_the_same_kernels_have_equal_keys():
    op, base = Op(lambda *args: None, None, None), torch.zeros(64)

    def key(*args):
        return Launch("any", op, args, {"config": 1}).key()

    alike = [key(Sizes(Pair(t, 3)), (t, None), 2.5) for t in (base[:8], base[16:24])]
    assert alike[0] == alike[1] and len({*alike}) == 1
    whole, other = base[:8], [Sizes(Pair(base[1:9], 3)), Sizes(Pair(base[:8], 4)), Sizes(Pair(base[:8], 3), 1)]
    others = {*(key(sizes, (whole, None), 2.5) for sizes in other), key(Sizes(Pair(whole, 3)), (base[:7], None), 2.5)}
    assert len(others) == 4 and alike[0] not in others


def test_keys_are_printed_as_passes():
    assert str(BatchDescriptor("greedy", 1)) == "a pass of 1 row"
    assert str(BatchDescriptor("sample", 3, 4, True)) == "a pass of 3 rows of 4 tokens with masks"
    assert str(PromptDescriptor(2048, 1)) == "a pass of 2,048 prompt tokens and 1 decoding row"


def test_costs_are_measured_with_all_rows_running(monkeypatch):
    engine = engine_of("full", speculate="ngram")
    meta, progress, seconds = engine.model.workspace.meta, [], captures.Place.seconds

    def spy(place, enqueue, passes):
        before = meta[:, layout.POSITION].clone()
        result = seconds(place, enqueue, passes)
        progress.append((meta[:, layout.POSITION] - before).tolist())
        return result

    monkeypatch.setattr(captures.Place, "seconds", spy)
    slots = engine.scheduler.slots
    costs = measure_costs(engine.steps, slots)
    kinds = "greedy", "sample"
    assert costs == {(kind, size): dict.fromkeys((1, 2, 4, 8), 0.001) for kind in kinds for size in SIZES}
    runs = 1 + PASSES
    expected = [[runs * rows * (row < size) for row in range(3)] for size in SIZES for rows in (1, 2, 4, 8)]
    assert progress == expected * len(kinds)
    assert meta[:, layout.STATUS].ne(layout.RUN).all() and slots.pages.free == engine.model.kv.pages
    slots.assert_consistent()
    engine.steps.costs = {
        ("greedy", 1): {1: 1.0, 2: 1.1, 4: 9.0, 8: 9.0},
        ("sample", 1): {1: 1.0, 2: 9.0, 4: 9.0, 8: 9.0},
    }
    assert [engine.steps.tokens(kind, 1, [Acceptance(7)]) for kind in ("greedy", "sample", "logprobs")] == [2, 1, 1]
    engine.steps.graphs.update({key: None for key in engine.steps.graphs if key.tokens > 1 and key.rows == 3})
    measured = [*measure_costs(engine.steps, slots)]
    assert measured == [(kind, 1) for kind in kinds], "no captured pass of three requests verifies drafts"


def test_only_captured_passes_with_room_are_measured():
    engine = engine_of(speculate="ngram")
    assert measure_costs(engine.steps, engine.scheduler.slots) == {}
    engine = engine_of("full", speculate="ngram", page=16, pages=8)
    assert [*measure_costs(engine.steps, engine.scheduler.slots)] == [("greedy", 1), ("sample", 1)], (
        "the measured sizes are not those for which the pages suffice"
    )
