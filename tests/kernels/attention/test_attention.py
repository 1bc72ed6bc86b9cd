from dataclasses import replace

import pytest
import torch
from util import BF16_ROUNDING, DEVICE, Case, assert_close, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.attention.attention import AttentionConfig, attention, attention_ref
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig, attention_rows
from tridecode.state.kv import PAGE
from tridecode.tuning import tuned
from tridecode.tuning.choose import attention_shape
from tridecode.tuning.shapes import MAX_SPLITS

EPS = 1e-6
SPLITS = 4


def buffers(positions, kv_heads, group, head_dim, page, pages, dtype, qk_norm, seed=0):
    """K/V scattered over shuffled pages, everything not yet written poisoned."""
    rows, heads = len(positions), kv_heads * group
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(seed)).view(rows, pages)
    pool = random(rows * pages, 2, 2, kv_heads, page, head_dim, dtype=dtype, seed=1)
    k, v = pool[:, 1].unbind(1)  # one layer's part of each page, as in the cache
    for row, position in enumerate(positions):
        for at in range(position, pages * page):
            k[table[row, at // page], :, at % page] = float("nan")
            v[table[row, at // page], :, at % page] = float("nan")
    act = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    angle = torch.rand(pages * page, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    return dict(
        meta=meta_rows(*positions),
        page_table=table.int().to(DEVICE),
        qkv=random(rows, (heads + 2 * kv_heads) * head_dim, seed=4),
        q_norm=norm_weight(head_dim, dtype) if qk_norm else None,
        k_norm=norm_weight(head_dim, dtype) if qk_norm else None,
        cos=angle.cos().to(DEVICE),
        sin=angle.sin().to(DEVICE),
        k_cache=k,
        v_cache=v,
        partial=poisoned(rows, heads, MAX_SPLITS, head_dim),
        lse=poisoned(rows, heads, MAX_SPLITS, 2),
        counter=torch.zeros(rows, kv_heads, dtype=torch.int32, device=DEVICE),
        out=poisoned(rows, heads * head_dim, dtype=act),
        scale=head_dim**-0.5,
        eps=EPS,
        window=0,
    )


def clone(args):
    return {name: a.clone() if isinstance(a, torch.Tensor) else a for name, a in args.items()}


def of_rows(shape: AttentionConfig, programs: int) -> AttentionRowsConfig:
    return AttentionRowsConfig(shape.block_t, shape.splits, shape.num_warps, shape.registers, shape.ahead, programs)


def check(args, shape, tolerance):
    """All forms; what that of one row left stays in args."""
    check_form(attention_rows, clone(args), of_rows(shape, programs=3), tolerance)
    check_form(attention_rows, clone(args), replace(of_rows(shape, programs=2), stages=3), tolerance)
    if len(args["out"]) > 1:
        for few, turns in ((1, 1), (1, 3), (2, 64)):
            check_form(attention, clone(args), replace(shape, few=few, turns=turns), tolerance)
    check_form(attention, args, shape, tolerance)


def check_form(form, args, shape, tolerance):
    ref = clone(args)
    ref["out"] = ref["out"].float()
    form(**args, config=shape)
    attention_ref(**ref)
    assert_close(args["out"], ref["out"], tolerance, "out")
    assert args["counter"].eq(0).all(), "the counters must be zero between launches"
    for name in ("k_cache", "v_cache"):
        written = args[name].nan_to_num(0.0)
        expected = ref[name].nan_to_num(0.0)
        assert torch.equal(args[name].isnan(), ref[name].isnan()), f"{name}: other positions were touched"
        assert_close(written, expected, BF16_ROUNDING if args[name].dtype == torch.bfloat16 else 2e-4, name)


FORMS = pytest.mark.parametrize(
    "form, of",
    [(attention, lambda shape: shape), (attention, lambda shape: replace(shape, few=1, turns=2)),
     (attention_rows, lambda shape: of_rows(shape, programs=5))],
    ids=["one row", "few rows", "rows"],
)  # fmt: skip
CASES = cases(
    Case("qwen3_g2_d128", dict(kv_heads=8, group=2, head_dim=128), dict(kv_heads=1, group=2, head_dim=128)),
    Case("qwen3-4b_g4_d128", dict(kv_heads=8, group=4, head_dim=128), dict(kv_heads=2, group=4, head_dim=128)),
    Case("llama_g4_d64", dict(kv_heads=8, group=4, head_dim=64), dict(kv_heads=1, group=4, head_dim=64)),
    Case("qwen2_g7_d64", dict(kv_heads=2, group=7, head_dim=64), dict(kv_heads=1, group=7, head_dim=64)),
    Case("g5_d80", dict(kv_heads=4, group=5, head_dim=80), dict(kv_heads=1, group=5, head_dim=80)),
    Case("g3_d96", dict(kv_heads=8, group=3, head_dim=96), dict(kv_heads=1, group=3, head_dim=96)),
    Case("mha_g1_d128", dict(kv_heads=32, group=1, head_dim=128), dict(kv_heads=2, group=1, head_dim=128)),
    Case("g12_d64", dict(kv_heads=4, group=12, head_dim=64), dict(kv_heads=1, group=12, head_dim=64)),
    Case("g8_d256", dict(kv_heads=4, group=8, head_dim=256), dict(kv_heads=1, group=8, head_dim=256)),
)
# bf16: queries and probabilities are rounded to bf16 before the tensor cores, the output to bf16 after them
TOLERANCE = {torch.bfloat16: 4e-3 + 2 * BF16_ROUNDING, torch.float16: 1e-3, torch.float32: 1e-5}
POSITIONS = pytest.mark.parametrize(
    "position", [0, 1, 31, 32, 100, 255] if DEVICE == "cpu" else [0, 1, 63, 64, 65, 500, 1023, 4000]
)


@CASES
@POSITIONS
def test_attention_matches_reference(case, position):
    page, pages = (64, 4) if DEVICE == "cpu" else (256, 16)
    args = buffers((position,), **case.sizes, page=page, pages=pages, dtype=torch.bfloat16, qk_norm=True)
    check(args, AttentionConfig(block_t=32, splits=SPLITS), TOLERANCE[torch.bfloat16])


# block_t 32: nothing, one tile and two at their edges, then splits; a page has two tiles
AROUND_TWO_TILES = pytest.mark.parametrize("position", [0, 1, 31, 32, 33, 63, 64, 65, 96, 97, 130, 255])


@AROUND_TWO_TILES
@pytest.mark.parametrize("ahead", [1, 2])
def test_tiles_ahead_of_the_wait(position, ahead):
    args = buffers((position,), 1, 4, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
    check(args, AttentionConfig(block_t=32, splits=SPLITS, ahead=ahead), TOLERANCE[torch.float16])
    used = (~args["partial"][0].isnan()).any(-1).sum(-1)  # partial results of each head
    assert used.eq(0).all() if position <= 32 * ahead else used.ge(2).all(), "wrong number of splits"


@pytest.mark.parametrize("position", [16, 17, 32, 40, 64])
def test_tiles_ahead_on_pages_of_their_own(position):
    args = buffers((position,), 2, 2, 80, page=16, pages=6, dtype=torch.bfloat16, qk_norm=False)
    check(args, AttentionConfig(block_t=16, splits=SPLITS, ahead=2), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("splits", [1, 16, MAX_SPLITS], ids=lambda splits: f"splits_{splits}")
@pytest.mark.parametrize("position", [33, 255])
def test_one_split_and_as_many_as_the_workspace_holds(position, splits):
    args = buffers((position,), 1, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=False)
    check(args, AttentionConfig(block_t=16, splits=splits, ahead=2), TOLERANCE[torch.float16])


def test_more_splits_than_the_workspace_holds_are_refused():
    assert max(tuned.VALUES[AttentionConfig]["splits"]) <= MAX_SPLITS, "a user's table may say so"
    args = buffers((5,), 1, 2, 64, page=64, pages=1, dtype=torch.float16, qk_norm=False)
    with pytest.raises(AssertionError, match="more splits"):
        attention(**args, config=AttentionConfig(splits=2 * MAX_SPLITS))


@pytest.mark.parametrize("position", [0, 15, 16, 17, 63, 64, 65, 80, 127, 128, 200, 255])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_tile_may_span_pages(position, ahead):
    args = buffers((position, 20), 1, 2, 64, page=16, pages=16, dtype=torch.float16, qk_norm=False)
    check(args, AttentionConfig(block_t=64, splits=SPLITS, ahead=ahead), TOLERANCE[torch.float16])


def test_tiles_that_straddle_pages_are_refused():
    args = buffers((5,), 1, 2, 64, page=96, pages=1, dtype=torch.float16, qk_norm=False)
    with pytest.raises(AssertionError, match="whole pages"):
        attention(**args, config=AttentionConfig(block_t=64, splits=SPLITS))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("position", [5, 127, 128, 129, 256, 300] + ([1023, 4000] if DEVICE == "cuda" else []))
def test_the_shape_that_engines_use(head_dim, position):
    args = buffers(
        (position,), 1, 4, head_dim, page=PAGE, pages=6 if DEVICE == "cpu" else 64, dtype=torch.bfloat16, qk_norm=True
    )
    check(args, attention_shape(head_dim, torch.bfloat16, capability=90), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("position", [1, 77, 200])
def test_attention_in_other_dtypes(dtype, position):
    args = buffers((position,), 2, 4, 64, page=64, pages=4, dtype=dtype, qk_norm=False)
    check(args, AttentionConfig(block_t=32, splits=SPLITS), TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 16, 50, 96])
@pytest.mark.parametrize("position", [5, 49, 50, 128, 170, 255])
@pytest.mark.parametrize("ahead", [1, 2])
def test_sliding_window(window, position, ahead):
    args = buffers((position,), 1, 4, 64, page=64, pages=4, dtype=torch.float16, qk_norm=False)
    for at in range(max(position - window + 1, 0)):  # what is behind the window may hold anything
        page = args["page_table"][0, at // 64].long()
        args["k_cache"][page, :, at % 64] = args["v_cache"][page, :, at % 64] = float("nan")
    check({**args, "window": window}, AttentionConfig(block_t=16, splits=SPLITS, ahead=ahead), TOLERANCE[torch.float16])


FEW = pytest.mark.parametrize("few, turns", [(1, 2), (2, 1), (3, 64)], ids=["long rows have more", "each turn", "few"])


@CASES
@FEW
def test_few_rows_have_few_splits(case, few, turns):
    page, pages = (64, 4) if DEVICE == "cpu" else (256, 16)
    positions = (0, 200, 33) if DEVICE == "cpu" else (0, 4000, 65, 1023, 500)
    args = buffers(positions, **case.sizes, page=page, pages=pages, dtype=torch.bfloat16, qk_norm=True)
    shape = AttentionConfig(block_t=32, splits=SPLITS, ahead=2, few=few, turns=turns)
    check_form(attention, args, shape, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("few, turns, position, splits", [
    (2, 4, 16, 0), (2, 4, 60, 2), (2, 4, 128, 2), (2, 4, 129, 3), (2, 4, 255, 4), (1, 64, 255, 0), (9, 1, 255, 8),
    (2, 1, 128, 8), (2, 1, 144, 5),
])  # fmt: skip
def test_the_splits_of_a_row_go_by_its_length(few, turns, position, splits):
    args = buffers((position, 3, 145), 1, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
    shape = AttentionConfig(block_t=16, splits=8, ahead=1, few=few, turns=turns)
    check_form(attention, args, shape, TOLERANCE[torch.float16])
    used = (~args["partial"].isnan()).any(-1).sum(-1)  # partial results of each head
    assert used[0].eq(splits).all() and used[1].eq(0).all()


@pytest.mark.parametrize("positions", [(255, 240), (240, 255), (200, 255, 241)])
def test_windows_of_few_rows_begin_anywhere_in_a_block(positions):
    args = buffers(positions, 1, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=False)
    shape = AttentionConfig(block_t=16, splits=8, ahead=1, few=1, turns=1)
    check_form(attention, {**args, "window": 82}, shape, TOLERANCE[torch.float16])


@FORMS
@pytest.mark.parametrize("ahead", [1, 2])
def test_rows_have_their_own_positions_pages_and_status(form, of, ahead):
    args = buffers((70, 0, 130), 2, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
    args["meta"][1, layout.STATUS] = layout.STOP
    before = args["k_cache"][args["page_table"][1].long()].clone()
    form(**args, config=of(AttentionConfig(block_t=32, splits=SPLITS, ahead=ahead)))
    assert args["out"][1].isnan().all()
    after = args["k_cache"][args["page_table"][1].long()]
    assert torch.equal(after.isnan(), before.isnan()), "a dead row wrote K"
    ref = {name: a.clone() if isinstance(a, torch.Tensor) else a for name, a in args.items()}
    attention_ref(**ref)
    assert_close(args["out"][[0, 2]], ref["out"][[0, 2]], TOLERANCE[torch.float16])


@FORMS
def test_a_row_takes_its_slots_state_whichever_row_it_is(form, of):
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        args = buffers((70, 0, 130), 2, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
        args["meta"], args["qkv"] = args["meta"][list(order)], args["qkv"][list(order)]
        form(**args, config=of(AttentionConfig(block_t=32, splits=SPLITS)))
        found.append((args["out"][torch.tensor(order).argsort().to(DEVICE)], args["k_cache"], args["v_cache"]))
    for first, second in zip(*found):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_any_number_of_programs_does_the_work_of_all_rows(programs):
    args = buffers((70, 0, 130, 255, 31, 3), 2, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
    args["meta"][5, layout.STATUS] = layout.STOP
    ref = clone(args)
    attention_ref(**ref)
    attention_rows(**args, config=AttentionRowsConfig(block_t=16, splits=SPLITS, least=1, programs=programs))
    assert args["out"][5].isnan().all()
    assert_close(args["out"][:5], ref["out"][:5], TOLERANCE[torch.float16])
    assert args["counter"].eq(0).all()


@FORMS
def test_a_row_is_bit_equal_whatever_stands_beside_it(form, of):
    found = []
    for others in ((9,), (5, 255, 90), (200, 0)):
        args = buffers((130, *others), 2, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
        alone = buffers((130,), 2, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
        for name in ("k_cache", "v_cache"):
            args[name][args["page_table"][0].long()] = alone[name][alone["page_table"][0].long()]
        args["qkv"][0] = alone["qkv"][0]
        form(**args, config=of(AttentionConfig(block_t=16, splits=SPLITS)))
        found.append(args["out"][0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@FORMS
def test_no_running_row_at_all(form, of):
    args = buffers((70, 12), 2, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=True)
    args["meta"][:, layout.STATUS] = layout.STOP
    form(**args, config=of(AttentionConfig(block_t=32, splits=SPLITS)))
    assert args["out"].isnan().all()


def test_large_logits_stay_finite():
    args = buffers((90,), 1, 2, 64, page=64, pages=4, dtype=torch.float16, qk_norm=False)
    args["qkv"] *= 60
    check(args, AttentionConfig(block_t=32, splits=SPLITS), 5e-3)
