"""Passes of several rows: against references, graphs of every size and mode against launches, and dispatch."""

from dataclasses import replace

import pytest
import torch
from models import CUDA, DEVICE, FAMILIES, configs_of, tiny_config
from util import assert_close, covering

from tridecode.checkpoint.load import random_weights
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.layout import LIMIT_REACHED, STATUS
from tridecode.sampling import SamplingParams
from tridecode.state.slots import Slots
from tridecode.step.dispatch import MODES, SIZES, Dispatcher, Support, graph_sizes, lowered
from tridecode.step.graphs import DecodePasses, first_batches, launcher, make_passes
from tridecode.step.model import make_model
from tridecode.step.run import run_reference

needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA graphs exist on a GPU only")
DTYPE, TOLERANCE = (torch.bfloat16, 3e-2) if CUDA else (torch.float32, 1e-4)
ROLES = ("qkv", "o_proj", "gate_up", "down", "lm_head")
REGISTERS = {role: MatmulConfig(n, 1, 2, 2) for role, n in zip(ROLES, (64, 32, 64, 32, 128))}
ATTENTION = AttentionRowsConfig(block_t=32, splits=3, least=1, programs=3)
TILES = dict.fromkeys(ROLES, TilesConfig(32, 32, 2))
_WIDE = WideConfig(64, 32, 2) if CUDA else WideConfig(32, 32, 2, num_warps=2)
_SPLIT = replace(_WIDE, split=2)
WIDE = dict.fromkeys(ROLES, _SPLIT) | {"lm_head": _WIDE}
INVARIANT = dict.fromkeys(ROLES, replace(_SPLIT, block_m=16)) | {"lm_head": replace(_WIDE, block_m=16)}
PARAMS = (  # One request for each kind of sampling and of penalties.
    SamplingParams(temperature=0, seed=1),
    SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=7),
    SamplingParams(temperature=1.1, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={3: 2.0}, seed=3),
    SamplingParams(temperature=0, logprobs=3, seed=5),
    SamplingParams(temperature=0.7, min_p=0.02, presence_penalty=0.3, logprobs=0, seed=9),
)


def model_of(rows, by_role=None, dtype=DTYPE, page=16, **overrides):
    """Return a model with `rows` slots, whose pages of 16 positions are shuffled and poisoned."""
    config = tiny_config(**overrides)
    weights = random_weights(config, DEVICE, dtype, seed=0)
    if by_role is None and not CUDA:
        by_role = REGISTERS
    configs = by_role and {1: configs_of(config, weights, by_role, ATTENTION)}
    model = make_model(config, weights, 64, slots=rows, page=page, configs=configs)
    model.kv.pool.fill_(float("nan"))
    return model


def begin_all(model, params=PARAMS[:1], idle=(), known=1):
    """Start a request in every slot, with different numbers of known tokens, at least `known`. Return their prompts.

    The requests in `idle` do not run.
    """
    slots, rows = Slots(model), model.rows
    order = torch.randperm(4 * rows, generator=torch.Generator().manual_seed(4)).tolist()
    slots.pages.take(4 * rows)
    prompts = []
    for row in range(rows):
        slots[row].pages = order[4 * row : 4 * row + 4]
        ids = [(7 * i + 3 * row) % 331 for i in range(known + row % 5)]
        slots.write_tokens(slots[row], ids, 60)
        slots.begin(slots[row], row, params[row % len(params)], position=0, n_known=len(ids), limit=60, stop_ids=())
        prompts.append(ids)
    model.workspace.meta[list(idle), STATUS] = LIMIT_REACHED
    return prompts


def run(steps, kind, passes, rows=None):
    for _ in range(passes):
        steps.replay(kind, rows)
    if CUDA:
        torch.cuda.synchronize()


def state(model):
    ws = model.workspace
    return {name: getattr(ws, name).clone() for name in ("meta", "tokens", "counts", "logits", "out")}


