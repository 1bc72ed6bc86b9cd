"""The ops of gated delta net layers in prompt passes: convolution, blocks, scan, gated norm."""

import pytest
import torch
from check import check_op
from delta_util import SIZES, TINY, clone, prompt_args, read_prompt, transformers_form
from util import BF16_ROUNDING, CUDA, DEVICE, assert_close, poisoned, random

from tridecode.kernels.delta.delta_chunks import DELTA_CHUNKS, DeltaChunksConfig
from tridecode.kernels.delta.delta_conv import DELTA_CONV
from tridecode.kernels.delta.delta_scan import DELTA_SCAN
from tridecode.kernels.delta.gated_norm import GATED_NORM
from tridecode.kernels.device import device_of
from tridecode.layout import Chunk
from tridecode.tuning.delta import delta_prompt_configs

CONFIG = DeltaChunksConfig(programs=3, block_v=16)
# Several requests: from the beginning, in the middle of a block, within one block, and one row.
CHUNKS = Chunk(2, 1, 66, 0), Chunk(0, 67, 100, 94), Chunk(1, 167, 5, 66), Chunk(3, 172, 1, 64)
SNAPSHOTS = (2, 64, 9), (0, 128, 10), (0, 192, 11), (0, 256, 12)  # slot, position, record; the last is not reached


@SIZES
def test_convolution_matches_reference(case):
    args = prompt_args(CHUNKS, SNAPSHOTS, **case.sizes)
    tolerance = {"mixed": 1e-5, "rates": 1e-5, "records.window": 0.0}
    check_op(DELTA_CONV, args.conv, tolerance=tolerance, accumulates=("records.window",))


@pytest.mark.parametrize("start", [0, 1, 2, 61, 62, 63])
@pytest.mark.parametrize("count", [1, 2, 3, 16, 17])
def test_windows_of_short_chunks(start, count):
    args = prompt_args((Chunk(0, 0, count, start),), ((0, 64, 3),), **TINY)
    tolerance = {"mixed": 1e-5, "rates": 1e-5, "records.window": 0.0}
    check_op(DELTA_CONV, args.conv, tolerance=tolerance, accumulates=("records.window",))


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, *[torch.bfloat16] * CUDA], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def configs_of(dtype) -> tuple[DeltaChunksConfig, DeltaChunksConfig]:
    """Return launch configs of delta_chunks and delta_scan: those of an engine for bf16, which a GPU runs."""
    return delta_prompt_configs(device_of(torch.device(DEVICE))) if dtype == torch.bfloat16 else (CONFIG, CONFIG)


@SIZES
@DTYPES
def test_blocks_match_reference(case, dtype):
    args = prompt_args(CHUNKS, dtype=dtype, **case.sizes)
    DELTA_CONV.ref(*args.conv)
    tolerance = 2e-5 if dtype == torch.float32 else 3 * BF16_ROUNDING
    check_op(DELTA_CHUNKS, args.chunks, dict(config=configs_of(dtype)[0]), tolerance)


@SIZES
@DTYPES
def test_scan_matches_reference(case, dtype):
    args = prompt_args(CHUNKS, SNAPSHOTS, dtype=dtype, **case.sizes)
    DELTA_CONV.ref(*args.conv)
    DELTA_CHUNKS.ref(*args.chunks)
    args.u[0].zero_(), args.p[0].zero_(), args.w[0].zero_()  # a row outside all chunks
    error = 2e-5 if dtype == torch.float32 else 3 * BF16_ROUNDING
    tolerance = {"u": error, "records.state": error, "records.covered": 0.0}
    check_op(
        DELTA_SCAN,
        args.scan,
        dict(config=configs_of(dtype)[1]),
        tolerance,
        outputs=(),
        accumulates=("u", "records.state", "records.covered"),
    )


@DTYPES
def test_scan_with_fp16_state_matches_reference(dtype):
    args = prompt_args(CHUNKS, SNAPSHOTS, dtype=dtype, state_dtype=torch.float16, **TINY)
    DELTA_CONV.ref(*args.conv)
    DELTA_CHUNKS.ref(*args.chunks)
    args.u[0].zero_(), args.p[0].zero_(), args.w[0].zero_()  # a row outside all chunks
    error = 3e-4 if dtype == torch.float32 else 3 * BF16_ROUNDING
    tolerance = {"u": error, "records.state": error, "records.covered": 0.0}
    changed = "u", "records.state", "records.covered"
    check_op(DELTA_SCAN, args.scan, dict(config=CONFIG), tolerance, outputs=(), accumulates=changed)


