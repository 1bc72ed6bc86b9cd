"""Launch configs of attention, in decode passes, in passes that verify drafts, and in prompt passes."""

from dataclasses import replace

import torch

from ..kernels.attention.arguments import MAX_SPLITS
from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_queries import QueriesConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.attention.prompt_attention import PromptAttentionConfig
from ..kernels.common import next_power_of_2
from ..kernels.device import Device
from .configs import HOPPER, MAX_ROWS, AttentionCase


def attention_config(
    case: AttentionCase, rows: int, device: Device, batch_invariant: bool = False
) -> AttentionConfig | AttentionRowsConfig:
    """Choose the config of attention for passes of up to `rows` rows, or of all passes with batch_invariant."""
    narrow = case.head_dim <= 128 and case.group <= 8
    if rows == 1 and not batch_invariant:
        config: AttentionConfig | AttentionRowsConfig = _one_row(case, device)
    elif batch_invariant or case.dtype != torch.bfloat16:
        config = attention_rows_config(case, MAX_ROWS, device)
    elif rows <= 16 and device.capability == HOPPER and narrow:
        # Without long rows, the splits just fill the multiprocessors. A long row has more splits, so that it takes
        # about as long
        # as in a separate pass.
        short = _share(2 * device.multiprocessors, rows * case.kv_heads, 32)
        iterations = 4 if rows <= 4 else 16
        config = AttentionConfig(64, 32, 4, ahead=2, short_splits=short, short_iterations=iterations)
    else:
        config = attention_rows_config(case, rows, device)
    return fp8_config(config, case, device) if case.fp8 else config


