"""delta_decode: the state of gated delta net layers in decode passes."""

import pytest
import torch
from check import check_op
from delta_util import SIZES, TINY, clone, decode_args, recurrent, transformers_form
from models import CUDA
from util import BF16_ROUNDING, assert_close, poisoned, random

from tridecode import layout
from tridecode.kernels.delta.delta_decode import DELTA_DECODE, DeltaConfig

STATES = ("records.state", "records.window", "records.covered")
ONE = dict(config=DeltaConfig())
TOLERANCE = dict.fromkeys(("out", "records.state"), 1e-5) | {"records.window": 0.0, "records.covered": 0.0}


@SIZES
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_one_row_matches_reference(case, normed):
    args = decode_args((0, 1, 2, 70), normed=normed, **case.sizes)
    check_op(DELTA_DECODE, args, ONE, TOLERANCE, accumulates=STATES)


def test_sigmoid_gate_matches_reference():
    check_op(DELTA_DECODE, decode_args((5,), sigmoid=True, **TINY), ONE, TOLERANCE, accumulates=STATES)


def test_bf16_rows_match_reference():
    args = decode_args((3, 100), dtype=torch.bfloat16, **TINY)
    tolerance = TOLERANCE | {"out": 2 * BF16_ROUNDING, "records.state": BF16_ROUNDING, "records.window": BF16_ROUNDING}
    check_op(DELTA_DECODE, args, ONE, tolerance, accumulates=STATES)


@pytest.mark.parametrize("queries", [1, 4])
def test_fp16_state_matches_reference(queries):
    """A sum that is rounded to another neighbor than in the reference changes an element by up to 2**-10."""
    args = decode_args((40, 3), (38, 3), queries=queries, drafts=True, state_dtype=torch.float16, **TINY)
    for part in args.drafts:
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    args.drafts.g.abs_().neg_()
    tolerance = TOLERANCE | dict.fromkeys(("out", "records.state", "drafts.k", "drafts.u", "drafts.g"), 3e-4)
    check_op(DELTA_DECODE, args, dict(config=DeltaConfig(queries)), tolerance, accumulates=(*STATES, "drafts"))


def test_fp16_state_is_limited_to_its_largest_value():
    args = decode_args((7,), state_dtype=torch.float16, **TINY)
    args.records.state.fill_(60_000.0)
    args.weights.a_log.fill_(-20.0)
    for form in (lambda *a: DELTA_DECODE.launch(*a, **ONE), DELTA_DECODE.ref):
        own = clone(args)
        form(*own)
        assert own.out.isfinite().all()
        assert own.records.state.abs().max() == 65_504.0


def test_idle_rows_among_running_rows():
    args = decode_args((3, 100, 7), **TINY)
    args.meta[1, layout.STATUS], args.meta[1, layout.POSITION] = layout.WAIT, 2**30
    check_op(DELTA_DECODE, args, ONE, TOLERANCE, accumulates=STATES)


@pytest.mark.parametrize("queries, batch", [(2, 4), (4, 1), (8, 2), (8, 8)])
def test_rows_of_drafts_match_reference(queries, batch):
    """The requests have replayed 0, some and 7 drafts, and have 1, some and all of their rows."""
    args = decode_args(
        (40, 1, 0, 23), (38, 1, 9, 16), queries=queries, counts=(queries, 1, queries, 2), drafts=True, **TINY
    )
    for part in args.drafts:
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    args.drafts.g.abs_().neg_()
    config = dict(config=DeltaConfig(queries, batch=batch))
    tolerance = TOLERANCE | dict.fromkeys(("drafts.k", "drafts.u", "drafts.g"), 1e-5)
    check_op(DELTA_DECODE, args, config, tolerance, accumulates=(*STATES, "drafts"))


@pytest.mark.parametrize("position", [0, 1, 77])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16], ids=str)
def test_repeated_pass_leaves_the_same_bits(position, queries, state_dtype):
    args = decode_args((position,), queries=queries, drafts=True, state_dtype=state_dtype, **TINY)
    config = DeltaConfig(queries)
    for form in (lambda *a: DELTA_DECODE.launch(*a, config=config), DELTA_DECODE.ref):
        own = clone(args)
        form(*own)
        first = clone(own)
        own.out.fill_(float("nan"))
        form(*own)
        form(*own)
        tensors = zip((own.out, *own.records, *own.drafts), (first.out, *first.records, *first.drafts), strict=True)
        for again, before in tensors:
            assert torch.equal(again.nan_to_num(0.0), before.nan_to_num(0.0))
        assert not own.out.isnan().any()


