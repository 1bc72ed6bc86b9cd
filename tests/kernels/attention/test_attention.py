"""Attention of one row and of several rows, in all kernels, against the reference."""

from dataclasses import replace

import pytest
import torch
from attention_util import CASES, MAX_SPLITS, SPLITS, TOLERANCE, check, clone, layer, rows_config
from util import DEVICE, assert_close, covering

from tridecode import layout
from tridecode.kernels.attention.attention import AttentionConfig, attention, attention_ref
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig, attention_rows

PAGE, PAGES = (64, 4) if DEVICE == "cpu" else (256, 16)
BF16 = dict(dtype=torch.bfloat16, qk_norm=True)
CONFIG = AttentionConfig(block_t=32, splits=SPLITS)


def check_forms(args, config, dtype=torch.float16, tolerance=0.0):
    """Check all kernels on copies of args, and attention of one row on args itself."""
    tolerance = tolerance or TOLERANCE[dtype]
    check(attention_rows, clone(args), rows_config(config, programs=3), tolerance)
    check(attention_rows, clone(args), replace(rows_config(config, programs=2), stages=3), tolerance)
    if len(args.out) > 1:
        for short, iterations in ((1, 1), (1, 3), (2, 64)):
            check(attention, clone(args), replace(config, short_splits=short, short_iterations=iterations), tolerance)
    check(attention, args, config, tolerance)


FORMS = pytest.mark.parametrize(
    "form, config_of",
    [(attention, lambda config: config),
     (attention, lambda config: replace(config, short_splits=1, short_iterations=2)),
     (attention_rows, lambda config: rows_config(config, programs=5))],
    ids=["one_row", "few_rows", "rows"],
)  # fmt: skip


@covering(2, case=CASES, position=[0, 32, 255] if DEVICE == "cpu" else [0, 64, 4000])
def test_attention_matches_reference(case, position):
    check_forms(layer((position,), **case.sizes, page=PAGE, pages=PAGES, **BF16), CONFIG, torch.bfloat16)


@covering(2, position=[0, 1, 31, 32, 33, 64, 65, 97, 255], ahead=[1, 2])
def test_tiles_before_the_wait(position, ahead):
    """A tile has 32 positions, and a page has two tiles.

    The positions need no tile, one tile, two tiles, or several splits.
    """
    args = layer((position,), group=4, qk_norm=True)
    check_forms(args, replace(CONFIG, ahead=ahead))
    used = (~args.scratch.partial[0].isnan()).any(-1).sum(-1)  # partial results of each head
    assert used.eq(0).all() if position <= 32 * ahead else used.ge(2).all(), "the kernel used a wrong number of splits"


@pytest.mark.parametrize("position", [16, 17, 32, 40, 64])
def test_tiles_before_the_wait_on_separate_pages(position):
    args = layer((position,), 2, 2, 80, page=16, pages=6, dtype=torch.bfloat16)
    check_forms(args, AttentionConfig(block_t=16, splits=SPLITS, ahead=2), torch.bfloat16)


@covering(1, splits=[1, 16, MAX_SPLITS], position=[33, 255])
def test_number_of_splits_may_be_one_or_the_maximum(position, splits):
    check_forms(layer((position,)), AttentionConfig(block_t=16, splits=splits, ahead=2))


def test_too_many_splits_for_the_scratch_are_rejected():
    with pytest.raises(AssertionError, match="scratch.partial has room for 64 splits"):
        attention(*layer((5,), pages=1), config=AttentionConfig(splits=2 * MAX_SPLITS))


@covering(1, position=[0, 15, 16, 17, 63, 64, 65, 80, 127, 128, 200, 255], ahead=[1, 2])
def test_a_tile_may_span_pages(position, ahead):
    args = layer((position, 20), page=16, pages=16)
    check_forms(args, AttentionConfig(block_t=64, splits=SPLITS, ahead=ahead))


def test_tiles_that_straddle_pages_are_rejected():
    with pytest.raises(AssertionError, match="divisor of the page size 96"):
        attention(*layer((5,), page=96, pages=1), config=AttentionConfig(block_t=64, splits=SPLITS))


@covering(1, head_dim=[64, 128], position=[5, 128, 129, 300] + ([1023, 4000] if DEVICE == "cuda" else []))
def test_the_config_of_one_row_on_hopper(head_dim, position):
    args = layer((position,), 1, 4, head_dim, pages=6 if DEVICE == "cpu" else 64, **BF16)
    check_forms(args, AttentionConfig(block_t=128, splits=16, num_warps=8, ahead=2), torch.bfloat16)


@covering(2, dtype=[torch.float16, torch.float32], position=[1, 200])
def test_attention_in_other_dtypes(dtype, position):
    check_forms(layer((position,), 2, 4, dtype=dtype), CONFIG, dtype)


