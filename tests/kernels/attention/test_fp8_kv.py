"""fp8 K/V: conversions, and attention to them and the ops that write and read their pages, against the references."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from attention_util import ALL, CASES, SPLITS, TOLERANCE, check, chunk_table, in_fp8, layer, rope, rows_config
from util import CUDA, DEVICE, assert_close, covering, in_8_bits, norm_weight, poisoned, random

from tridecode.kernels.attention.arguments import Heads, KVLayer
from tridecode.kernels.attention.attention import AttentionConfig, attention, attention_ref
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig, attention_rows
from tridecode.kernels.attention.expand_kv import expand_kv, expand_kv_ref
from tridecode.kernels.attention.fp8_kv import (
    from_e4m3,
    head_rows,
    load_cells,
    quantize,
    scales,
    store_cells,
    two_words_to_bf16,
    words_to_numbers,
)
from tridecode.kernels.attention.gather_kv import gather_kv, gather_kv_ref
from tridecode.kernels.attention.rope_write import rope_write, rope_write_ref
from tridecode.kernels.common import interpreted
from tridecode.layout import Chunk

BF16 = TOLERANCE[torch.bfloat16]
DTYPE = torch.bfloat16 if CUDA else torch.float32  # Dtype to which the kernel expands fp8 numbers.
FORMS = {"one_row": attention, "rows": attention_rows}


def cache_of(pages, kv_heads, page, D):
    _, k, v = in_8_bits(torch.zeros(pages, 2, 2, kv_heads, page, D, device=DEVICE))
    return k, v


def check_form(form, args, config):
    if form is attention_rows:
        check(form, in_fp8(args), rows_config(config, programs=3), BF16)
        return
    if len(args.meta) > 1:
        check(form, in_fp8(args), replace(config, short_splits=1, short_iterations=2), BF16)
    check(form, in_fp8(args), config, BF16)


def test_rounding_is_to_the_nearest_and_a_power_of_two_scales():
    x = random(64, 128, scale=3.0) * torch.logspace(-20, 20, 64, device=DEVICE)[:, None]
    codes, scale = quantize(x)
    values = codes.view(torch.float8_e4m3fn).float() * scale.float()[:, None]
    assert_close(values, x, 0.04)
    assert torch.equal(torch.frexp(scale.float())[0], torch.full_like(scale.float(), 0.5))
    top = codes.view(torch.float8_e4m3fn).float().abs().amax(1)
    assert (top > 208).all() and (top <= 448).all(), "the scaled values do not use the whole range of e4m3"
    assert torch.equal(values, values.bfloat16().float()), "a value is not exact in bf16"
    for bad in (float("nan"), float("inf")):
        assert quantize(torch.tensor([[1.0, bad]]))[1].isnan().all()
    assert not quantize(torch.zeros(1, 4))[0].any()


@triton.jit
def _numbers_kernel(codes_ptr, out_ptr, FORM: tl.constexpr, CONVERTS: tl.constexpr, INTERPRETED: tl.constexpr):
    words = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, 64))
    if FORM == "codes":
        numbers = from_e4m3(tl.load(codes_ptr + tl.arange(0, 256)), INTERPRETED)
    elif FORM == "two words":  # This instruction converts each word twice.
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
        pytest.skip("this GPU has no such instruction")
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.full((256,), torch.nan, device=DEVICE)
    _numbers_kernel[(1,)](codes, out, form.partition(" by")[0], "by" in form, interpreted())
    finite = codes & 127 != 127  # The other two codes are NaN, which the kernels never write.
    assert torch.equal(out[finite], codes.view(torch.float8_e4m3fn).float()[finite])


@covering(2, form=FORMS, case=CASES, position=[0, 255] if not CUDA else [0, 4000])
def test_attention_matches_reference(form, case, position):
    page, pages = (64, 4) if not CUDA else (256, 16)
    args = layer((position,), **case.sizes, page=page, pages=pages, dtype=torch.bfloat16, qk_norm=True)
    check_form(form, args, AttentionConfig(block_t=32, splits=SPLITS))


@covering(2, form=FORMS, ahead=[1, 2, 4] if CUDA else [1, 4], window=[0, 50])
def test_several_rows_prefetched_tiles_and_windows(form, ahead, window):
    args = layer((70, 0, 130, 255), 2 if CUDA else 1, dtype=torch.bfloat16, window=window)
    check_form(form, args, AttentionConfig(block_t=16 if CUDA else 32, splits=SPLITS, ahead=ahead))


@covering(2, form=FORMS, position=[5, 300] + ([4000] if CUDA else []), capability=[80, 90])
def test_the_configs_of_two_generations(form, capability, position):
    args = in_fp8(layer((position,), 1, 4, 128, pages=64 if CUDA else 6, dtype=torch.bfloat16, qk_norm=True))
    ref = args._replace(out=args.out.float())
    converts = dict(converts=capability >= 89)
    if form is attention_rows:
        block_t, least = (64, 16) if capability < 90 else (128, 8)
        config = AttentionRowsConfig(block_t, splits=64, least=least, programs=264, **converts)
    elif capability < 90:
        config = AttentionConfig(block_t=128, splits=16, num_warps=8, **converts)
    else:
        config = AttentionConfig(block_t=128, splits=32, num_warps=4, **converts)
    form(*args, config=config)
    attention_ref(*ref)
    assert_close(args.out, ref.out, BF16)


@covering(1, form=FORMS)
def test_a_key_that_is_nan_stays_nan(form):
    args = in_fp8(layer((40,), pages=1, dtype=torch.bfloat16))
    args.qkv[:, 2 * 64 : 3 * 64] = float("nan")  # The new key is NaN.
    config = AttentionConfig(32, SPLITS)
    form(*args, config=config if form is attention else rows_config(config, 3))
    assert load_cells(args.kv.k, ALL)[args.kv.table[0, 0], 0, 40].isnan().all() and args.out.isnan().all()


@covering(1, qk_norm=[True, False], D=[64, 80, 128])
def test_prompts_and_tokens_are_written_alike(qk_norm, D):
    heads, kv_heads, rows = 4, 2, 25
    chunks = chunk_table(Chunk(1, 0, 20, 50), Chunk(0, 20, 5, 0))
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32, device=DEVICE)
    qkv = random(rows, (heads + 2 * kv_heads) * D, dtype=DTYPE)
    results = []
    for write in (rope_write, rope_write_ref):
        q, kv = poisoned(rows, heads, D, dtype=DTYPE), KVLayer(table, *cache_of(4, kv_heads, 64, D))
        norm = norm_weight(D, DTYPE) if qk_norm else None
        write(chunks, qkv, q, kv, rope(128, D, norm), Heads(heads, kv_heads, D, D**-0.5, 0))
        results.append([load_cells(each, ALL) for each in kv[1:]])
    for ours, theirs in zip(*results):
        assert_close(ours, theirs, 1e-3)
        assert torch.equal(ours.any(-1), theirs.any(-1)), "the two results mask different positions"


@pytest.mark.parametrize("D", [64, 80])
def test_gather_pages(D):
    _, k, v = in_8_bits(random(5, 2, 2, 2, 64, D))
    table = torch.tensor([4, 1, 3], dtype=torch.int32, device=DEVICE)
    ours, theirs = (poisoned(2, 2, 150, D, dtype=DTYPE) for _ in range(2))
    gather_kv(table, k, v, 140, *ours)
    gather_kv_ref(table, k, v, 140, *theirs)
    assert torch.equal(ours[:, :, :140], theirs[:, :, :140]) and ours[:, :, 140:].isnan().all()


@pytest.mark.parametrize("D", [64, 128])
def test_pages_of_a_pass_are_expanded_to_bf16(D):
    """Two of three chunks share a page, and the pool has two layers. No other page is written."""
    _, k, v = in_8_bits(random(7, 2, 2, 2, 64, D))
    chunks = chunk_table(Chunk(1, 0, 30, 100), Chunk(0, 30, 64, 0), Chunk(2, 94, 1, 64))
    kv = KVLayer(torch.tensor([[5, 0, 0], [4, 1, 3], [4, 6, 0]], dtype=torch.int32, device=DEVICE), k, v)
    ours, theirs = (poisoned(7, 2, 2, 64, D, dtype=DTYPE) for _ in range(2))
    expand_kv(chunks, kv, *ours.unbind(1))
    expand_kv_ref(chunks, kv, *theirs.unbind(1))
    written = [1, 3, 4, 5, 6]
    assert torch.equal(ours[written], theirs[written]) and ours[[0, 2]].isnan().all()


def test_size_of_a_position():
    assert [head_rows(64, D) for D in (64, 80, 96, 128, 256)] == [66, 66, 66, 65, 65]
    k, v = cache_of(3, 2, 64, 128)
    store_cells(k, (1, slice(None), 5), torch.ones(2, 128, device=DEVICE))
    assert load_cells(k, ALL).sum() == 256 and not load_cells(v, ALL).any() and scales(k)[1, :, 5].eq(2**-8).all()