@covering(1, family=FAMILIES.keys(), rows=[1, 2, 3, 5, 8, 16, 31, 64] if CUDA else [3, 8])
def test_every_row_matches_the_reference(family, rows):
    model, reference = (model_of(rows, **FAMILIES[family]) for _ in range(2))
    idle = {rows // 2} if rows > 2 else set()
    # All tokens that the passes embed are known. Sampled tokens could differ if two are equally likely.
    for m in (model, reference):
        begin_all(m, idle=idle, known=3)
    run(DecodePasses(model, launcher(model)), "greedy", 3)
    run(DecodePasses(reference, run_reference), "greedy", 3)
    for row in set(range(rows)) - idle:
        assert_close(model.workspace.logits[row], reference.workspace.logits[row], TOLERANCE, f"row {row} of {rows}")
    for row in idle:
        assert model.workspace.logits[row].eq(0).all(), "the pass wrote a row that is not active"


@pytest.mark.parametrize(
    "shapes, rows", [(TILES, 4), (WIDE, 4), (INVARIANT, 1)], ids=["tiles", "wide", "invariant_one_row"]
)
def test_other_linear_kernels_match_the_reference(shapes, rows):
    model, reference = (model_of(rows, shapes) for _ in range(2))
    for m in (model, reference):
        begin_all(m, known=2)
    run(DecodePasses(model, launcher(model)), "greedy", 2)
    run(DecodePasses(reference, run_reference), "greedy", 2)
    assert_close(model.workspace.logits, reference.workspace.logits, TOLERANCE)


@pytest.mark.parametrize("kind", ["sample", "logprobs"] if CUDA else ["logprobs"])  # A logprobs pass also samples.
def test_row_samples_the_same_token_if_other_rows_are_idle(kind):
    """The passes have the same number of rows. One row is greedy among rows that sample."""
    rows, steps = 5, 4 if CUDA else 2
    together = model_of(rows)
    begin_all(together, PARAMS)
    run(DecodePasses(together, launcher(together)), kind, steps)
    for row in range(rows if CUDA else 2):  # The other rows do not sample a token within these steps.
        single = model_of(rows)
        begin_all(single, PARAMS, idle=set(range(rows)) - {row})
        run(DecodePasses(single, launcher(single)), kind, steps)
        assert torch.equal(single.workspace.tokens[row], together.workspace.tokens[row])
        assert torch.equal(single.workspace.logits[row], together.workspace.logits[row]), (
            "the logits of a row changed with other rows in the pass"
        )
    greedy = model_of(rows)
    begin_all(greedy, PARAMS, idle=set(range(1, rows)))
    run(DecodePasses(greedy, launcher(greedy)), "greedy", steps)
    assert torch.equal(greedy.workspace.tokens[0], together.workspace.tokens[0])


def test_nan_ends_only_its_own_row():
    model, well = (model_of(4) for _ in range(2))
    for m in (model, well):
        begin_all(m)
    page = model.kv.page_table[2, 0].long()
    model.kv.pool[page, 0, :, :, :8] = float("nan")
    steps = DecodePasses(model, launcher(model))
    run(steps, "greedy", 2)
    model.kv.pool[page, 1, :, :, 0] = float("inf")  # An earlier pass may leave such a value in an unused position.
    run(steps, "greedy", 1)
    run(DecodePasses(well, launcher(well)), "greedy", 3)
    assert model.workspace.meta[2, STATUS] == 3
    for row in (0, 1, 3):
        assert torch.equal(model.workspace.tokens[row], well.workspace.tokens[row])
        assert torch.equal(model.workspace.logits[row], well.workspace.logits[row])


@needs_gpu
@covering(1, kind=["greedy", "sample", "logprobs"], mode=[mode for mode in MODES if mode != "none"])
def test_graphs_are_bit_equal_to_eager_launches(mode, kind):
    for rows in (1, 2, 3, 8, 13, 64):
        states = []
        for graphs in (True, False):
            model = model_of(rows)
            sizes = graph_sizes(rows)
            steps = DecodePasses(model, launcher(model))
            if graphs:
                steps = DecodePasses(model, dispatcher=Dispatcher(mode, sizes), batches=first_batches(sizes, (kind,)))
                steps.check_addresses = True
            begin_all(model, PARAMS)
            run(steps, kind, 4)
            states.append(state(model))
        for name, a in states[0].items():
            assert torch.equal(a, states[1][name]), f"{rows} rows: {name} differs"


@needs_gpu
def test_padding_rows_write_nothing_and_change_nothing():
    model, exact = model_of(8), model_of(8)
    steps = DecodePasses(model, dispatcher=Dispatcher("full", (1, 2, 8)), batches=first_batches((1, 2, 8), ("greedy",)))
    for m in (model, exact):
        begin_all(m, idle=range(5, 8))
    run(steps, "greedy", 3, rows=5)
    run(DecodePasses(exact, launcher(exact)), "greedy", 3)
    for name, a in state(exact).items():
        assert torch.equal(a, state(model)[name]), name


@needs_gpu
def test_torch_attention_runs_between_the_parts_of_a_graph():
    model, reference = model_of(3), model_of(3)
    steps = make_passes(model, "triton", Dispatcher(lowered("full", Support.NEVER), (1, 2, 3)), "torch")
    for m in (model, reference):
        begin_all(m, known=3)
    run(steps, "greedy", 3)
    run(DecodePasses(reference, run_reference), "greedy", 3)
    assert_close(model.workspace.logits, reference.workspace.logits, TOLERANCE)
    assert [row.mode for row in steps.dispatcher.stats()] == ["piecewise"]


@pytest.mark.parametrize(
    "slots, sizes, expected",
    [
        (1, None, (1,)),
        (5, None, (1, 2, 4, 5)),
        (16, None, (1, 2, 4, 8, 16)),
        (64, None, SIZES),
        (6, (2, 4, 8, 16), (2, 4, 8)),
        (6, (2, 4), (2, 4)),
    ],
)
def test_captured_sizes_depend_on_the_slots(slots, sizes, expected):
    assert graph_sizes(slots, sizes) == expected


def test_dispatch_pads_to_the_next_size_and_counts():
    dispatcher = Dispatcher("full", (1, 4))
    for rows, mode, padded in ((1, "full", 1), (3, "full", 4), (3, "full", 4), (5, "none", 5)):
        planned, batch = dispatcher.plan("greedy", rows)
        dispatcher.count(rows, batch, planned)
        assert (planned, batch.rows) == (mode, padded)
    rows = [(s.rows, s.padded, s.padding, s.mode, s.count) for s in dispatcher.stats()]
    assert rows == [(1, 1, 0, "full", 1), (3, 4, 1, "full", 2), (5, 5, 0, "none", 1)]


@pytest.mark.parametrize("mode, decode", [(mode, halves[1]) for mode, halves in MODES.items()])
def test_mode_selects_the_mode_of_decode_passes(mode, decode):
    assert Dispatcher(mode, (1,)).plan("greedy", 1)[0] == decode


@pytest.mark.parametrize(
    "mode, support, expected",
    [
        ("full", Support.NEVER, "piecewise"),
        ("full_and_piecewise", Support.NEVER, "piecewise"),
        ("full_decode_only", Support.NEVER, "none"),
        ("piecewise", Support.NEVER, "piecewise"),
        ("none", Support.NEVER, "none"),
        *((mode, Support.UNIFORM_SINGLE_TOKEN_DECODE, mode) for mode in MODES),
        *((mode, Support.ALWAYS, mode) for mode in MODES),
    ],
)
def test_mode_is_lowered_if_attention_cannot_be_captured(mode, support, expected):
    assert lowered(mode, support) == expected
