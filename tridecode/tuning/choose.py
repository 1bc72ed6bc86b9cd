"""Which launch shapes a model gets on a GPU: a plain table lookup, decided before capture."""

from dataclasses import replace

import torch

from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_queries import QueriesConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.attention.prompt_attention import PromptAttentionConfig
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_hopper import HopperConfig
from ..kernels.linear.matmul_tiles import TilesConfig
from ..kernels.linear.matmul_wide import MAX_SPLIT, WideConfig
from ..kernels.linear.matvec import MatvecConfig
from ..models.config import ModelConfig
from .shapes import MAX_SPLITS, Shape, StepShapes

TUNED_FOR = 90  # the compute capability of the H100 and H200; other GPUs get what is right for most matrices
# (rows, columns) of a weight matrix, gate and up being one -> the shape that was fastest in the whole step on an H200.
TUNED = {
    (4096, 1024): MatvecConfig(4, 4),  # Qwen3-0.6B: qkv, o_proj, gate and up, down, LM head
    (1024, 2048): MatvecConfig(2, 4),
    (6144, 1024): MatvecConfig(2, 1, registers=104),
    (1024, 3072): MatvecConfig(1, 1, registers=96),
    (151936, 1024): MatvecConfig(4, 4),
    (3072, 2048): MatvecConfig(2, 4, registers=40),  # Llama-3.2-1B
    (2048, 2048): MatvecConfig(2, 1),
    (16384, 2048): MatvecConfig(1, 2, registers=120, programs=8 * 132),
    (2048, 8192): MatvecConfig(2, 8, registers=112, programs=2 * 132),
    (128256, 2048): MatvecConfig(2, 4),
    (6144, 2560): MatvecConfig(2, 2, registers=112, programs=8 * 132),  # Qwen3-4B
    (2560, 4096): MatvecConfig(4, 2, registers=160),
    (19456, 2560): MatvecConfig(2, 4),
    (2560, 9728): MatvecConfig(2, 16, programs=132),
    (151936, 2560): MatvecConfig(2, 1),
    (6144, 4096): MatvecConfig(1, 4),  # Llama-3.1-8B, Mistral-7B; Qwen3-8B as they
    (4096, 4096): MatvecConfig(4, 8, registers=72),
    (28672, 4096): MatvecConfig(2, 4, registers=128),
    (24576, 4096): MatvecConfig(2, 4, registers=128),
    (4096, 14336): MatvecConfig(2, 16, programs=132),
    (4096, 12288): MatvecConfig(2, 16, programs=132),
    (128256, 4096): MatvecConfig(4, 4, registers=128),
    (151936, 4096): MatvecConfig(4, 4, registers=128),
}


def matvec_shape(N: int, K: int, halves: int = 1, capability: int = TUNED_FOR) -> MatvecConfig:
    """The tuned shape; or two rows on as few warps as hold them in 64 registers, on 16 where long rows are shared among
    few programs. `halves` is 2 for gate and up, N the rows of one of them.
    """
    if capability == TUNED_FOR and (N * halves, K) in TUNED:
        return TUNED[N * halves, K]
    if capability == TUNED_FOR and K >= 8192:
        return MatvecConfig(2 if K <= 20480 else 1, 16, programs=132)
    warps = 1
    while weight_registers(2, K * halves, warps) > 64 and warps < 16:
        warps *= 2
    return MatvecConfig(2, warps)


