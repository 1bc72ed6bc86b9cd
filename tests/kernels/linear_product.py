"""One launch of a linear kernel with poisoned outputs, checked against the reference."""

from dataclasses import replace

import torch
from util import BF16_ROUNDING, CUDA, DEVICE, PDL, assert_close, meta_rows, norm_weight, random

from tridecode import layout
from tridecode.kernels.linear.packed import Packed, QuantizedWeight
from tridecode.kernels.linear.project import AddResidual, Gated, Normed, Plain, adapted_ref
from tridecode.kernels.linear.registry import LINEAR_KERNELS
from tridecode.kernels.linear.split_sums import make_buffers
from tridecode.kernels.linear.weight import LoadedLinear

EPS = 1e-6
EPILOGUES = ("normed", "normed_bias", "gated", "residual")
PLAIN = ("plain", "plain_bias")
# Products of bf16 are exact in fp32. The order of sums differs, and wgmma truncates.
TOLERANCE = 2e-5 if CUDA else 1e-5
ROUNDED = BF16_ROUNDING + 2e-3  # Tolerance of outputs in bf16.
SPARE = 64  # Number of unused columns between the rows of strided buffers.
# name: (bits, columns of a scale (0: all), rows of a scale, whether it has zero points, whether columns are reordered)
SCHEMES = {
    "int4": (4, 64, 1, False, False),
    "int4_groups_of_128": (4, 128, 1, False, False),
    "int4_groups_of_32": (4, 32, 1, False, False),
    "int4_groups_of_32_zeros": (4, 32, 1, True, False),
    "int4_zeros": (4, 128, 1, True, False),
    "int4_a_row": (4, 0, 1, False, False),
    "int4_ordered": (4, 64, 1, True, True),
    "int8": (8, 32, 1, False, False),
    "int8_zeros": (8, 64, 1, True, False),
    "int8_a_row": (8, 0, 1, False, False),
    "e4m3": (8, 0, 1, False, False),
    "e4m3_blocks": (8, 128, 16, False, False),
}
# Schemes of GGUF files: (bits, codes, columns of a scale, minimums, columns of a factor of integer scales (0: none))
GGUF_SCHEMES = {
    "int4_minimums": (4, 16, 32, True, 0),
    "int4_minimums_over": (4, 16, 32, True, 256),
    "int6_minimums": (6, 64, 32, True, 0),
    "int6_minimums_over": (6, 64, 32, True, 256),
    "int6_minimums_over_16": (6, 64, 16, True, 256),
    "int6_over": (6, 64, 16, False, 256),
    "int8_minimums": (8, 256, 32, True, 0),
    "int8_minimums_over": (8, 256, 16, True, 256),
}


