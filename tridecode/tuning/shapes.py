"""Launch shapes: how the kernels of a pass are launched."""

from dataclasses import dataclass
from typing import ClassVar

MAX_SPLITS = 64  # of the K/V of one row, in attention
TILE_ROWS = 64  # that a buffer has which tiles are read from
DRAFT_SPLITS = 32  # programs that look through the tokens of one row for drafts


class _Blocks:
    """Launch shapes whose programs take block_n rows of the weights at a time."""

    def grid(self, N: int) -> tuple[int, int]:
        """Blocks of N rows, and programs to launch."""
        blocks = -(-N // self.block_n)
        return blocks, min(self.programs or blocks, blocks)


@dataclass(frozen=True)
class MatvecShape(_Blocks):
    """A program takes block_n whole rows at a time.

    registers: the most a thread may use, 0 for no bound. programs: how many share the rows, each taking its next ones
    while it sums; 0 for one program each block_n rows.
    """

    block_n: int
    num_warps: int
    registers: int = 0
    programs: int = 0


@dataclass(frozen=True)
class MatmulShape(_Blocks):
    """Launch shape of a product of few rows: a program takes block_n rows of the weights (a multiple of 16, gate and up
    rows together) at a time, its warps share their columns.

    ahead: tiles of 32 columns (of 4 bits 128, of 8 bits 64) a warp in flight, of the weights, before the wait. x_ahead:
    tiles of 32 columns of the activations; if these are all, they are loaded once a program. registers: the most a
    thread may use, 0 for no bound. block_m: rows of a tile, if a pass has fewer. programs: how many share the rows,
    each taking its next ones while it multiplies; 0 for one program each block_n rows. fetch: blocks of
    packed weights that are on their way to the L2 cache, with the one in registers.
    """

    block_n: int = 16
    num_warps: int = 8
    ahead: int = 16
    x_ahead: int = 4
    registers: int = 0
    block_m: int = 8
    programs: int = 0
    fetch: int = 0


@dataclass(frozen=True)
class TilesShape:
    """Launch shape of a product of up to 64 rows by tiles of block_n rows (of gate and of up each) and block_k columns
    of the weights, `stages` of them in flight. block_m: rows of a tile, if a pass has fewer."""

    block_n: int = 32
    block_k: int = 128
    stages: int = 4
    num_warps: int = 4
    block_m: int = 16


@dataclass(frozen=True)
class WideShape:
    """Launch shape of a product of up to 64 rows: a program takes block_n rows of the weights (16 a warp or a multiple;
    gate and up rows together), in tiles of block_k columns.

    ahead, x_ahead: tiles in flight, of the weights (before the wait) and of the activations. split: programs that share
    the columns. registers: the most a thread may use, 0 for no bound. block_m: rows of a tile, if a pass has fewer.
    """

    block_n: int = 64
    block_k: int = 64
    ahead: int = 4
    x_ahead: int = 1
    num_warps: int = 4
    split: int = 1
    registers: int = 0
    block_m: int = 8


@dataclass(frozen=True)
class HopperShape:
    """Launch shape of a product of up to 64 rows on Hopper: a program takes block_n rows of the weights (gate and up
    rows together), in tiles of block_k columns: 128 bytes of a row, or a multiple of that.

    stages, x_stages: tiles in flight, of the weights (before the wait) and of the activations. split: programs that
    share the columns, not of gate and up. programs: how many share the rows, each taking its next ones while it
    multiplies; 0 for one each block_n rows. lag: 1 where a tile's place is free only when the next one is multiplied.
    copier: 1 where a warp of its own copies; three that idle go along, and what these four leave of their registers
    those who multiply have. registers: the most a thread may use.
    """

    block_n: int = 64
    block_k: int = 128
    stages: int = 4
    x_stages: int = 4
    split: int = 1
    num_warps: int = 4
    programs: int = 0
    lag: int = 0
    copier: int = 0
    registers: int = 128


@dataclass(frozen=True)
class RingShape(_Blocks):
    """Launch shape of a product of one row on Hopper, of weights in fewer bits: a program takes 16 whole rows of the
    weights at a time (gate and up rows together), its warps share their columns.

    tiles: of 64 bytes of a row, that each warp has of a stage. stages: in flight, before the wait too; a stage is
    tiles * num_warps KiB of shared memory. x_shared: the activations are in shared memory, else in registers.
    programs: how many share the rows, each taking its next ones while it multiplies; 0 for one each 16 rows. copier: 1
    where a warp of its own copies, as in HopperShape; for programs that take several blocks, or one of more stages than
    the ring has. registers: the most a thread may use, 0 for no bound.
    """

    block_n: ClassVar[int] = 16
    num_warps: int = 4
    tiles: int = 5
    stages: int = 2
    x_shared: bool = False
    programs: int = 0
    copier: int = 0
    registers: int = 0


Shape = MatvecShape | MatmulShape | TilesShape | WideShape | HopperShape | RingShape


@dataclass(frozen=True)
class AttentionShape:
    """Launch shape of attention of one row, or few: `block_t` positions a turn (a multiple or a divisor of the page),
    at most `splits` programs per K/V head and row.

    few: splits of a row, as long as none has more than `turns` turns; a longer row has more of them. 0: as many as
    there may be.

    ahead: the turns of a split whose K and V are loaded before the wait; where all positions fit in as many, one split
    takes them. Of K/V in 8 bits one turn is, and converts says that the GPU has an instruction for them. registers: the
    most a thread may use, 0 for no bound.
    """

    block_t: int = 64
    splits: int = 32
    num_warps: int = 4
    registers: int = 0
    ahead: int = 1
    converts: bool = False
    few: int = 0
    turns: int = 32


@dataclass(frozen=True)
class AttentionRowsShape:
    """Launch shape of attention of several rows: `programs` share the work, items of `block_t` positions a turn; a row
    has at most `splits` items per K/V head, each of at least `least` turns. registers: as above. stages: of the loop
    over an item's tiles, two for each tile on its way through shared memory and one; 1: the next one, in registers.
    early: the first tile is loaded before the wait, as no launch of this pass writes it. converts: as above."""

    block_t: int = 64
    splits: int = 32
    num_warps: int = 4
    registers: int = 0
    least: int = 4
    programs: int = 132
    stages: int = 1
    early: bool = True
    converts: bool = False


@dataclass(frozen=True)
class QueriesShape:
    """Launch shape of attention of `queries` rows of each request, which are attended to together; fields as of
    AttentionShape for a request, whose splits have `least` turns or more. together: where no request has more than
    `few` splits, all programs run at once, and those of a head add up together."""

    queries: int
    block_t: int = 32
    splits: int = 32
    num_warps: int = 8
    ahead: int = 1
    few: int = 0
    turns: int = 32
    least: int = 2
    together: bool = False
    registers: int = 0


@dataclass(frozen=True)
class PromptAttentionShape:
    """Launch shape of attention of prompts: block_m rows at a time, of one head or, of the same positions, of up to
    `heads` that share K and V; `stages` pages in flight. Where these blocks are fewer than `programs`, they are split,
    into up to `splits` parts of at least `least` pages each. apart: a launch of its own adds up the parts, else the
    last of them. dependent: launched while the kernel before drains. hopper: the multiprocessors of a GPU that
    prompt_attention_hopper is for; what fits that kernel is left to it. 0: none is."""

    block_m: int = 64
    num_warps: int = 4
    stages: int = 3
    programs: int = 264
    splits: int = 8
    least: int = 4
    heads: int = 1
    apart: bool = False
    dependent: bool = False
    hopper: int = 0


@dataclass(frozen=True)
class FetchShape:
    """Launch shape of what comes from the host's memory: few programs, so that others run beside them, each with `tile`
    elements of 8 bytes in flight."""

    programs: int = 16
    num_warps: int = 16
    tile: int = 4096


@dataclass(frozen=True)
class StepShapes:
    qkv: Shape
    o_proj: Shape
    gate_up: Shape
    down: Shape
    lm_head: Shape
    attention: AttentionShape | AttentionRowsShape | QueriesShape
