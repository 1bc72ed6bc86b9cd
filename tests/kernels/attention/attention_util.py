"""Arguments of the attention ops for tests, and the check of a form of decode attention against the reference."""

from typing import NamedTuple

import torch
from util import BF16_ROUNDING, DEVICE, Case, assert_close, in_8_bits, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.attention.arguments import Heads, KVLayer, Rope, Scratch
from tridecode.kernels.attention.attention import AttentionConfig, attention_ref
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig
from tridecode.kernels.attention.fp8_kv import load_cells, scales
from tridecode.layout import Chunk

CASES = [
    Case("qwen3_g2_d128", dict(kv_heads=8, group=2, head_dim=128), dict(kv_heads=1, group=2, head_dim=128)),
    Case("qwen3-4b_g4_d128", dict(kv_heads=8, group=4, head_dim=128), dict(kv_heads=2, group=4, head_dim=128)),
    Case("llama_g4_d64", dict(kv_heads=8, group=4, head_dim=64), dict(kv_heads=1, group=4, head_dim=64)),
    Case("qwen2_g7_d64", dict(kv_heads=2, group=7, head_dim=64), dict(kv_heads=1, group=7, head_dim=64)),
    Case("g5_d80", dict(kv_heads=4, group=5, head_dim=80), dict(kv_heads=1, group=5, head_dim=80)),
    Case("g3_d96", dict(kv_heads=8, group=3, head_dim=96), dict(kv_heads=1, group=3, head_dim=96)),
    Case("mha_g1_d128", dict(kv_heads=32, group=1, head_dim=128), dict(kv_heads=2, group=1, head_dim=128)),
    Case("g12_d64", dict(kv_heads=4, group=12, head_dim=64), dict(kv_heads=1, group=12, head_dim=64)),
    Case("g8_d256", dict(kv_heads=4, group=8, head_dim=256), dict(kv_heads=1, group=8, head_dim=256)),
]
# In bf16, queries and probabilities are rounded before the matrix products, and the output after them.
TOLERANCE = {torch.bfloat16: 4e-3 + 2 * BF16_ROUNDING, torch.float16: 1e-3, torch.float32: 1e-5}
ALL = (slice(None),)
MAX_SPLITS = 64  # Maximum number of splits for which the scratch has room.
SPLITS = 4


class Args(NamedTuple):
    """Arguments of the decode attention ops."""

    meta: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    kv: KVLayer
    rope: Rope
    scratch: Scratch
    heads: Heads


def layer(
    positions,
    kv_heads=1,
    group=2,
    head_dim=64,
    page=64,
    pages=4,
    dtype=torch.float16,
    qk_norm=False,
    window=0,
    gate=False,
    rotary=0,
) -> Args:
    """Return the arguments for a row at each position, with K and V on shuffled pages.

    All positions that are not written yet are NaN. rotary: columns that are rotated; 0 for all.
    """
    rows, heads = len(positions), kv_heads * group
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0)).view(rows, pages)
    pool = random(rows * pages, 2, 2, kv_heads, page, head_dim, dtype=dtype, seed=1)
    k, v = pool[:, 1].unbind(1)  # One layer's part of each page, as in the cache.
    for row, position in enumerate(positions):
        for t in range(position, pages * page):
            k[table[row, t // page], :, t % page] = float("nan")
            v[table[row, t // page], :, t % page] = float("nan")
    norm = norm_weight(head_dim, dtype) if qk_norm else None
    return Args(
        meta_rows(*positions),
        random(rows, (heads * (1 + gate) + 2 * kv_heads) * head_dim, seed=4),
        poisoned(rows, heads * head_dim, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32),
        KVLayer(table.int().to(DEVICE), k, v),
        rope(pages * page, rotary or head_dim, norm),
        Scratch(
            poisoned(rows, heads, MAX_SPLITS, head_dim),
            poisoned(rows, heads, MAX_SPLITS, 2),
            torch.zeros(rows, kv_heads, dtype=torch.int32, device=DEVICE),
        ),
        Heads(heads, kv_heads, head_dim, head_dim**-0.5, window, gate),
    )


def rope(capacity: int, head_dim: int, q_norm=None, k_norm=None) -> Rope:
    """Return rotary tables with arbitrary angles. k_norm defaults to q_norm."""
    angle = torch.rand(capacity, head_dim // 2, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 6
    return Rope(angle.cos(), angle.sin(), q_norm, q_norm if k_norm is None else k_norm, 1e-6)


def chunk_table(*chunks: Chunk) -> torch.Tensor:
    """Return the table of chunks on the device."""
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32)
    table[: len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
    return table.to(DEVICE)


def clone(args):
    """Copy all tensors of a tuple of arguments, each with its whole storage, which includes the scales of fp8 K/V."""
    if isinstance(args, torch.Tensor):
        storage = args.untyped_storage().clone()
        return args.new_empty(0).set_(storage, args.storage_offset(), args.shape, args.stride())
    return type(args)(*map(clone, args)) if isinstance(args, tuple) else args


def in_fp8(args: Args) -> Args:
    """Return the same arguments with fp8 K/V. The scale of a position that is NaN is NaN."""
    k, v = in_8_bits(torch.stack([torch.stack([args.kv.k, args.kv.v], 1)] * 2, 1))[1:]
    return args._replace(kv=args.kv._replace(k=k, v=v))


def rows_config(config: AttentionConfig, programs: int) -> AttentionRowsConfig:
    """Return a config of attention_rows that resembles one of attention."""
    return AttentionRowsConfig(
        config.block_t, config.splits, config.num_warps, config.registers, config.ahead, programs=programs
    )


def check(form, args: Args, config, tolerance: float) -> None:
    """Launch a form of attention on args. Compare its outputs and the written positions with the reference."""
    ref, before = clone(args), clone(args.kv)
    ref = ref._replace(out=ref.out.float())
    form(*args, config=config)
    attention_ref(*ref)
    assert_close(args.out, ref.out, tolerance, "out")
    assert args.scratch.counter.eq(0).all(), "a counter is not zero after the launch"
    for name, ours, theirs, unchanged in zip("kv", args.kv[1:], ref.kv[1:], before[1:]):
        written, expected = load_cells(ours, ALL), load_cells(theirs, ALL)
        assert torch.equal(written.isnan(), expected.isnan()), f"{name}: the kernel wrote wrong positions"
        rounding = 1e-3 if args.kv.fp8 else BF16_ROUNDING if ours.dtype == torch.bfloat16 else 2e-4
        assert_close(written.nan_to_num(0.0), expected.nan_to_num(0.0), rounding, name)
        if args.kv.fp8:
            bits = (scales(cache).view(torch.int16) for cache in (ours, unchanged))
            changed = (ours != unchanged).any(-1) | torch.ne(*bits)
            assert changed.flatten(0, 1).any(0).sum() <= len(args.meta), (
                "the kernel wrote more than one position per row"
            )