@covering(2, window=[1, 16, 50, 96], position=[5, 49, 50, 128, 255], ahead=[1, 2])
def test_sliding_window(window, position, ahead):
    args = layer((position,), group=4, window=window)
    for t in range(max(position - window + 1, 0)):  # Positions before the window must not affect the output.
        page = args.kv.table[0, t // 64].long()
        args.kv.k[page, :, t % 64] = args.kv.v[page, :, t % 64] = float("nan")
    check_forms(args, AttentionConfig(block_t=16, splits=SPLITS, ahead=ahead))


@covering(1, case=CASES, splits={"long_rows_have_more": (1, 2), "one_each": (2, 1), "few": (3, 64)})
def test_few_rows_have_few_splits(case, splits):
    short, iterations = splits
    positions = (0, 200, 33) if DEVICE == "cpu" else (0, 4000, 65, 1023, 500)
    args = layer(positions, **case.sizes, page=PAGE, pages=PAGES, **BF16)
    config = replace(CONFIG, ahead=2, short_splits=short, short_iterations=iterations)
    check(attention, args, config, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("short, iterations, position, splits", [
    (2, 4, 16, 0), (2, 4, 60, 2), (2, 4, 128, 2), (2, 4, 129, 3), (2, 4, 255, 4), (1, 64, 255, 0), (9, 1, 255, 8),
    (2, 1, 128, 8), (2, 1, 144, 5),
])  # fmt: skip
def test_the_number_of_splits_of_a_row_depends_on_its_length(short, iterations, position, splits):
    args = layer((position, 3, 145), qk_norm=True)
    config = AttentionConfig(block_t=16, splits=8, ahead=1, short_splits=short, short_iterations=iterations)
    check(attention, args, config, TOLERANCE[torch.float16])
    used = (~args.scratch.partial.isnan()).any(-1).sum(-1)  # partial results of each head
    assert used[0].eq(splits).all() and used[1].eq(0).all()


@pytest.mark.parametrize("positions", [(255, 240), (240, 255), (200, 255, 241)])
def test_windows_of_few_rows_begin_anywhere_in_a_block(positions):
    config = AttentionConfig(block_t=16, splits=8, ahead=1, short_splits=1, short_iterations=1)
    check(attention, layer(positions, window=82), config, TOLERANCE[torch.float16])


@FORMS
@pytest.mark.parametrize("ahead", [1, 2])
def test_rows_have_their_own_positions_pages_and_status(form, config_of, ahead):
    args = layer((70, 0, 130), 2, qk_norm=True)
    args.meta[1, layout.STATUS] = layout.STOP
    ref, pages = clone(args), args.kv.table[1].long()
    before = args.kv.k[pages].clone()
    form(*args, config=config_of(replace(CONFIG, ahead=ahead)))
    assert args.out[1].isnan().all()
    assert torch.equal(args.kv.k[pages].isnan(), before.isnan()), "the kernel wrote K of an idle row"
    attention_ref(*ref)
    assert_close(args.out[[0, 2]], ref.out[[0, 2]], TOLERANCE[torch.float16])


@FORMS
def test_row_uses_the_state_of_its_slot(form, config_of):
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        args = layer((70, 0, 130), 2, qk_norm=True)
        args = args._replace(meta=args.meta[list(order)], qkv=args.qkv[list(order)])
        form(*args, config=config_of(CONFIG))
        results.append((args.out[torch.tensor(order).argsort().to(DEVICE)], args.kv.k, args.kv.v))
    for first, second in zip(*results):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_any_number_of_programs_computes_all_rows(programs):
    args = layer((70, 0, 130, 255, 31, 3), 2, qk_norm=True)
    args.meta[5, layout.STATUS] = layout.STOP
    ref = clone(args)
    attention_ref(*ref)
    attention_rows(*args, config=AttentionRowsConfig(block_t=16, splits=SPLITS, least=1, programs=programs))
    assert args.out[5].isnan().all()
    assert_close(args.out[:5], ref.out[:5], TOLERANCE[torch.float16])
    assert args.scratch.counter.eq(0).all()


@FORMS
def test_a_row_is_bit_equal_with_any_other_rows(form, config_of):
    results = []
    for others in ((9,), (5, 255, 90), (200, 0)):
        args, alone = layer((130, *others), 2, qk_norm=True), layer((130,), 2, qk_norm=True)
        for cache, own in zip(args.kv[1:], alone.kv[1:]):
            cache[args.kv.table[0].long()] = own[alone.kv.table[0].long()]
        args.qkv[0] = alone.qkv[0]
        form(*args, config=config_of(AttentionConfig(block_t=16, splits=SPLITS)))
        results.append(args.out[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@FORMS
def test_idle_rows_write_no_output(form, config_of):
    args = layer((70, 12), 2, qk_norm=True)
    args.meta[:, layout.STATUS] = layout.STOP
    form(*args, config=config_of(CONFIG))
    assert args.out.isnan().all()


def test_large_logits_stay_finite():
    args = layer((90,))
    args.qkv.mul_(60)
    check_forms(args, CONFIG, tolerance=5e-3)
