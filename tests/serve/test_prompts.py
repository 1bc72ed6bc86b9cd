"""Prompt passes: captured, piecewise, launched, padded and shared."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import CUDA, FAMILIES, tiny_config, tiny_engine
from util import covering, relative_rms

from tridecode import SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.cli.chat.local import IdleCapture
from tridecode.errors import ParameterError
from tridecode.kernels.attention import prompt_attention_hopper
from tridecode.options import EngineOptions
from tridecode.plan.graphs import plan_graphs
from tridecode.step.dispatch import PROMPT_SIZES, Dispatcher, PromptDescriptor, prompt_sizes
from tridecode.step.prompt_graphs import PromptPasses
from tridecode.step.workspace import named_tensors

needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA graphs exist on a GPU only")
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=9, ignore_eos=True, logprobs=2)
DTYPE = torch.bfloat16 if CUDA else torch.float32


def ids(n: int, base: int = 1) -> list[int]:
    return [(base * 41 + 13 * i) % 300 for i in range(n)]


def engine_of(slots=1, graph="full", family="qwen3", dtype=DTYPE, **build):
    build = {"slots": slots, "page": 64} | build
    return tiny_engine(graph=graph, dtype=dtype, capacity=512, max_position=512, build=build, **FAMILIES[family])


def close(a, b) -> bool:
    return relative_rms(a, b) < (2e-2 if CUDA else 1e-5)


@needs_gpu
@covering(1, family=FAMILIES.keys(), tokens=[5, 16, 70, 200])
def test_graph_modes_give_equal_bits(family, tokens):
    """The captured size is the length of the prompt, so there is no padding."""
    found = []
    for mode, attention in (("full", "triton"), ("full_and_piecewise", "triton"), ("full_decode_only", "triton")):
        sizes = {} if mode == "full_decode_only" else {"prompt_graph_sizes": [tokens]}
        engine = engine_of(graph=mode, family=family, prompt_attention=attention, **sizes)
        while engine.capture_next():
            pass
        result = engine.generate(ids(tokens), SAMPLED)
        (stat,) = [stat for stat in engine.graph_stats() if stat.kind == "prompt"]
        assert stat.mode == {"full": "full", "full_and_piecewise": "piecewise"}.get(mode, "none")
        found.append((result.token_ids, result.logprobs, engine.model.kv.gather(0, tokens)))
    for token_ids, logprobs, kv in found[1:]:
        assert token_ids == found[0][0] and logprobs == found[0][1] and torch.equal(kv, found[0][2])


@needs_gpu
@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_torch_attention_runs_between_pieces(attention):
    plain = engine_of()
    engine = engine_of(prompt_attention=attention)
    while engine.capture_next():
        pass
    for n in (40, 70):  # The first prompt is a prefix of the second.
        plain.generate(ids(n), GREEDY)
        engine.generate(ids(n), GREEDY)
        assert close(engine.model.kv.gather(0, n), plain.model.kv.gather(0, n))
    assert {stat.mode for stat in engine.graph_stats() if stat.kind == "prompt"} == {"piecewise"}


@pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="the kernel needs a GPU of compute capability 9.0"
)
def test_long_prompts_on_hopper(monkeypatch):
    """Captured and launched passes give equal bits, close to those of torch's attention."""
    found, launches, launch = {}, [], prompt_attention_hopper.launch

    def noted(*args):
        launches.append(args)
        launch(*args)

    monkeypatch.setattr(prompt_attention_hopper, "launch", noted)
    sizes = dict(num_layers=3, num_heads=32, num_kv_heads=8, capacity=1536, max_position=1536)
    for graph, attention in (("full", "triton"), ("full_decode_only", "triton"), ("full", "flash")):
        build = dict(page=64, prompt_attention=attention)
        build |= {} if graph == "full_decode_only" else {"prompt_graph_sizes": [1200]}
        engine = tiny_engine(graph=graph, dtype=DTYPE, build=build, **sizes)
        while engine.capture_next():
            pass
        before = len(launches)
        engine.generate(ids(1200), GREEDY)
        assert (len(launches) > before) == (graph == "full_decode_only"), (
            "a captured pass launched kernels one by one, or a pass without a graph did not"
        )
        found[graph, attention] = engine.model.kv.gather(0, 1200)
    captured, launched, flash = found.values()
    assert launches and torch.equal(captured, launched) and close(captured, flash)


@needs_gpu
def test_padding_does_not_change_results():
    """Buffers and unused pages contain NaN."""
    exact, padded = engine_of(prompt_graph_sizes=[21]), engine_of(prompt_graph_sizes=[64])
    for engine in (exact, padded):
        while engine.capture_next():
            pass
        engine.model.kv.pool.fill_(float("nan"))
        for tensor in named_tensors(engine.model.prompt).values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    a, b = (engine.generate(ids(21), SAMPLED) for engine in (exact, padded))
    assert a.error is None and a.token_ids == b.token_ids
    assert close(padded.model.kv.gather(0, 21), exact.model.kv.gather(0, 21))