def weight_registers(block_n: int, K: int, num_warps: int) -> int:
    """32-bit registers a thread needs to hold its part of block_n rows of K 16-bit weights."""
    return -(-block_n * K // (64 * num_warps))


def attention_shape(head_dim: int, dtype: torch.dtype, capability: int) -> AttentionConfig:
    """Tiles are held in registers: wide heads, fp32 and GPUs before Hopper take smaller ones, and one ahead."""
    if head_dim > 128 or dtype == torch.float32:
        return AttentionConfig(block_t=32, splits=16, num_warps=8)
    if capability < 90:
        return AttentionConfig(block_t=64, splits=16, num_warps=8)
    return AttentionConfig(block_t=128, splits=16, num_warps=8, ahead=2 if capability == TUNED_FOR else 1)


def choose_shapes(config: ModelConfig, dtype: torch.dtype, capability: int) -> dict[int, StepShapes]:
    """Shapes for passes of up to so many rows, for one model on one GPU; capability is 10 * major + minor (90 for an
    H100 or H200): those of TUNED and TUNED_ROWS, else by the rules. The user's own table (tuned.py) comes before them.
    """
    hidden, inter = config.hidden_size, config.intermediate_size
    shapes = StepShapes(
        qkv=matvec_shape(config.q_size + 2 * config.kv_size, hidden, capability=capability),
        o_proj=matvec_shape(hidden, config.q_size, capability=capability),
        gate_up=matvec_shape(inter, hidden, halves=2, capability=capability),
        down=matvec_shape(hidden, inter, capability=capability),
        lm_head=matvec_shape(config.vocab_size, hidden, capability=capability),
        attention=attention_shape(config.head_dim, dtype, capability),
    )
    if dtype != torch.bfloat16:  # activations are fp32 then, and do not fit in bounds found with 16-bit ones
        shapes = StepShapes(**{op: replace(shape, registers=0) for op, shape in vars(shapes).items()})
    if dtype == torch.bfloat16:
        return {1: shapes} | {rows: few_rows_shapes(config, dtype, rows, capability) for rows in (4, 8, 16, 32, 64)}
    # The weights are read once a row.
    return {1: shapes, 2: replace(shapes, attention=attention_rows_shape(config, dtype, 64))}


def few_rows_shapes(config: ModelConfig, dtype: torch.dtype, rows: int, capability: int) -> StepShapes:
    """Shapes of passes of up to `rows` rows: 4, 8, 16, 32 or 64; products of up to 4 have those of 8."""
    matrices = matrix_sizes(config)
    shapes = {op: few_rows_shape(*size, max(rows, 8), op == "gate_up", capability) for op, size in matrices.items()}
    return StepShapes(**shapes, attention=few_rows_attention(config, dtype, rows, capability))


def matrix_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the weights of each product, gate and up being one."""
    hidden, inter = config.hidden_size, config.intermediate_size
    return {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
        "gate_up": (2 * inter, hidden),
        "down": (hidden, inter),
        "lm_head": (config.vocab_size, hidden),
    }


# Rows of a pass -> (rows, columns) of a weight matrix -> the shape that was fastest in the whole step on an H200.
TUNED_ROWS = {
    8: {
        (6144, 2560): MatmulConfig(16, 4, 12, 8),  # Qwen3-4B
        (2560, 4096): MatmulConfig(16, 4, 12, 4),
        (19456, 2560): MatmulConfig(16, 4, 12, 8),
        (2560, 9728): MatmulConfig(32, 8, 5, 4),
        (151936, 2560): MatmulConfig(16, 8, 10, 8, registers=128),  # two programs a multiprocessor
        (4096, 1024): MatmulConfig(16, 4, 8, 8),  # Qwen3-0.6B
        (1024, 2048): MatmulConfig(16, 4, 12, 8),
        (6144, 1024): MatmulConfig(16, 2, 16, 4),
        (1024, 3072): MatmulConfig(16, 4, 16, 4),
        (151936, 1024): MatmulConfig(16, 4, 8, 8),
    },
    16: {
        (2560, 4096): WideConfig(64, 128, 4, 3, split=6),
        (19456, 2560): WideConfig(64, 128, 3, 1, registers=168),
        (2560, 9728): WideConfig(64, 128, 4, 3, split=4),
        (4096, 1024): WideConfig(64, 128, 3, 1, split=3, registers=168),
        (1024, 2048): WideConfig(64, 128, 4, 3, split=4),
        (6144, 1024): WideConfig(64, 128, 3, 1, registers=168),
        (1024, 3072): WideConfig(64, 128, 4, 3, split=6),
    },
    32: {
        (6144, 2560): HopperConfig(64, 128, 4, 4),
        (2560, 4096): HopperConfig(64, 64, 8, 4, split=4),
        (19456, 2560): HopperConfig(128, 64, 4, 4, lag=1),
        (2560, 9728): HopperConfig(64, 128, 4, 4, split=3),
        (151936, 2560): HopperConfig(128, 128, 5, 5, programs=132, copier=1, registers=80),
        (4096, 1024): HopperConfig(64, 64, 8, 4, copier=1, registers=80),
        (1024, 2048): HopperConfig(64, 64, 8, 4, split=4),
        (6144, 1024): HopperConfig(64, 128, 4, 4, lag=1),
        (1024, 3072): WideConfig(64, 128, 4, 3, split=6),
        (151936, 1024): HopperConfig(128, 128, 5, 5, programs=132, copier=1, registers=80),
    },
    64: {
        (6144, 2560): HopperConfig(64, 64, 8, 4, copier=1, registers=80),
        (2560, 4096): HopperConfig(64, 128, 4, 2, split=4, num_warps=8),
        (19456, 2560): HopperConfig(128, 64, 4, 4, num_warps=8, lag=1, copier=1, registers=80),
        (2560, 9728): HopperConfig(64, 128, 4, 2, split=4, num_warps=8),
        (151936, 2560): HopperConfig(128, 64, 8, 6, num_warps=8, programs=132, copier=1, registers=88),
        (4096, 1024): HopperConfig(64, 128, 4, 4),
        (1024, 2048): TilesConfig(16, 256, 5, block_m=64),
        (6144, 1024): TilesConfig(16, 128, 4),
        (1024, 3072): TilesConfig(16, 256, 5, block_m=64),
        (151936, 1024): HopperConfig(128, 64, 8, 6, num_warps=8, programs=132, copier=1, registers=88),
    },
}


def few_rows_shape(N: int, K: int, rows: int, gated: bool, capability: int = TUNED_FOR) -> Shape:
    """The tuned shape, or one like those. Up to 16 rows stay in registers; more share tiles of the weights, as large as
    the shared memory of most GPUs holds."""
    if capability == TUNED_FOR and (N, K) in TUNED_ROWS[rows]:
        return TUNED_ROWS[rows][N, K]
    if rows == 32 and capability == TUNED_FOR and (found := hopper_shape(N, K, gated)):
        return found
    if rows == 16 and N >= 2**16 and capability == TUNED_FOR:
        return TilesConfig(32, 256, 4)
    if rows <= 16:
        ahead = (12, 8) if rows == 8 else (8, 4)
        return MatmulConfig(16, 4, *ahead) if K < 6144 else MatmulConfig(32, 8, 5 if rows == 8 else 8, 4)
    if gated or N >= 2**16:
        return TilesConfig(32, 64, 4, num_warps=4 if capability == TUNED_FOR else 8, block_m=64)
    return TilesConfig(64, 128, 6, block_m=64) if capability == TUNED_FOR else TilesConfig(32, 128, 3, block_m=64)


def hopper_shape(N: int, K: int, gated: bool) -> HopperConfig | None:
    """For 32 rows and matrices no smaller than those of Qwen3-4B on any side: what was fastest there, by as many
    programs with as much to do. None for others."""
    if min(N, K) < 2560:
        return None
    if N >= 2**16:
        return HopperConfig(128, 128, 5, 5, programs=132, copier=1, registers=80)
    if gated:
        return HopperConfig(128, 64, 4, 4, lag=1)
    split = -(-96 * 64 // N)
    return HopperConfig(64, 128, 4, 4, split=split) if K >= 1024 * split else None


def invariant_shapes(config: ModelConfig, dtype: torch.dtype, capability: int) -> dict[int, StepShapes]:
    """Shapes with which the sums of a row are added in one order, whatever rows stand beside it and however many there
    are: of products one form with one block and one split of the columns, of attention the one that goes by each row's
    own length. By rows only what is in flight differs. The user's own table is not asked."""
    if dtype != torch.bfloat16:
        return {1: choose_shapes(config, dtype, capability)[2]}
    attention = attention_rows_shape(config, dtype, 64)
    by_op = {op: invariant_products(N, K, op, capability) for op, (N, K) in matrix_sizes(config).items()}
    return {
        rows: StepShapes(**{op: shapes[rows] for op, shapes in by_op.items()}, attention=attention)
        for rows in (16, 32, 64)
    }


def invariant_products(N: int, K: int, op: str, capability: int) -> dict[int, Shape]:
    """Of one matrix, by rows."""
    if capability == TUNED_FOR and (few := hopper_shape(N, K, op == "gate_up")):
        few, most = (few_rows_shape(N, K, rows, op == "gate_up", capability) for rows in (32, 64))
        if not isinstance(most, HopperConfig):  # more of the rows' sums want more warps
            most = replace(few, x_stages=2, num_warps=8, registers=88 if few.copier else few.registers)
        if parts_of_columns(few, K) != parts_of_columns(most, K):
            few = most
        return {16: few, 32: few, 64: most}
    split = 1 if op == "lm_head" else columns_split(N, K)  # no buffer has room for the head's sums
    return {rows: invariant_shape(rows, split) for rows in (16, 32, 64)}


def parts_of_columns(shape: HopperConfig, K: int) -> list[int]:
    """Where the columns of each program begin: what decides the order of the sums."""
    tiles = -(-K // shape.block_k)
    return [part * tiles // shape.split * shape.block_k for part in range(shape.split)]


def invariant_shape(rows: int, split: int) -> WideConfig:
    """As those that were fastest for 16 rows, as long as the registers hold so much beside the rows. Tiles of eight
    rows would be multiplied by another instruction than larger ones."""
    if split > 3 and rows <= 32:
        return WideConfig(64, 128, 4, 3, split=split, block_m=16)
    ahead = 3 if rows <= 32 else 2  # more spills in some versions of Triton
    return WideConfig(64, 128, ahead, 1, split=split, registers=168 if rows <= 16 else 0, block_m=16)


def columns_split(N: int, K: int) -> int:
    """Programs that share the columns of a matrix: two a multiprocessor of the largest GPUs, each with as many tiles as
    it has in flight, and no more than compile in seconds."""
    if isinstance(tuned := TUNED_ROWS[16].get((N, K)), WideConfig):
        return tuned.split
    most = min(2 * 132 // -(-N // 64), K // (4 * 128))
    return min(max(most, -(-K // (40 * 128)), 1), MAX_SPLIT)


def share(programs: int, among: int, most: int = MAX_SPLITS) -> int:
    """What each of `among` has of so many programs: one at least."""
    return min(max(programs // among, 1), most)


def few_rows_attention(
    config: ModelConfig, dtype: torch.dtype, rows: int, capability: int
) -> AttentionConfig | AttentionRowsConfig:
    """Up to 16 rows: as for one, in as few splits as fill the multiprocessors if no row is long; a long one has more,
    so that it takes about as long as alone."""
    wide = config.head_dim > 128 or config.num_heads // config.num_kv_heads > 8
    if rows > 16 or capability != TUNED_FOR or dtype != torch.bfloat16 or wide:
        return attention_rows_shape(config, dtype, rows)
    few = share(2 * 132, rows * config.num_kv_heads, 32)
    return AttentionConfig(64, splits=32, num_warps=4, ahead=2, few=few, turns=4 if rows <= 4 else 16)


def attention_rows_shape(config: ModelConfig, dtype: torch.dtype, rows: int) -> AttentionRowsConfig:
    """Two programs a multiprocessor of the largest GPUs, each with two tiles on their way; a long row alone is split
    into as many items. For few rows tiles are smaller: with more than 48 KiB of shared memory a kernel leaves those
    that run beside it little L1 cache, through which the products of few rows have all their tiles."""
    heads = config.num_kv_heads
    if config.head_dim > 128 or dtype == torch.float32:
        return AttentionRowsConfig(16, share(3 * 132, heads), num_warps=4, least=16, programs=3 * 132)
    if config.num_heads // config.num_kv_heads > 8:
        return AttentionRowsConfig(32, share(3 * 132, heads), num_warps=8, least=8, programs=132)
    if rows <= 4 and dtype == torch.bfloat16:  # a long row is shared by more, as few others are there
        return AttentionRowsConfig(64, share(2 * 132, heads), num_warps=4, least=4, programs=2 * 132, stages=2)
    block_t = 64 if rows > 16 else 32
    return AttentionRowsConfig(block_t, share(2 * 132, heads), num_warps=4, least=16, programs=2 * 132, stages=5)


def queries_shape(
    config: ModelConfig, requests: int, queries: int, capability: int, multiprocessors: int
) -> QueriesConfig:
    """Of `queries` rows of each of so many requests, which share the multiprocessors if none is long: all programs run
    at once, so that each adds up a part. A long one has as many more splits as if it were alone."""
    heads = config.num_kv_heads
    together = capability == TUNED_FOR and requests * heads <= multiprocessors
    splits = share(multiprocessors, heads)
    few = min(share(multiprocessors, requests * heads), splits)
    block_t = 64 if queries * (config.num_heads // config.num_kv_heads) <= 8 else 32
    ahead = 2 if capability >= 90 else 1  # more spills
    return QueriesConfig(
        queries, block_t, splits, ahead=ahead, few=few, turns=2048 // block_t, together=together,
        registers=168 if requests == 1 and capability == TUNED_FOR else 0,  # o_proj's program finds room beside
    )  # fmt: skip


def fp8_kv_shape(
    shape: AttentionConfig | AttentionRowsConfig, capability: int = TUNED_FOR
) -> AttentionConfig | AttentionRowsConfig:
    """For K/V in 8 bits: 32 positions a warp, and the next ones on their way in registers, two programs of four warps a
    multiprocessor; half as many positions of wide heads and before Hopper, where more spill in some Triton versions."""
    rows = isinstance(shape, AttentionRowsConfig)
    half = capability < 90 or shape.block_t <= (16 if rows else 32)
    num_warps = 8 if half and not rows else 4
    block_t = num_warps * (16 if half else 32)
    found = replace(shape, block_t=block_t, num_warps=num_warps, converts=capability >= 89)  # has an instruction for it
    if rows:
        return replace(found, least=max(shape.least * shape.block_t // block_t, 1), programs=264, stages=1)
    turns = max(shape.turns * shape.block_t // block_t, 1)
    return replace(found, ahead=1, splits=min(shape.splits * 8 // num_warps, MAX_SPLITS), turns=turns)


def prompt_attention_shape(
    capability: int, multiprocessors: int, batch_invariant: bool, fp8_kv: bool = False
) -> PromptAttentionConfig:
    """In the batch-invariant mode no choice may go by the rows of a pass: nothing is split, and one kernel does all."""
    shape = PromptAttentionConfig(stages=4) if fp8_kv else PromptAttentionConfig()  # more spill in some Triton versions
    if batch_invariant:
        return replace(shape, splits=1)
    hopper = multiprocessors if capability == 90 else 0
    return replace(shape, heads=16, apart=True, dependent=capability >= 90, hopper=hopper)


def prompt_tiles_fit(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention of prompts by Triton has a launch shape there: elsewhere its tiles need more registers or more
    shared memory than there are, and torch's attention is faster."""
    major, _ = torch.cuda.get_device_capability(device)
    return major == 9 and head_dim <= 128 and dtype != torch.float32