class Text:
    """A text of random rows, which passes of one request read from its beginning."""

    def __init__(self, tokens: int, queries: int = 1, **more):
        self.args = decode_args((0,), queries=queries, normed=False, drafts=True, **TINY | more)
        self.rows = random(tokens, self.args.qkvz.shape[1], seed=20)
        self.x = random(tokens, self.args.x.shape[1], seed=21)
        self.out = poisoned(tokens, self.args.out.shape[1])
        self.queries, self.position = queries, 0

    def read(self, count: int, form, accepted: int = 0, wrong: float = 0.0) -> None:
        """Run a pass of `count` rows, whose drafts after the first `accepted` ones are wrong."""
        args, first = self.args, self.position
        end = min(first + count, len(self.rows))
        given = end - first
        for name, source in (("qkvz", self.rows), ("x", self.x)):
            own = getattr(args, name)
            own.fill_(float("nan"))
            own[:given] = source[first:end]
            own[1 + accepted : given] += wrong
        args.meta[:, layout.POSITION] = torch.arange(first, first + self.queries, dtype=torch.int32)
        args.meta[:, layout.STATUS] = layout.WAIT
        args.meta[:given, layout.STATUS] = layout.RUN
        form(*args)
        right = min(1 + accepted, given)
        self.out[first : first + right] = args.out[:right]
        self.position += right


def launched(queries: int):
    return lambda *args: DELTA_DECODE.launch(*args, config=DeltaConfig(queries))


FORMS = pytest.mark.parametrize("form", ["launch", "reference"])


@FORMS
def test_rows_one_after_the_other_agree_with_transformers(form):
    text = Text(40)
    for _ in range(40):
        text.read(1, launched(1) if form == "launch" else DELTA_DECODE.ref)
    out, state = recurrent(text.args, text.rows, text.x)
    assert_close(text.out, out, 1e-5, "outputs")
    assert_close(text.args.records.state[text.args.meta[0, layout.RECORD]], state, 1e-5, "state")


@FORMS
def test_any_number_of_accepted_drafts_agrees_with_transformers(form):
    queries, text = 8, Text(60, queries=8)
    run = launched(queries) if form == "launch" else DELTA_DECODE.ref
    for accepted in (7, 0, 3, 1, 6, 2, 5, 4, 7, 7):  # the last pass has fewer rows
        text.read(queries, run, accepted, wrong=5.0)
    text.read(1, run)  # replays the drafts that the last pass accepted
    end = text.position
    assert end > 50
    out, state = recurrent(text.args, text.rows[:end], text.x[:end])
    assert_close(text.out[:end], out, 1e-5, "outputs")
    assert_close(text.args.records.state[text.args.meta[0, layout.RECORD]], state, 1e-5, "state")


def test_state_stays_exact_over_many_passes():
    """On a GPU the text has 100,000 tokens. Heads that hardly forget add up the rounding errors of all passes."""
    tokens = 100_000 if CUDA else 200
    text = Text(tokens, **dict(key=2, value=4, key_dim=128, value_dim=128, hidden=64) if CUDA else TINY)
    args, config = text.args, DeltaConfig()
    args.weights.a_log[::2] = -12.0  # the state keeps 99.99% of its values
    args.meta[:, layout.POSITION] = 0
    for row, x in zip(text.rows, text.x):
        args.qkvz[0], args.x[0] = row, x
        DELTA_DECODE.launch(*args, config=config)
        args.meta[:, layout.POSITION] += 1
    out, state = transformers_form("torch_chunk_gated_delta_rule", args.weights, args.heads, text.rows, text.x)
    assert_close(args.records.state[args.meta[0, layout.RECORD]], state, 1e-4, "state")
    assert_close(args.out[0], out[-1], 1e-4, "last output")
