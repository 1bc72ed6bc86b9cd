"""K/V in 8 bits: what a number becomes, and both forms of attention and what writes pages, against the references."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from models import tiny_config
from test_attention import CASES, SPLITS, TOLERANCE, buffers, of_rows
from util import CUDA, DEVICE, assert_close, in_8_bits, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.attention.attention import AttentionConfig, attention, attention_ref
from tridecode.kernels.attention.attention_rows import attention_rows
from tridecode.kernels.attention.expand_kv import expand_kv, expand_kv_ref
from tridecode.kernels.attention.fp8_kv import (
    from_e4m3,
    head_rows,
    held,
    put,
    quantised,
    scales,
    two_words_to_bf16,
    words_to_numbers,
)
from tridecode.kernels.attention.gather_kv import gather_kv, gather_kv_ref
from tridecode.kernels.attention.rope_write import rope_write, rope_write_ref
from tridecode.kernels.common import interpreted
from tridecode.layout import Chunk
from tridecode.state.kv import PAGE
from tridecode.tuning.choose import attention_rows_shape, attention_shape, fp8_kv_shape

BF16 = TOLERANCE[torch.bfloat16]
ALL = (slice(None),)
FORMS = pytest.mark.parametrize("form", [attention, attention_rows], ids=["one row", "rows"])


def cache_of(pages, kv_heads, page, D):
    _, k, v = in_8_bits(torch.zeros(pages, 2, 2, kv_heads, page, D, device=DEVICE))
    return k, v


def in_fp8(args):
    """The same arguments of attention, their K/V in 8 bits; what was NaN has a scale of NaN."""
    k, v = args["k_cache"], args["v_cache"]
    _, k_cache, v_cache = in_8_bits(torch.stack([torch.stack([k, v], 1)] * 2, 1))
    return args | {"k_cache": k_cache, "v_cache": v_cache}


def check(form, args, shape):
    if form is attention:
        if len(args["meta"]) > 1:
            check_form(form, args, replace(shape, few=1, turns=2))
        check_form(form, args, shape)
        return
    check_form(form, args, of_rows(shape, programs=3))


def check_form(form, args, shape):
    ref, args = in_fp8(args) | {"out": args["out"].float()}, in_fp8(args)
    before = [(args[name].clone(), scales(args[name]).clone()) for name in ("k_cache", "v_cache")]
    form(**args, config=shape)
    attention_ref(**ref)
    assert_close(args["out"], ref["out"], BF16, "out")
    assert args["counter"].eq(0).all(), "the counters must be zero between launches"
    for name, (codes, of_codes) in zip(("k_cache", "v_cache"), before):
        ours, theirs = held(args[name], ALL), held(ref[name], ALL)
        assert torch.equal(ours.isnan(), theirs.isnan()), f"{name}: other positions were touched"
        assert_close(ours.nan_to_num(0.0), theirs.nan_to_num(0.0), 1e-3, name)
        changed = (args[name] != codes).any(-1) | (scales(args[name]).view(torch.int16) != of_codes.view(torch.int16))
        assert changed.flatten(0, 1).any(0).sum() <= len(args["meta"]), "a position a row is written"


def test_rounding_is_to_the_nearest_and_a_power_of_two_scales():
    x = random(64, 128, scale=3.0) * torch.logspace(-20, 20, 64, device=DEVICE)[:, None]
    codes, scale = quantised(x)
    found = codes.view(torch.float8_e4m3fn).float() * scale.float()[:, None]
    assert_close(found, x, 0.04)
    assert torch.equal(torch.frexp(scale.float())[0], torch.full_like(scale.float(), 0.5))
    top = codes.view(torch.float8_e4m3fn).float().abs().amax(1)
    assert (top > 208).all() and (top <= 448).all(), "no bit of the range is lost"
    assert torch.equal(found, found.bfloat16().float()), "a bf16 holds it exactly"
    for bad in (float("nan"), float("inf")):
        assert quantised(torch.tensor([[1.0, bad]]))[1].isnan().all()
    assert not quantised(torch.zeros(1, 4))[0].any()


@triton.jit
def _numbers_kernel(codes_ptr, out_ptr, FORM: tl.constexpr, CONVERTS: tl.constexpr, INTERPRETED: tl.constexpr):
    words = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, 64))
    if FORM == "codes":
        numbers = from_e4m3(tl.load(codes_ptr + tl.arange(0, 256)), INTERPRETED)
    elif FORM == "two words":  # every word beside itself
        numbers, _ = tl.split(two_words_to_bf16(words, words, INTERPRETED))
        numbers = numbers.reshape(256)
    elif FORM == "fp16":
        numbers = words_to_numbers(words, tl.float16, CONVERTS, INTERPRETED).reshape(256)
    else:
        numbers = words_to_numbers(words, tl.bfloat16, CONVERTS, INTERPRETED).reshape(256)
    tl.store(out_ptr + tl.arange(0, 256), numbers.to(tl.float32))


@pytest.mark.parametrize("form", ["codes", "fp16", "fp16 by an instruction", "bf16", "two words"])
def test_every_code_becomes_its_number(form):
    if form == "fp16 by an instruction" and CUDA and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has none")
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.full((256,), torch.nan, device=DEVICE)
    _numbers_kernel[(1,)](codes, out, form.partition(" by")[0], "by" in form, interpreted())
    finite = codes & 127 != 127  # the two others are never written
    assert torch.equal(out[finite], codes.view(torch.float8_e4m3fn).float()[finite])


@FORMS
@CASES
@pytest.mark.parametrize("position", [0, 1, 33, 255] if not CUDA else [0, 1, 64, 500, 4000])
def test_attention_matches_reference(form, case, position):
    page, pages = (64, 4) if not CUDA else (256, 16)
    args = buffers((position,), **case.sizes, page=page, pages=pages, dtype=torch.bfloat16, qk_norm=True)
    check(form, args, AttentionConfig(block_t=32, splits=SPLITS))


@FORMS
@pytest.mark.parametrize("ahead", [1, 2, 4] if CUDA else [1, 4])
@pytest.mark.parametrize("window", [0, 50])
def test_several_rows_tiles_ahead_and_windows(form, ahead, window):
    args = buffers((70, 0, 130, 255), 2, 2, 64, page=64, pages=4, dtype=torch.bfloat16, qk_norm=False)
    check(form, args | {"window": window}, AttentionConfig(block_t=16, splits=SPLITS, ahead=ahead))


@FORMS
@pytest.mark.parametrize("position", [5, 129, 300] + ([1023, 4000] if CUDA else []))
@pytest.mark.parametrize("capability", [80, 90])
def test_the_shapes_that_engines_use(form, capability, position):
    pages = 64 if CUDA else 6
    args = in_fp8(buffers((position,), 1, 4, 128, page=PAGE, pages=pages, dtype=torch.bfloat16, qk_norm=True))
    ref = args | {"out": args["out"].float()}
    one = attention_shape(128, torch.bfloat16, capability)
    rows = attention_rows_shape(tiny_config(head_dim=128), torch.bfloat16, 64)
    form(**args, config=fp8_kv_shape(one if form is attention else rows, capability))
    attention_ref(**ref)
    assert_close(args["out"], ref["out"], BF16)


@FORMS
def test_a_number_that_is_none_stays_none(form):
    args = in_fp8(buffers((40,), 1, 2, 64, page=64, pages=1, dtype=torch.bfloat16, qk_norm=False))
    args["qkv"][:, 2 * 64 : 3 * 64] = float("nan")  # the new key
    form(**args, config=AttentionConfig(32, SPLITS) if form is attention else of_rows(AttentionConfig(32, SPLITS), 3))
    page = args["page_table"][0, 0]
    assert held(args["k_cache"], ALL)[page, 0, 40].isnan().all() and args["out"].isnan().all()


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("D", [64, 80, 128])
def test_prompts_are_written_as_tokens_are(qk_norm, D):
    heads, kv_heads, rows = 4, 2, 90
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32, device=DEVICE)
    table[:2] = torch.tensor([Chunk(1, 0, 80, 30), Chunk(0, 80, 10, 0)], dtype=torch.int32)
    pages = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32, device=DEVICE)
    angle = torch.rand(128, D // 2, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 6
    qkv = random(rows, (heads + 2 * kv_heads) * D, dtype=torch.bfloat16 if CUDA else torch.float32)
    norms = [norm_weight(D, qkv.dtype) if qk_norm else None] * 2
    found = []
    for write in (rope_write, rope_write_ref):
        q, cache = poisoned(rows, heads, D, dtype=qkv.dtype), cache_of(4, kv_heads, 64, D)
        write(table, pages, qkv, *norms, angle.cos(), angle.sin(), q, *cache, 1e-6)
        found.append([held(each, ALL) for each in cache])
    for ours, theirs in zip(*found):
        assert_close(ours, theirs, 1e-3)
        assert torch.equal(ours.any(-1), theirs.any(-1)), "the same positions"


@pytest.mark.parametrize("D", [64, 80])
def test_pages_in_one_piece(D):
    _, k, v = in_8_bits(random(5, 2, 2, 2, 64, D))
    table = torch.tensor([4, 1, 3], dtype=torch.int32, device=DEVICE)
    dtype = torch.bfloat16 if CUDA else torch.float32
    found = [poisoned(2, 150, D, dtype=dtype) for _ in range(4)]
    gather_kv(table, k, v, 140, *found[:2])
    gather_kv_ref(table, k, v, 140, *found[2:])
    for ours, theirs in zip(found[:2], found[2:]):
        assert torch.equal(ours[:, :140], theirs[:, :140]) and ours[:, 140:].isnan().all()


@pytest.mark.parametrize("D", [64, 128])
def test_pages_that_a_pass_attends_to_become_bf16(D):
    """Of three chunks, of which two share a page, on a pool of two layers; no other page is written."""
    _, k, v = in_8_bits(random(7, 2, 2, 2, 64, D))
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32, device=DEVICE)
    table[:3] = torch.tensor([Chunk(1, 0, 30, 100), Chunk(0, 30, 64, 0), Chunk(2, 94, 1, 64)], dtype=torch.int32)
    pages = torch.tensor([[5, 0, 0], [4, 1, 3], [4, 6, 0]], dtype=torch.int32, device=DEVICE)
    dtype = torch.bfloat16 if CUDA else torch.float32
    ours, theirs = (poisoned(7, 2, 2, 64, D, dtype=dtype) for _ in range(2))
    expand_kv(table, pages, k, v, *ours.unbind(1))
    expand_kv_ref(table, pages, k, v, *theirs.unbind(1))
    written = [1, 3, 4, 5, 6]
    assert torch.equal(ours[written], theirs[written]) and ours[[0, 2]].isnan().all()


def test_a_position_takes_a_byte_a_number_and_two():
    assert [head_rows(64, D) for D in (64, 80, 96, 128, 256)] == [66, 66, 66, 65, 65]
    k, v = cache_of(3, 2, 64, 128)
    put(k, (1, slice(None), 5), torch.ones(2, 128, device=DEVICE))
    assert held(k, ALL).sum() == 256 and not held(v, ALL).any() and scales(k)[1, :, 5].eq(2**-8).all()
