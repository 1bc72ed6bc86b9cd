"""mma on registers: assembly with which a warp multiplies a tile of a packed tensor, and the data of each lane.

A tile is 16 rows of the weight by 64 bytes. The instruction (mma, 16 x 8 x 16) takes the rows of the weight as its rows
and activations as its columns. A lane has 16 bytes of each of two rows of the weight and, of one row of the
activations, the columns of these bytes. As in register_tiles.py, columns are renamed so that no data moves. Tensors
here are [threads, 4]: four registers of each lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # Number of words that are adjacent in shared memory: 128 bytes, or two tiles.


@gluon.constexpr_function
def parts_of(form):
    """Return the number of parts of a tile. A part has 32 columns, eight for each lane."""
    return 4 if form == "int4" else 2


@gluon.constexpr_function
def lanes_layout(warps):
    """Return the layout of tensors [threads, 4]: four registers of each lane."""
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def words_layout(warps):
    """Return the layout of the words of two rows for each lane, [8 * warps, 32].

    The two warps of a pair have the halves of 16 rows. Eight lanes load at the same time. Their rows are four apart, so
    that the swizzle puts their bytes into different banks.
    """
    pairs = [[16 << i, 0] for i in range((warps // 2).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, [[0, 16], *pairs], [], [8 * warps, 32])


@gluon.constexpr_function
def row_words_layout(warps):
    """Return the layout of the words of two tiles for 16 rows of each warp, [16 * warps, 32].

    The rows are eight of each warp, then again eight of each warp. See `words_layout` for the order of the lanes.
    """
    own = [[8 << i, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [8 * warps, 0]], lanes, own, [], [16 * warps, 32])


@gluon.constexpr_function
def x_layout(warps, parts):
    """Return the layout of the activations of the warps' tiles, [8, warps * parts * 16] int32."""
    regs = [[0, 1], [0, 2]] + [[0, 16 << i] for i in range(parts.bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    own = [[0, parts * 16 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, own, [], [8, warps * parts * 16])


@gluon.constexpr_function
def _mma(to, a, b):
    """Return the instruction for to += a * b on registers with these names."""
    into = ", ".join(f"{to}{i}" for i in range(4))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{into}}}, {{{a}}}, {{{b}}}, {{{into}}};"


@gluon.constexpr_function
def _unpacked(form, words, to):
    """Return assembly that unpacks eight columns of a row from words to the registers {to}0 to {to}3."""
    if form == "int4":
        low, high, w = f"{to}0", f"{to}1", words[0]
        return (
            f"shr.u32 t, {w}, 8; and.b32 {low}, {w}, 0x000f000f; and.b32 {high}, {w}, 0x00f000f0; "
            f"and.b32 {to}2, t, 0x000f000f; and.b32 {to}3, t, 0x00f000f0;"
        )
    return " ".join(
        f"and.b32 {to}{2 * i}, {w}, 0x87f087f0; shl.b32 t, {w}, 4; and.b32 t, t, 0x80f080f0; shr.u32 u, {w}, 4; "
        f"lop3.b32 {to}{2 * i + 1}, u, 0x07000700, t, 0xea;"
        for i, w in enumerate(words)
    )


@gluon.constexpr_function
def tile_asm(form):
    """Return assembly that adds a tile's product to two chains of sums.

    $0-$3 and $4-$7 are the results. The last eight operands are the previous sums. The operands between them are four
    words of a row, four words of the row eight rows later, and four registers of activations for each part.
    """
    parts = parts_of(form)
    words_of_part, first = 4 // parts, 16 + 4 * parts
    lines = [".reg .b32 t, u, l0, l1, l2, l3, h0, h1, h2, h3; .reg .f32 a0, a1, a2, a3, b0, b1, b2, b3;"]
    lines += [f"mov.f32 {chain}{i}, ${first + 4 * at + i};" for at, chain in enumerate("ab") for i in range(4)]
    for part in range(parts):
        words = range(part * words_of_part, (part + 1) * words_of_part)
        lines.append(_unpacked(form, [f"${8 + i}" for i in words], "l"))
        lines.append(_unpacked(form, [f"${12 + i}" for i in words], "h"))
        x = 16 + 4 * part
        lines.append(_mma("a", "l0, h0, l1, h1", f"${x}, ${x + 1}"))
        lines.append(_mma("b", "l2, h2, l3, h3", f"${x + 2}, ${x + 3}"))
    lines += [f"mov.f32 ${4 * at + i}, {chain}{i};" for at, chain in enumerate("ab") for i in range(4)]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def tile_operands(form):
    """Return the operand constraints of `tile_asm`."""
    return ",".join(["=f"] * 8 + ["r"] * (8 + 4 * parts_of(form)) + ["f"] * 8)


@gluon.constexpr_function
def zeros_asm():
    """Return assembly that sets $0-$3 to the product of raised x with a tile whose codes of four bits are all -8."""
    lines = [".reg .b32 l, h; .reg .f32 a0, a1, a2, a3, b0, b1, b2, b3;"]
    lines += ["mov.b32 l, 0x80088008; mov.b32 h, 0x80808080;"]
    lines += [f"mov.f32 {chain}{i}, 0f00000000;" for chain in "ab" for i in range(4)]
    for part in range(4):
        x = 4 + 4 * part
        lines.append(_mma("a", "l, l, h, h", f"${x}, ${x + 1}"))
        lines.append(_mma("b", "l, l, h, h", f"${x + 2}, ${x + 3}"))
    return "{ " + " ".join(lines + [f"add.f32 ${i}, a{i}, b{i};" for i in range(4)]) + " }"


@gluon.constexpr_function
def raised_asm(form):
    """Return assembly that scales two registers of activations for the weight's form (see bits.py)."""
    second = "0x5d805d80" if form == "int4" else "0x5f805f80"
    return (
        "{ .reg .b32 up, other, nought; mov.b32 up, 0x5f805f80; mov.b32 nought, 0x80008000; "
        f"mov.b32 other, {second}; fma.rn.bf16x2 $0, $2, up, nought; fma.rn.bf16x2 $1, $3, other, nought; }}"
    )


# Computes acc += sums * scale for a row and for the row eight rows later. Operands: acc, two chains of sums, two
# scales.
SCALED = gl.constexpr(
    "{ .reg .f32 s; "
    + " ".join(
        f"add.f32 s, ${8 + i}, ${12 + i}; fma.rn.f32 ${i}, s, ${16 + i + (i // 2 * 4)}, ${4 + i};" for i in range(4)
    )
    + " }"
)
SCALED_OPERANDS = gl.constexpr(",".join(["=f"] * 4 + ["f"] * 20))


@gluon.jit
def raised(x, FORM: gl.constexpr):
    """Scale activations for the weight's form: int32 [..., multiple of 2], starting with an even register."""
    return gl.inline_asm_elementwise(raised_asm(FORM), "=r,=r,r,r", [x], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def all_raised(x, FORM: gl.constexpr):
    """Apply `raised` to the parts of a tile, a tuple."""
    scaled_parts = ()
    for i in gl.static_range(len(x)):
        scaled_parts += (raised(x[i], FORM),)
    return scaled_parts


@gluon.jit
def zero_sum(x):
    """Return the contribution of the zero points of four bits to a tile's sums: fp32 [threads, 2], for two activations.

    It is the same for all rows of the weight. x must be raised.
    """
    sums = gl.inline_asm_elementwise(
        zeros_asm(), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", x, dtype=gl.float32, is_pure=True, pack=4
    )
    return gl.split(gl.permute(gl.reshape(sums, [sums.shape[0], 2, 2]), (0, 2, 1)))[0]


@gluon.jit
def both_rows(sums, L: gl.constexpr):
    """Return a `zero_sum` as the initial value of the sums of two rows: [threads, 4]."""
    both = gl.reshape(gl.permute(gl.join(sums, sums), (0, 2, 1)), [sums.shape[0], 4])
    return gl.convert_layout(both, L, assert_trivial=True)


@gluon.jit
def multiply(words, x, a, b, FORM: gl.constexpr):
    """Add a tile's product to the sums `a` and `b`, fp32 [threads, 4]. words: two rows, int32 [threads, 4]."""
    return gl.inline_asm_elementwise(
        tile_asm(FORM), tile_operands(FORM), words + x + (a, b), dtype=(gl.float32, gl.float32), is_pure=True, pack=4
    )


@gluon.jit
def scaled(acc, a, b, low, high):
    """Return `acc + (a + b) * scale`. `low` and `high`, [threads], are the scales of the two rows."""
    low = gl.broadcast(low[:, None], acc)[0]
    high = gl.broadcast(high[:, None], acc)[0]
    return gl.inline_asm_elementwise(
        SCALED, SCALED_OPERANDS, [acc, a, b, low, high], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def load_words(shared, WARPS: gl.constexpr):
    """Load 16 bytes of two rows for each lane, int32 [threads, 4] each, from [8 * WARPS, 32] in shared memory."""
    L: gl.constexpr = lanes_layout(WARPS)
    words = shared.load(words_layout(WARPS))
    # Dimensions: warp pair, half of the rows, row, row, tile, lane, word.
    words = gl.reshape(words, [WARPS // 2, 2, 2, 4, 2, 4, 4])
    words = gl.reshape(gl.permute(words, (0, 4, 3, 2, 5, 6, 1)), [WARPS * 32, 4, 2])
    low, high = gl.split(words)
    return gl.convert_layout(low, L, assert_trivial=True), gl.convert_layout(high, L, assert_trivial=True)


@gluon.jit
def load_row_words(shared, WARPS: gl.constexpr):
    """Load the words of two tiles from [16 * WARPS, 32] in shared memory; see `row_words_layout`.

    Returns for each tile a pair of int32 [threads, 4]: 16 bytes of a row, and of the row eight rows later.
    """
    L: gl.constexpr = lanes_layout(WARPS)
    words = shared.load(row_words_layout(WARPS))
    # Dimensions: half of the rows, warp, row, row, tile, lane, word.
    words = gl.reshape(words, [2, WARPS, 2, 4, 2, 4, 4])
    low, high = gl.split(gl.reshape(gl.permute(words, (1, 3, 2, 5, 6, 4, 0)), [WARPS * 32, 4, 2, 2]))
    low_first, low_second = gl.split(low)
    high_first, high_second = gl.split(high)
    return (
        (
            gl.convert_layout(low_first, L, assert_trivial=True),
            gl.convert_layout(high_first, L, assert_trivial=True),
        ),
        (
            gl.convert_layout(low_second, L, assert_trivial=True),
            gl.convert_layout(high_second, L, assert_trivial=True),
        ),
    )


@gluon.jit
def load_shared_x(shared, WARPS: gl.constexpr, PARTS: gl.constexpr):
    """Load the activations of each lane from [WARPS * PARTS * 16] int32 in shared memory.

    Returns a tuple of int32 [threads, 4], one for each part of a tile.
    """
    L: gl.constexpr = lanes_layout(WARPS)
    X_L: gl.constexpr = x_layout(WARPS, PARTS)
    x = shared.load(gl.SliceLayout(0, X_L))[None, :] + gl.zeros([8, WARPS * PARTS * 16], gl.int32, X_L)
    x = gl.permute(gl.reshape(x, [8, WARPS, PARTS, 4, 4]), (1, 0, 3, 4, 2))
    if PARTS == 2:
        parts = gl.split(gl.reshape(x, [WARPS * 32, 4, 2]))
    else:
        even, odd = gl.split(gl.reshape(x, [WARPS * 32, 4, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        parts = (first, second, third, fourth)
    x = ()
    for i in gl.static_range(PARTS):
        x += (gl.convert_layout(parts[i], L, assert_trivial=True),)
    return x


@gluon.jit
def sums_of(acc, GATED: gl.constexpr, WARPS: gl.constexpr):
    """Return the lanes' sums [threads, 4] as [WARPS, 16, 8], or as two [WARPS, 8, 8] if GATED.

    The dimensions are warps, rows and activations.
    """
    # Dimensions: warp, row, row, activation, half of the rows, activation.
    sums = gl.reshape(acc, [WARPS, 4, 2, 4, 2, 2])
    if GATED:
        return gl.split(gl.reshape(gl.permute(sums, (0, 2, 1, 3, 5, 4)), [WARPS, 8, 8, 2]))
    else:
        return (gl.reshape(gl.permute(sums, (0, 4, 2, 1, 3, 5)), [WARPS, 16, 8]),)