@needs_gpu
def test_no_capture_or_allocation_after_load():
    engine = engine_of(slots=4)
    assert not engine.capture_next(), "some sizes were not captured at load"
    engine.generate_many([ids(n, n) for n in (3, 70, 200, 5)], GREEDY)
    before, sizes = torch.cuda.memory_stats()["allocation.all.allocated"], len(engine.prompts.seconds)
    for n in (3, 70, 200, 5):
        engine.submit(ids(n, n + 1), GREEDY).result()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before <= 4 * 4, "a pass allocated memory"
    assert len(engine.prompts.seconds) == sizes
    assert {stat.mode for stat in engine.graph_stats()} == {"full"}


@needs_gpu
def test_repeated_size_is_captured():
    engine = engine_of()
    expected = engine.generate(ids(200), GREEDY, reuse_prefix=False).token_ids
    for _ in range(2):
        assert engine.generate(ids(200), GREEDY, reuse_prefix=False).token_ids == expected
    reads = {(stat.mode, stat.count) for stat in engine.graph_stats() if stat.kind == "prompt"}
    assert reads == {("none", 1), ("full", 2)}


@needs_gpu
def test_more_decoding_rows_than_the_largest_graph():
    """Prompts in the same pass have separate rows: no request samples from the row of another."""
    engine, exact = (engine_of(slots=6, graph=mode, graph_sizes=[2, 4]) for mode in ("full", "none"))
    prompts = [ids(20 + i, i) for i in range(14)]
    # With these limits the requests end in different passes.
    params = [replace(GREEDY, max_tokens=3 + i % 5) for i in range(14)]
    found = [[r.token_ids for r in e.generate_many(prompts, params, reuse_prefix=False)] for e in (engine, exact)]
    assert any(stat.kind == "mixed" and stat.mode == "full" for stat in engine.graph_stats())
    assert sum(a == b for a, b in zip(*found)) >= 12, "the tokens differ by more than rounding explains"