def width_of(scheme: str, k: int) -> int:
    """Return k. If scales have factors, round it up to a multiple of 128, so that kernels can load words of scales."""
    return -(-k // 128) * 128 if "_over" in scheme else k


def kernel_of(config):
    return next(kernel for kernel in LINEAR_KERNELS if kernel.config is type(config))


def dense(n: int, k: int, dtype=torch.bfloat16) -> LoadedLinear:
    return LoadedLinear(random(n, k, dtype=dtype, scale=k**-0.5))


def packed(scheme: str, n: int, k: int) -> LoadedLinear:
    """Return a linear with random codes, in a scheme of SCHEMES or GGUF_SCHEMES. Its products are of magnitude 1."""
    if scheme in GGUF_SCHEMES:
        return _with_minimums(scheme, n, k)
    bits, group, rows, zeros, ordered = SCHEMES[scheme]
    number_type, generator = scheme.split("_")[0], torch.Generator().manual_seed(n + k)
    group, blocks = group or k, -(-n // rows)
    size = (2**-0.5 if number_type == "e4m3" else 2.0 ** (2 - bits)) * k**-0.5
    scale = (torch.rand(blocks, -(-k // group), generator=generator) + 0.5) * size
    codes, zero = torch.randint(0, 2**bits, (n, k), generator=generator).to(torch.uint8), None
    if number_type == "e4m3":  # All codes except NaN. Subnormal numbers occur, and small magnitudes are more frequent.
        codes = (codes & 0xBF).view(torch.float8_e4m3fn)
    elif zeros:
        half = 2 ** (bits - 1)
        zero = torch.randint(half - 3, half + 4, (n, -(-k // group)), generator=generator).to(torch.uint8)
    order = torch.randperm(k, generator=generator) if ordered else None
    scale_dtype = torch.float32 if number_type == "e4m3" else torch.float16
    description = Packed(number_type, bits, k, group, rows, zeros, ordered, scale_dtype)
    return _loaded(description, QuantizedWeight(codes, scale.to(scale_dtype), rows, group, bits, zero, order))


def _with_minimums(scheme: str, n: int, k: int) -> LoadedLinear:
    bits, count, group, minimums, over_group = GGUF_SCHEMES[scheme]
    generator, groups = torch.Generator().manual_seed(n + k), -(-k // group)
    codes, lows = torch.randint(0, count, (n, k), generator=generator), -(-k // max(group, 32))
    size, minimum, over = 2 / count * k**-0.5, None, None
    if over_group:
        dtype, least = torch.int8, 0 if bits == 4 else -64
        scale = torch.randint(least, 64, (n, groups), generator=generator).to(dtype)
        if minimums:
            minimum = torch.randint(least, 64, (n, lows), generator=generator).to(dtype)
        over = (torch.rand(n, -(-k // over_group), 1 + minimums, generator=generator) + 0.5) * size / 48
        over[:, :, 1:] *= count / (2 if bits == 4 else 8)  # Other codes have both signs.
        over = over.half()
    else:
        dtype = torch.float16
        scale = ((torch.rand(n, groups, generator=generator) + 0.5) * size).half()
        low = 0.2 if bits == 4 else 0.5
        minimum = ((torch.rand(n, lows, generator=generator) - low) * size * count).half()
    description = Packed(f"int{bits}", bits, k, group, scale_dtype=dtype, minimums=minimums, over_group=over_group)
    weight = QuantizedWeight(codes.to(torch.uint8), scale, 1, group, bits, None, None, minimum, over, over_group)
    return _loaded(description, weight)


def _loaded(description: Packed, weight: QuantizedWeight) -> LoadedLinear:
    """Pack a weight, and check that it can be unpacked."""
    n = len(weight.codes)
    tensors = {part: torch.empty(shape, dtype=dtype) for part, (shape, dtype) in description.shapes(n).items()}
    description.pack(tensors, 0, weight)
    linear = LoadedLinear(**{part: tensor.to(DEVICE) for part, tensor in tensors.items()}, packed=description)
    assert torch.equal(linear.matrix().cpu(), weight.dequantize())
    return linear


def idle(rows: int, *which: int) -> torch.Tensor:
    """Return meta in which all rows are active, except the rows `which`."""
    meta = meta_rows(*([0] * rows))
    meta[list(which), layout.STATUS] = layout.STOP
    return meta


def same(first, second) -> bool:
    """Return whether two lists of outputs have equal bits, NaN included."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


class Product:
    """The arguments of a launch for one epilogue of EPILOGUES or PLAIN.

    Args:
        dtype: dtype of x.
        short: dtype of outputs that the next linear reads. The default is `dtype`.
        stopped: rows that are not active.
        strided: whether SPARE columns separate the rows of every buffer.
        partials: number of partial sums of squares that the norm reads.

    Attributes:
        adapters: the LinearAdapters of a launch, or None.
    """

    adapters = None

    def __init__(
        self, epilogue, linear, rows, dtype=torch.bfloat16, short=None, stopped=(1,), strided=False, partials=5
    ):
        self.epilogue, _, bias = epilogue.partition("_")
        self.rows, self.short, self.between = rows, short or dtype, SPARE if strided else 0
        self.n, k = linear.out_features // (2 if self.epilogue == "gated" else 1), linear.in_features
        of_weight = linear.weight.dtype if linear.packed is None else torch.bfloat16
        self.linear = replace(linear, bias=random(self.n, dtype=of_weight)) if bias else linear
        self.meta = idle(rows, *(row for row in stopped if row < rows > 1))
        self.x = self.buffer(k, dtype, max(rows, 64))[:rows]  # Tiles read rows of the buffer beyond `rows`.
        self.x.copy_(random(rows, k, dtype=dtype, seed=1))
        self.partials = random(rows, partials, seed=2).abs() * k / 3
        self.hidden, self.norm = random(rows, self.n, seed=3), norm_weight(self.n, of_weight)
        self.scratch = make_buffers(linear.out_features, rows, DEVICE)
        self.scratch.sums.fill_(float("nan"))
        out_dtype = self.short if self.epilogue == "gated" else torch.float32
        self.outputs = self.buffer(self.n, out_dtype), self.buffer(self.n, self.short), self.buffer(self.n)
        self.poison()

    @property
    def runs(self) -> torch.Tensor:
        return self.meta[:, layout.STATUS] == layout.RUN

    def buffer(self, columns, dtype=torch.float32, rows=None):
        storage = torch.full((rows or self.rows, columns + self.between), float("nan"), dtype=dtype, device=DEVICE)
        return storage[:, :columns]

    def poison(self):
        for output in self.outputs:
            output.fill_(float("nan"))
        if self.epilogue == "residual":
            self.outputs[0].copy_(self.hidden)

    def arguments(self, out, normed, sumsq):
        norm = self.partials, self.partials.shape[1], EPS
        epilogue = {
            "plain": Plain(),
            "normed": Normed(*norm),
            "gated": Gated(*norm),
            "residual": AddResidual(self.norm, normed, sumsq),
        }[self.epilogue]
        adapters = () if self.adapters is None else (self.adapters,)
        return self.meta, self.x, self.linear, out, epilogue, self.scratch, *adapters

    def enqueue(self, config, pdl=PDL):
        kernel_of(config).op.launch(*self.arguments(*self.outputs), config=config, pdl=pdl)

    def launch(self, config):
        """Return the outputs of a launch."""
        self.poison()
        self.enqueue(config)
        return [output.clone() for output in self.outputs]

    def partial_sums(self, config) -> int:
        """Return the number of partial sums of squares that a launch writes."""
        return kernel_of(config).partials(self.n, config)

    def check(self, config, tolerance=TOLERANCE, rounded=ROUNDED):
        rounded = tolerance if self.short == torch.float32 else rounded
        launched = self.launch(config)
        (out, normed, sumsq), runs, stopped = launched, self.runs, ~self.runs
        expected = [self.buffer(self.n) for _ in range(3)]
        if self.epilogue == "residual":
            expected[0].copy_(self.hidden)
        adapted_ref(*self.arguments(*expected))
        gated = self.epilogue == "gated"
        assert_close(out[runs].float(), expected[0][runs], rounded if gated else tolerance, "out")
        if self.epilogue == "residual":
            count = self.partial_sums(config)
            assert_close(normed[runs].float(), expected[1][runs], rounded, "normed")
            assert_close(sumsq[runs, :count].sum(1), expected[2][runs, 0], tolerance, "sumsq")
            assert sumsq[runs, count:].isnan().all(), "the kernel wrote after the last partial sum"
            assert torch.equal(out[stopped], self.hidden[stopped]), "the kernel wrote a row that is not active"
        else:
            assert out[stopped].isnan().all(), "the kernel wrote an inactive row"
            assert normed.isnan().all() and sumsq.isnan().all(), "the kernel wrote an output of another epilogue"
        assert normed[stopped].isnan().all() and sumsq[stopped].isnan().all(), "the kernel wrote an inactive row"
        assert not self.scratch.counter.any(), "a counter is not zero after the launch"
        for output in self.outputs if self.between else ():
            assert output.as_strided((self.rows, SPARE), output.stride(), self.n).isnan().all(), (
                "the kernel wrote between the rows of the output"
            )
        assert not CUDA or same(launched, self.launch(config)), "two launches gave different outputs"

    def check_stopped(self, config):
        """Check that a launch without active rows writes nothing, and that the next launch is right."""
        meta = self.meta.clone()
        self.meta[:, layout.STATUS] = layout.STOP
        for _ in range(3):  # If a launch does not reset barriers or counters, the next launch fails.
            out, normed, sumsq = self.launch(config)
            assert torch.equal(out, self.hidden) if self.epilogue == "residual" else out.isnan().all()
            assert normed.isnan().all() and sumsq.isnan().all() and not self.scratch.counter.any()
        self.meta.copy_(meta)
        self.check(config)


def check_captured(products, configs):
    """Check that captured launches, each started while the previous one runs, compute the same bits as alone.

    Products that share columns use the same counter and sums. configs: one for each product.
    """
    largest = max((product.scratch for product in products), key=lambda scratch: scratch.sums.numel())
    for product in products:
        product.scratch = largest
    expected = [product.launch(config) for product, config in zip(products, configs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product.poison()
        for product, config in zip(products, configs):
            product.enqueue(config, pdl=True)
    for _ in range(5):
        graph.replay()
        for product, outputs in zip(products, expected):
            assert same(product.outputs, outputs), product.epilogue


def check_alike(full_product, make_part, configs):
    """Check that a row has the same bits in passes of any number of rows.

    Args:
        full_product: a product of 64 rows.
        make_part: make_part(rows) returns a product of `rows` rows.
        configs: launch configs by rows.
    """
    expected = full_product.launch(configs[64])
    for rows in (1, 8, 16, 17, 32, 33):
        product = make_part(rows)
        product.linear, product.norm = full_product.linear, full_product.norm
        for name in ("x", "partials", "hidden"):
            getattr(product, name).copy_(getattr(full_product, name)[:rows])
        launched = product.launch(configs[min(size for size in configs if size >= rows)])
        assert same(launched, [output[:rows] for output in expected]), f"{rows} rows"
