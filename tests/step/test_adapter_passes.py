"""Passes with adapters: kernels against references, keys of passes, and the chosen kernels."""

import pytest
import torch
from models import BOTH, CUDA, DEVICE, tiny_config, tiny_engine
from models_to_tune import H200, case

from tridecode import SamplingParams
from tridecode.blocks.adapter import Adapter, LowRank
from tridecode.step.dispatch import BatchDescriptor, PromptDescriptor
from tridecode.step.graphs import decode_batches
from tridecode.tuning.invariance import ROWS, invariant_choices, order_of_sums
from tridecode.tuning.rules import choose
from tridecode.tuning.tables import package_tables

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [(7 * i + 3) % 300 for i in range(20)]


def random_adapter(spec, name: str, rank: int, seed: int, dtype=torch.float32) -> Adapter:
    """Return an adapter of all linears without experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    linears = {
        (index, each.name): LowRank(
            normal(len(each.parts), rank, each.k, scale=each.k**-0.5), normal(each.n, rank, scale=0.5 * rank**-0.5)
        )
        for index, layer in enumerate(spec.layers)
        for each in layer.linears()
        if not each.experts
    }
    return Adapter(name, "", linears)


def adapted_engine(backend="auto", slots=3, family="qwen3", **options):
    build = dict(slots=slots, adapter_memory=0.02, max_rank=32, **options)
    engine = tiny_engine(backend, build=build, **BOTH[family])
    dtype = engine.model.weights.dtype
    for name, rank, seed in ("a", 16, 1), ("b", 32, 2):
        engine._add_adapter(random_adapter(engine.config, name, rank, seed, dtype))
    return engine


def answers(engine) -> list[tuple[int, ...]]:
    """Return the answers of requests that share passes: without an adapter, and with each of two."""
    requests = [engine.submit(PROMPT, GREEDY, adapter=name) for name in (None, "a", "b")]
    return [request.result().token_ids for request in requests]


@pytest.mark.parametrize("family", BOTH)
def test_kernels_compute_the_texts_of_the_references(family):
    """All passes have adapters: prompt passes, prompt passes with decoding rows, and decode passes."""
    expected = answers(adapted_engine("torch", family=family))
    assert len(set(expected)) == 3
    if not CUDA:
        assert answers(adapted_engine("triton", family=family)) == expected


def test_verified_drafts_have_the_adapters_of_their_requests():
    engine = adapted_engine("torch", speculate="ngram")
    assert answers(engine) == answers(adapted_engine("torch"))


def test_passes_with_adapters_have_keys():
    engine = adapted_engine()
    batches = decode_batches(engine.model, (1, 2))
    assert {batch.adapters for batch in batches} == {False, True}
    assert "with masks and adapters" in str(BatchDescriptor("greedy", 2, masked=True, adapters=True))
    assert str(PromptDescriptor(8, 1, True)).endswith("with adapters")
    invariant = adapted_engine(batch_invariant=True)
    assert {batch.adapters for batch in decode_batches(invariant.model, (1, 2))} == {True}
    assert {batch.adapters for batch in decode_batches(tiny_engine().model, (1,))} == {False}


def test_no_buffer_of_the_pool_moves():
    engine = adapted_engine()
    before = engine.model.addresses()
    answers(engine)
    assert engine.model.addresses() == before and any(name.startswith("adapters.") for name in before)


def test_rows_of_a_pass_find_their_adapters_on_the_device():
    engine = adapted_engine()
    while engine.adapter_load().on_device < 2:  # A request without an adapter would start alone.
        engine.scheduler.slots.adapters.wait(1)
    requests = [engine.submit(PROMPT, GREEDY, adapter=name) for name in ("b", None, "a")]
    engine.wait(requests[:1])
    rows, listed = engine.model.pool.decode.numbers.tolist(), engine.model.pool.decode.listed.tolist()
    assert sorted(rows[:3]) == [0, 1, 2] and listed[0] == 2 and set(listed[1:3]) == {1, 2}
    assert engine.model.pool.weights.device == DEVICE


CASES = [
    case(6144, 2560, "bfloat16", "normed"), case(19456, 2560, "bfloat16", "gated"),
    case(2560, 9728, "bfloat16", "residual"), case(6144, 2560, "float16", "normed"),
]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64])
def test_passes_with_adapters_use_kernels_that_add_them(rows):
    tables = package_tables(H200)
    for each in CASES:
        plain, adapted = (choose(each, rows, H200, tables, adapters=form) for form in (False, True))
        assert adapted.kernel.adapts(adapted.config)
        assert adapted == plain or not plain.kernel.adapts(plain.config), "the same kernel serves both forms if it can"


def test_batch_invariant_choices_add_in_one_order():
    for each in CASES[:3]:
        choices = invariant_choices(each, ROWS, H200, package_tables(H200), adapters=True)
        assert len({order_of_sums(each, choice) for choice in choices.values()}) == 1
        assert all(choice.kernel.adapts(choice.config) for choice in choices.values())


def test_the_head_keeps_its_kernel():
    model = adapted_engine().model
    head, view = model.weights.lm_head, model.with_adapters()
    assert view.choice(head, "normed") == model.choice(head, "normed")
    assert tiny_config().lm_head.name == "lm_head"