def _share(programs: int, parts: int, limit: int = MAX_SPLITS) -> int:
    """Return the number of programs per part, if `programs` programs share `parts` parts. It is from 1 to `limit`."""
    return min(max(programs // parts, 1), limit)


def _one_row(case: AttentionCase, device: Device) -> AttentionConfig:
    """Choose the config for one row.

    Registers contain the tiles. Wide heads, fp32 and GPUs before Hopper therefore have smaller tiles, and fewer in
    flight. The splits of a long row fill the multiprocessors.
    """
    wide, hopper = case.head_dim > 128, device.capability == HOPPER
    splits = max(1 << (_share(device.multiprocessors, case.kv_heads).bit_length() - 1), 16)
    if case.dtype == torch.float32 or (wide and not hopper):
        return AttentionConfig(block_t=32, splits=splits, num_warps=8)
    if wide or device.capability < HOPPER:
        return AttentionConfig(block_t=64, splits=splits, num_warps=8)
    config = AttentionConfig(block_t=128, splits=splits, num_warps=8, ahead=2 if hopper else 1)
    # Up to 64 tiles, more splits cost more than they save.
    return replace(config, short_splits=16, short_iterations=4) if splits > 16 else config


def attention_rows_config(case: AttentionCase, rows: int, device: Device) -> AttentionRowsConfig:
    """Choose the config of the kernel in which a fixed number of programs shares the work.

    Usually there are two programs per multiprocessor, each with two tiles in flight. A long row is split into as many
    items as there are programs. Tiles are smaller if shared memory is too small, or if there are few rows. For few
    rows, linears load all their tiles through the L1 cache, and a kernel with more than 48 KiB of shared memory leaves
    little L1 cache to the kernels that run at the same time.
    """
    heads, one = case.kv_heads, max(device.multiprocessors, 1)
    if case.head_dim > 128 or case.dtype == torch.float32:
        return AttentionRowsConfig(16, _share(3 * one, heads), num_warps=4, least=16, programs=3 * one)
    if case.group > 8:
        return AttentionRowsConfig(32, _share(3 * one, heads), num_warps=8, least=8, programs=one)
    if rows <= 4 and case.dtype == torch.bfloat16:  # There are few rows, so more programs share a long row.
        return AttentionRowsConfig(64, _share(2 * one, heads), num_warps=4, least=4, programs=2 * one, stages=2)
    # Bytes of the tiles of 64 positions that two programs have in flight.
    in_flight = 2 * 2 * 2 * 64 * next_power_of_2(case.head_dim) * case.dtype.itemsize
    block_t = 64 if rows > 16 and in_flight <= device.shared_memory_each else 32
    return AttentionRowsConfig(block_t, _share(2 * one, heads), num_warps=4, least=16, programs=2 * one, stages=5)


def fp8_config(
    config: AttentionConfig | AttentionRowsConfig, case: AttentionCase, device: Device
) -> AttentionConfig | AttentionRowsConfig:
    """Adapt a config to K and V in fp8.

    Each warp has 32 positions, with the next ones in flight in registers, and a multiprocessor has two programs of four
    warps. For wide heads, and on GPUs before Hopper, each warp has 16 positions, since more spill in some Triton
    versions.
    """
    rows = isinstance(config, AttentionRowsConfig)
    half = device.capability < HOPPER or case.head_dim > 128 or config.block_t <= (16 if rows else 32)
    num_warps = 8 if half and not rows else 4
    block_t = num_warps * (16 if half else 32)
    adapted = replace(config, block_t=block_t, num_warps=num_warps, converts=device.capability >= 89)
    if isinstance(adapted, AttentionRowsConfig):
        least = max(adapted.least * config.block_t // block_t, 1)
        return replace(adapted, least=least, programs=max(2 * device.multiprocessors, 1), stages=1)
    splits = min(config.splits * 8 // num_warps, MAX_SPLITS)
    iterations = max(adapted.short_iterations * config.block_t // block_t, 1)
    return replace(adapted, ahead=1, splits=splits, short_iterations=iterations)


def queries_config(case: AttentionCase, requests: int, queries: int, device: Device) -> QueriesConfig:
    """Choose the config of attention for `queries` rows of each of `requests` requests.

    If no request is long, the requests share the multiprocessors: all programs run at once, and each combines a part of
    the results. A long request has as many splits as in a separate pass.
    """
    hopper = device.capability == HOPPER
    splits = _share(device.multiprocessors, case.kv_heads)
    block_t = 64 if queries * case.group <= 8 else 32
    return QueriesConfig(
        queries,
        block_t,
        splits,
        ahead=2 if device.capability >= HOPPER else 1,  # With two iterations, other GPUs spill more.
        short_splits=min(_share(device.multiprocessors, requests * case.kv_heads), splits),
        short_iterations=2048 // block_t,
        together=hopper and requests * case.kv_heads <= device.multiprocessors,
        registers=168 if requests == 1 and hopper else 0,  # This leaves registers for a program of the next linear.
    )


def prompt_attention_config(
    device: Device, batch_invariant: bool, fp8: bool = False, head_dim: int = 128
) -> PromptAttentionConfig:
    """Choose the config of attention in prompt passes.

    In batch-invariant mode it does not depend on the rows of a pass. One kernel computes everything, without splits.
    With heads of more than 128, a multiprocessor has room for one program, whose sums need the registers of 8 warps.
    """
    wide = head_dim > 128
    programs = max((1 if wide else 2) * device.multiprocessors, 1)
    # With 4 stages, some versions of Triton spill more.
    config = PromptAttentionConfig(programs=programs, stages=4 if fp8 else 3)
    if wide:
        config = replace(config, num_warps=8, stages=3 if fp8 else 2)
    if batch_invariant:
        return replace(config, splits=1)
    return replace(
        config,
        heads=16,
        separate_combine=True,
        dependent=device.capability >= HOPPER,
        hopper=device.multiprocessors if device.capability == HOPPER else 0,
    )


def prompt_tiles_fit(head_dim: int, dtype: torch.dtype, device: Device) -> bool:
    """Return whether Triton's attention of prompts is faster than torch's.

    On other GPUs, and for other head dimensions and dtypes, its tiles need too many registers or too much shared
    memory.
    """
    return device.capability // 10 == 9 and head_dim <= 256 and dtype != torch.float32