@pytest.mark.parametrize("family", FAMILIES)
def test_several_prompts_share_a_pass(family):
    engine, single = engine_of(slots=4, family=family), engine_of(family=family)
    lengths = (5, 64, 1, 30)
    results = engine.generate_many([ids(n, n) for n in lengths], GREEDY)
    reads = [stat for stat in engine.graph_stats() if stat.kind in ("prompt", "mixed")]
    assert [(stat.rows, stat.count) for stat in reads] == [(5 + 64 + 30, 1)], (
        "the prompts did not share one pass, or the prompt of one token was not decoded"
    )
    for n, result in zip(lengths, results):
        expected = single.generate(ids(n, n), GREEDY, reuse_prefix=False)
        assert result.usage == expected.usage
        if not CUDA:  # In bf16, rounding may change a token.
            assert result.token_ids == expected.token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_pass_matches_separate_passes(family):
    """A pass reads a prompt and decodes a row; the K/V of both match those of separate passes."""
    # Rounding to bf16 can make a router choose other experts.
    dtype = torch.float32 if "experts" in FAMILIES[family] else DTYPE
    engine, single = (engine_of(slots=2, family=family, dtype=dtype, chunk_tokens=40) for _ in range(2))
    first = engine.submit(ids(20), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    pieces = iter(first)
    next(pieces)
    engine.submit(ids(100, 7), GREEDY).result()
    assert sum(stat.count for stat in engine.graph_stats() if stat.kind == "mixed") == 3
    text = [*ids(20), *first.result().token_ids]
    single.score(text)
    expected = single.model.kv.gather(0, 40)
    # The page table of a slot does not change when its request ends.
    assert close(engine.model.kv.gather(0, 40), expected)
    single.generate(ids(100, 7), GREEDY, reuse_prefix=False)
    assert close(engine.model.kv.gather(1, 100), single.model.kv.gather(0, 100))


def test_cached_prompt_needs_decode_passes_only():
    engine = engine_of()
    engine.generate(ids(30), GREEDY)
    before = {stat: stat.count for stat in engine.graph_stats()}
    assert engine.generate(ids(30), GREEDY).usage.reused_tokens == 29
    assert {stat.kind for stat in engine.graph_stats() if stat not in before} <= {"greedy"}


# ---- sizes, modes and time


def test_prompt_sizes():
    assert prompt_sizes(2048) == tuple(size for size in PROMPT_SIZES if size <= 2048)
    assert prompt_sizes(100) == (16, 32, 48, 64, 96, 100) and prompt_sizes(4096)[-1] == 2048
    assert prompt_sizes(2048, 200) == (16, 32, 48, 64, 96, 128, 160, 192)
    assert prompt_sizes(100, sizes=[8, 64, 128, 512]) == (8, 64, 128) and prompt_sizes(100, sizes=[8]) == (8,)


@pytest.mark.parametrize(
    "mode, attention, expected",
    [
        ("full", "triton", "full"), ("full", "flash", "piecewise"), ("full_and_piecewise", "triton", "piecewise"),
        ("full_decode_only", "triton", "none"), ("none", "flash", "none"), ("piecewise", "cudnn", "piecewise"),
    ],
)  # fmt: skip
def test_dispatch_of_prompt_passes(mode, attention, expected):
    dispatcher = Dispatcher(mode, (1,), (16, 64), attention)
    assert dispatcher.plan_prompt(17) == ((expected, 64) if expected != "none" else ("none", 17))
    assert dispatcher.plan_prompt(65) == ("none", 65), (
        "a pass above the largest captured size was not dispatched to launches"
    )


def test_tokens_within_a_time_limit():
    attention = Attention(hidden=4096, heads=32, kv_heads=8, head_dim=128)
    seconds = {PromptDescriptor(16, 0): 1e-9}
    seconds |= {PromptDescriptor(n, 8): s for n, s in {16: 0.003, 512: 0.006, 1024: 0.011, 2048: 0.02}.items()}

    def within(*args, block=attention):
        flops = lambda start, tokens: 35 * block.attention_flops(start, start + tokens)  # noqa: E731
        model = SimpleNamespace(prompt_attention_flops=flops, adapter_forms=(False,))
        return PromptPasses.tokens_within(SimpleNamespace(seconds=seconds, model=model), *args)

    assert [within(limit, 0, 4096) for limit in (0.001, 0.004, 0.015, 1.0)] == [16, 16, 1024, 2048]
    assert within(0.015, 30_000, 4096) < 1024, "the estimate ignores the time of attention to earlier positions"
    assert within(0.015, 30_000, 4096, block=replace(attention, window=1024)) == 1024, "the window is ignored"
    assert within(0.015, 0, 700) == 700


def test_attention_flops_of_a_prompt_pass():
    """Layers with a window attend to that many positions. The last layer is cut."""
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    model = tiny_engine(num_layers=3, layer_types=kinds, sliding_window=24).model
    of_layer = 4 * 4 * 64  # For each pair of positions.
    assert model.prompt_attention_flops(100, 3) == of_layer * (3 * 24 + 101 + 102 + 103)
    assert model.prompt_attention_flops(22, 3) == of_layer * (23 + 24 + 24 + 23 + 24 + 25)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(prompt_attention="fast"), "prompt_attention must be auto, triton, flash or cudnn, got 'fast'"),
        (dict(prompt_graph_sizes=[64, 16]), "prompt_graph_sizes must be ascending integers from 1 to .* got [64, 16]"),
        (dict(prompt_graph_sizes=7), "prompt_graph_sizes must be ascending integers from 1 to .* got 7"),
        (dict(prompt_graph_max_tokens=0), "prompt_graph_max_tokens must be an integer from 1 to"),
        (
            dict(prompt_graph_sizes=[64], prompt_graph_max_tokens=64),
            "cannot be used with prompt_graph_max_tokens; leave",
        ),
        (dict(prompt_graph_sizes=[64], graph="full_decode_only"), "prompt_graph_sizes: no prompt pass is captured"),
        (dict(prompt_graph_max_tokens=2048, graph="none"), 'no prompt pass is captured with graph="none"; leave one'),
        (dict(prompt_attention="triton"), "prompt_attention triton needs a GPU of compute capability 9.x"),
        *[(dict(prompt_ms=wrong), "prompt_ms must be a number from 0.1 to") for wrong in (0, "5", True, float("nan"))],
    ],
)
def test_invalid_graph_options_are_refused(options, message):
    # The properties of the GPU are unknown here, so Triton's prompt attention is not supported.
    cuda = torch.device("cuda")
    with pytest.raises(ParameterError, match=message.replace("[", "\\[")) as refused:
        plan_graphs(EngineOptions(slots=4, **options), "triton", tiny_config(), torch.float32, cuda)
    assert refused.value.argument in options and refused.value.code in ("type", "range", "choice", "conflict")


@pytest.mark.parametrize("options, changed", [
    ({"prompt_attention": "flash"}, True), ({"prompt_attention": "cudnn", "graph": "full"}, True),
    ({"prompt_attention": "flash", "graph": "full_and_piecewise"}, False),
    ({"prompt_attention": "flash", "graph": "full_decode_only"}, False), ({}, False),
])  # fmt: skip
def test_changed_mode_of_prompt_passes_is_noted(options, changed):
    plan = plan_graphs(EngineOptions(**options), "triton", tiny_config(), torch.float32, torch.device("cuda"))
    assert plan.graph == options.get("graph", "full") and (plan.note is not None) == changed
    cpu = plan_graphs(EngineOptions(**options), "torch", tiny_config(), torch.float32, torch.device("cpu"))
    assert cpu.note is None


def test_idle_capture_ends():
    class Engine:
        def __init__(self, *left):
            self.left = list(left)

        def capture_next(self):
            return self.left.pop(0)

    engine = Engine(True, True, False, True)
    IdleCapture(engine).join()
    assert engine.left == [True]
    engine = Engine(*[True] * 10_000)
    idle = IdleCapture(engine)
    idle.end()
    assert not idle.is_alive()
