"""Parts of matmul_ring: what one warp does with a tile of the weights, as assembly, and where its lanes find what.

A tile is 16 rows of the weights by 64 bytes. The instruction (mma, 16 x 8 x 16) has the rows of the weights as its
rows, activations as its columns. A lane has 16 bytes of each of two rows, and of one row of the activations the columns
that these bytes hold; as in matmul, columns are renamed so that neither moves. Tensors here are [threads, 4]: four
registers of each lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(32)  # that lie side by side in shared memory: 128 bytes, of two tiles


@gluon.constexpr_function
def parts_of(form):
    """Pieces of 32 columns, of which a lane has eight, in a tile."""
    return 4 if form == "int4" else 2


@gluon.constexpr_function
def lanes_layout(warps):
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def words_layout(warps):
    """Of two rows' words [8 * warps, 32]: each pair of warps has the halves of 16 rows. Eight lanes that are served at
    once have rows four apart, whose bytes the swizzle puts into different banks."""
    pairs = [[16 << i, 0] for i in range((warps // 2).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, [[0, 16], *pairs], [], [8 * warps, 32])


@gluon.constexpr_function
def x_layout(warps, parts):
    """Of the activations of the warps' tiles [8, warps * parts * 16] int32, as `load_x` hands them out."""
    regs = [[0, 1], [0, 2]] + [[0, 16 << i] for i in range(parts.bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    own = [[0, parts * 16 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, own, [], [8, warps * parts * 16])


@gluon.constexpr_function
def _mma(to, a, b):
    """to += a * b; names of registers."""
    into = ", ".join(f"{to}{i}" for i in range(4))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{into}}}, {{{a}}}, {{{b}}}, {{{into}}};"


@gluon.constexpr_function
def _unpacked(form, words, of):
    """Assembly that makes eight columns of a row, in registers {of}0 to {of}3, from a list of words."""
    if form == "int4":
        low, high, w = f"{of}0", f"{of}1", words[0]
        return (
            f"shr.u32 t, {w}, 8; and.b32 {low}, {w}, 0x000f000f; and.b32 {high}, {w}, 0x00f000f0; "
            f"and.b32 {of}2, t, 0x000f000f; and.b32 {of}3, t, 0x00f000f0;"
        )
    return " ".join(
        f"and.b32 {of}{2 * i}, {w}, 0x87f087f0; shl.b32 t, {w}, 4; and.b32 t, t, 0x80f080f0; shr.u32 u, {w}, 4; "
        f"lop3.b32 {of}{2 * i + 1}, u, 0x07000700, t, 0xea;"
        for i, w in enumerate(words)
    )


@gluon.constexpr_function
def tile_asm(form):
    """Two chains of sums go on: ($0-$3, $4-$7) = the last eight operands + the tile's product. Operands: the four words
    of a row and of that eight rows on, then four registers of activations for each part."""
    parts = 4 if form == "int4" else 2
    of_part, first = 4 // parts, 16 + 4 * parts
    lines = [".reg .b32 t, u, l0, l1, l2, l3, h0, h1, h2, h3; .reg .f32 a0, a1, a2, a3, b0, b1, b2, b3;"]
    lines += [f"mov.f32 {chain}{i}, ${first + 4 * at + i};" for at, chain in enumerate("ab") for i in range(4)]
    for part in range(parts):
        words = range(part * of_part, (part + 1) * of_part)
        lines.append(_unpacked(form, [f"${8 + i}" for i in words], "l"))
        lines.append(_unpacked(form, [f"${12 + i}" for i in words], "h"))
        x = 16 + 4 * part
        lines.append(_mma("a", "l0, h0, l1, h1", f"${x}, ${x + 1}"))
        lines.append(_mma("b", "l2, h2, l3, h3", f"${x + 2}, ${x + 3}"))
    lines += [f"mov.f32 ${4 * at + i}, {chain}{i};" for at, chain in enumerate("ab") for i in range(4)]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def tile_operands(form):
    parts = 4 if form == "int4" else 2
    return ",".join(["=f"] * 8 + ["r"] * (8 + 4 * parts) + ["f"] * 8)


@gluon.constexpr_function
def zeros_asm():
    """$0-$3 = what codes of four bits that all are -8 make of the activations of a tile, which `raised` has."""
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
    """Two registers of activations as weights of a form want them (kernels/linear/bits.py)."""
    second = "0x5d805d80" if form == "int4" else "0x5f805f80"
    return (
        "{ .reg .b32 up, other, nought; mov.b32 up, 0x5f805f80; mov.b32 nought, 0x80008000; "
        f"mov.b32 other, {second}; fma.rn.bf16x2 $0, $2, up, nought; fma.rn.bf16x2 $1, $3, other, nought; }}"
    )


# acc += sums * scale, of the first row and of that eight rows on: acc, two chains of sums, two scales in each register.
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
    """Activations, int32 [..., a multiple of 2], from an even register on."""
    return gl.inline_asm_elementwise(raised_asm(FORM), "=r,=r,r,r", [x], dtype=gl.int32, is_pure=True, pack=2)


@gluon.jit
def all_raised(x, FORM: gl.constexpr):
    """The same of the parts of a tile, a tuple."""
    found = ()
    for i in gl.static_range(len(x)):
        found += (raised(x[i], FORM),)
    return found


@gluon.jit
def off_of(x):
    """What is to be added for the zero points of four bits, the same for all rows of the weights: fp32 [threads, 2], of
    two activations; x: of a tile, raised."""
    sums = gl.inline_asm_elementwise(
        zeros_asm(), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", x, dtype=gl.float32, is_pure=True, pack=4
    )
    return gl.split(gl.permute(gl.reshape(sums, [sums.shape[0], 2, 2]), (0, 2, 1)))[0]


@gluon.jit
def of_both_rows(off, L: gl.constexpr):
    """What `off_of` found, as sums begin with it: [threads, 4]."""
    both = gl.reshape(gl.permute(gl.join(off, off), (0, 2, 1)), [off.shape[0], 4])
    return gl.convert_layout(both, L, assert_trivial=True)


@gluon.jit
def multiply(words, x, a, b, FORM: gl.constexpr):
    """Two chains of sums, fp32 [threads, 4], with a tile's product: words: two rows', int32 [threads, 4] each."""
    return gl.inline_asm_elementwise(
        tile_asm(FORM), tile_operands(FORM), words + x + (a, b), dtype=(gl.float32, gl.float32), is_pure=True, pack=4
    )


@gluon.jit
def scaled(acc, a, b, low, high):
    """acc + (a + b) * scale; low, high: [threads], of both rows."""
    low = gl.broadcast(low[:, None], acc)[0]
    high = gl.broadcast(high[:, None], acc)[0]
    return gl.inline_asm_elementwise(
        SCALED, SCALED_OPERANDS, [acc, a, b, low, high], dtype=gl.float32, is_pure=True, pack=4
    )


@gluon.jit
def load_words(piece, WARPS: gl.constexpr):
    """Of each lane two rows' 16 bytes, int32 [threads, 4] each; piece: [8 * WARPS, 32] int32 in shared memory."""
    L: gl.constexpr = lanes_layout(WARPS)
    words = piece.load(words_layout(WARPS))
    words = gl.reshape(words, [WARPS // 2, 2, 2, 4, 2, 4, 4])  # pair, half of the rows, row, row, tile, lane, word
    words = gl.reshape(gl.permute(words, (0, 4, 3, 2, 5, 6, 1)), [WARPS * 32, 4, 2])
    low, high = gl.split(words)
    return gl.convert_layout(low, L, assert_trivial=True), gl.convert_layout(high, L, assert_trivial=True)


@gluon.jit
def load_shared_x(piece, WARPS: gl.constexpr, PARTS: gl.constexpr):
    """Of each lane its activations, a tuple of int32 [threads, 4] for each part of a tile; piece: in shared memory,
    [WARPS * PARTS * 16] int32."""
    L: gl.constexpr = lanes_layout(WARPS)
    X_L: gl.constexpr = x_layout(WARPS, PARTS)
    x = piece.load(gl.SliceLayout(0, X_L))[None, :] + gl.zeros([8, WARPS * PARTS * 16], gl.int32, X_L)
    x = gl.permute(gl.reshape(x, [8, WARPS, PARTS, 4, 4]), (1, 0, 3, 4, 2))
    if PARTS == 2:
        found = gl.split(gl.reshape(x, [WARPS * 32, 4, 2]))
    else:
        even, odd = gl.split(gl.reshape(x, [WARPS * 32, 4, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = (first, second, third, fourth)
    x = ()
    for i in gl.static_range(PARTS):
        x += (gl.convert_layout(found[i], L, assert_trivial=True),)
    return x


@gluon.jit
def sums_of(acc, GATED: gl.constexpr, WARPS: gl.constexpr):
    """The lanes' sums [threads, 4], a tuple: [WARPS, 16, 8], if GATED two of eight
    rows: warps, rows, activations."""
    sums = gl.reshape(acc, [WARPS, 4, 2, 4, 2, 2])  # warp, row, row, activation, half of the rows, activation
    if GATED:
        return gl.split(gl.reshape(gl.permute(sums, (0, 2, 1, 3, 5, 4)), [WARPS, 8, 8, 2]))
    else:
        return (gl.reshape(gl.permute(sums, (0, 4, 2, 1, 3, 5)), [WARPS, 16, 8]),)


@gluon.jit
def load_x(w, warp, lane, c: gl.constexpr, L: gl.constexpr):
    """The activations of the warps' tiles c: of each part int32 [threads, 4]. Beyond the columns they are 0."""
    STEP: gl.constexpr = w.WARPS * w.PARTS * 32
    column = (warp * (w.PARTS * 32) + lane % 4 * 8)[:, None]
    x_words = w.x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    words = column // 2 + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    xs = x_words + gl.minimum(lane // 4, w.rows - 1)[:, None] * (w.stride_xm // 2) + words
    found = ()
    for part in gl.static_range(w.PARTS):
        ptrs = xs + (c * STEP // 2 + part * 16)
        if (c + 1) * STEP > w.K:
            found += (gl.load(ptrs, mask=column + c * STEP < w.K, other=0),)
        else:
            found += (gl.load(ptrs),)
    return found


@gluon.jit
def load_scales(w, block, warp, row):
    """Those of a block's groups: for each of the warps' tiles of both rows of a lane, one after the other."""
    GROUPS: gl.constexpr = (w.K + w.GROUP - 1) // w.GROUP
    STEP: gl.constexpr = w.WARPS * w.PARTS * 32
    low_row = block * w.OUT_N + row
    low = w.scale_ptr + low_row // w.SCALE_ROWS * GROUPS
    high = w.scale_ptr + (low_row + (w.N if w.GATED else 8)) // w.SCALE_ROWS * GROUPS
    found = ()
    for c in gl.static_range(w.TILES):
        column = c * STEP + warp * (w.PARTS * 32)
        if (c + 1) * STEP > w.K:
            column = gl.minimum(column, w.K - 1)
        found += (gl.load(low + column // w.GROUP), gl.load(high + column // w.GROUP))
    return found


@gluon.jit
def share_x(w):
    """All activations into shared memory, as weights of the form want them; beyond the columns they are 0."""
    WORDS_X: gl.constexpr = w.WARPS * w.PARTS * 16
    words = gl.arange(0, WORDS_X, gl.SliceLayout(0, gl.BlockedLayout([1, 2], [1, 32], [1, w.WARPS], [1, 0])))
    ptrs = w.x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + words
    found = ()
    for c in gl.static_range(w.TILES):
        if (c + 1) * WORDS_X * 2 > w.K:
            found += (gl.load(ptrs + c * WORDS_X, mask=words * 2 + c * WORDS_X * 2 < w.K, other=0),)
        else:
            found += (gl.load(ptrs + c * WORDS_X),)
    for c in gl.static_range(w.TILES):
        w.x_shared[c].store(raised(found[c], w.FORM))


@gluon.jit
def add_tile(
    acc,
    chains,
    words,
    of_tile,
    off,
    scales,
    c: gl.constexpr,
    FRESH: gl.constexpr,
    GROUPED: gl.constexpr,
    FORM: gl.constexpr,
    L: gl.constexpr,
):
    """The warps' tiles c times the activations: to what stands in acc, if FRESH, or in the chains. off: a tuple, for
    the zero points of four bits; if empty, that is computed here."""
    to: gl.constexpr = c % 2
    if FRESH:
        b = gl.zeros([L.warps_per_cta[0] * 32, 4], gl.float32, L)
        a = b
        if FORM == "int4":
            a = of_both_rows(off[c] if len(off) > 0 else off_of(of_tile), L)
        a, b = multiply(words, of_tile, a, b, FORM)
        if GROUPED:
            now = scaled(acc[to], a, b, scales[2 * c].to(gl.float32), scales[2 * c + 1].to(gl.float32))
        else:
            now = acc[to] + (a + b)
        acc = acc[:to] + (now,) + acc[to + 1 :]
    else:
        chains = chains[:to] + (multiply(words, of_tile, chains[to][0], chains[to][1], FORM),) + chains[to + 1 :]
    return acc, chains