@SIZES
@pytest.mark.parametrize("sigmoid", [False, True], ids=["swish", "sigmoid"])
def test_gated_norm_matches_reference(case, sigmoid):
    args = prompt_args(CHUNKS, sigmoid=sigmoid, **case.sizes)
    o = random(*args.u.shape, seed=30)
    out = poisoned(*args.u.shape)
    check_op(GATED_NORM, (args.tables.chunks, o, args.qkvz, out, args.weights.norm, args.heads), tolerance=1e-5)


def test_nearly_equal_keys_are_inverted_precisely():
    """Without decay and with beta near 1, the powers of the matrix that is inverted grow with its size."""
    args = prompt_args((Chunk(0, 0, 64, 0),), **TINY)
    DELTA_CONV.ref(*args.conv)
    keys = slice(args.heads.key_size, 2 * args.heads.key_size)
    args.mixed[:, keys] = args.mixed[:1, keys] + 1e-3 * random(64, args.heads.key_size, seed=40)
    args.rates[:, 0], args.rates[:, 1] = -1e-4, 0.999
    check_op(DELTA_CHUNKS, args.chunks, dict(config=CONFIG), 1e-4)


@pytest.mark.parametrize("launched", [True, False], ids=["launch", "reference"])
@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_prompt_agrees_with_transformers(function, launched):
    args = prompt_args((Chunk(0, 0, 150, 0),), **TINY)
    out = read_prompt(args, CONFIG if launched else None)
    expected, state = transformers_form(function, args.weights, args.heads, args.qkvz, args.x)
    assert_close(out, expected, 1e-5, "outputs")
    assert_close(args.records.state[1], state, 1e-5, "state")


@pytest.mark.parametrize("launched", [True, False], ids=["launch", "reference"])
@pytest.mark.parametrize("state_dtype, error", [(torch.float32, 1e-5), (torch.float16, 1e-3)], ids=["fp32", "fp16"])
def test_prompt_cut_at_any_position_gives_the_same_state(launched, state_dtype, error):
    """The first part goes from record 0 to 1, the second from 1 to 2.

    After cuts at multiples of 64 the kernels compute the same bits.
    """
    tokens, config = 131, CONFIG if launched else None
    full = prompt_args((Chunk(0, 0, tokens, 0),), state_dtype=state_dtype, **TINY)
    expected = read_prompt(full, config)
    for cut in range(1, tokens) if CUDA or not launched else (1, 2, 3, 17, 63, 64, 65, 126, 128, 130):
        args = prompt_args((Chunk(0, 0, cut, 0),), full=full, state_dtype=state_dtype)
        first = read_prompt(args, config)
        args = prompt_args((Chunk(0, 0, tokens - cut, cut),), full=full, records=args.records, source=1, target=2)
        second = read_prompt(args, config)
        assert_close(torch.cat([first, second]), expected, error, f"outputs, cut at {cut}")
        assert_close(args.records.state[2], full.records.state[1], error, f"state, cut at {cut}")
        for at in range(tokens - full.weights.width, tokens):
            assert torch.equal(args.records.window[2, at % 16], full.qkvz[at, : full.heads.channels])
        if launched and cut % 64 == 0:
            assert torch.equal(args.records.state[2], full.records.state[1])
            assert torch.equal(torch.cat([first, second]), expected)


def test_bf16_prompt_is_near_fp32():
    args = prompt_args((Chunk(0, 0, 150, 0),), dtype=torch.bfloat16, **TINY)
    out = read_prompt(args, CONFIG)
    expected, state = transformers_form(
        "torch_recurrent_gated_delta_rule", args.weights, args.heads, args.qkvz.float(), args.x
    )
    assert_close(out.float(), expected, 6 * BF16_ROUNDING, "outputs")
    assert_close(args.records.state[1], state, 4 * BF16_ROUNDING, "state")


def test_repeated_pass_leaves_the_same_bits():
    args = prompt_args(CHUNKS, SNAPSHOTS, **TINY)
    first_out = read_prompt(args, CONFIG)
    first = clone(args.records)
    again = read_prompt(args, CONFIG)
    assert torch.equal(again, first_out)
    assert all(torch.equal(*pair) for pair in zip(first, args.records))
