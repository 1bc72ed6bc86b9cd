"""Search launch shapes of products of few rows, for one model and pass; needs a GPU.

    python benchmarks/few_bits.py search qwen3-4b int4 --rows 1 --seconds 100
    python benchmarks/few_bits.py search qwen3-4b dense --rows 8 --role gate_up --role down

Each matrix alone: launches chained with dependent launch in one graph, over copies that no cache holds. What is like
the shape in use comes first, and the time is shared among the matrices. Prints for each the best shapes, best first,
as lines for TUNED in step/few_bits.py, with microseconds and % of the read bandwidth of the run, and what is in use.
"""

import argparse
import itertools
import math
import time
from functools import partial

import torch

from tridecode import layout
from tridecode.commands.bench.read import measure_read_bandwidth
from tridecode.kernels.matmul import MATMUL_GATE_UP, MATMUL_NORMED, MATMUL_RESIDUAL
from tridecode.model.formats.packed import packed_form
from tridecode.model.formats.quantise import SCHEMES, fitted
from tridecode.model.presets import PRESETS
from tridecode.model.weights import Linear
from tridecode.step.choose import few_rows_shape
from tridecode.step.compiling import compile_ahead
from tridecode.step.few_bits import ROLES, ROWS, few_bits_shape
from tridecode.step.shapes import MatmulShape

COLD = 240e6  # bytes of weights between two uses of the same ones
GRID = {
    "block_n": (16, 32), "num_warps": (2, 4, 8, 16), "ahead": (1, 2, 3, 4, 5, 6, 8, 10, 12), "x_ahead": (2, 4, 8, 20),
    "registers": (0, 128, 168), "block_m": (8,), "programs": (0, 132, 264, 396, 528),
}  # fmt: skip
BATCH = 16  # shapes that are compiled at a time
BEST = 3  # shapes that are printed for each matrix


def random_linear(N: int, K: int, kind: str) -> Linear:
    if kind == "dense":
        return Linear(torch.randn(N, K, dtype=torch.bfloat16, device="cuda"), None)
    scheme = fitted(SCHEMES[kind], K)
    form = packed_form(scheme, K, [0], torch.float32 if scheme.floating else torch.bfloat16)
    tensors = {part: torch.empty(shape, dtype=dtype, device="cuda") for part, (shape, dtype) in form.shapes(N).items()}
    tensors["weight"].random_(-(2**31), 2**31 - 1).bitwise_and_(-0x40404041)  # no NaN of e4m3
    tensors["scale"].fill_(1e-3)
    return Linear(**tensors, packed=form)


def microseconds(run, linears: list[Linear], repeats: int = 7) -> float:
    """Of one launch, the median."""
    launches = max(24, len(linears))
    run(linears[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run(linears[i % len(linears)])
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[repeats // 2]


def product(role: str, N: int, K: int, rows: int):
    """run, linear, shape -> the line of a list that multiplies."""
    meta = torch.zeros(rows, layout.META_WIDTH, dtype=torch.int32, device="cuda")
    meta[:, layout.STATUS] = layout.RUN
    x = torch.ones(rows, K, dtype=torch.bfloat16, device="cuda")
    sums = torch.ones(rows, N, device="cuda")
    norm = torch.ones(N, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(rows, N, device="cuda")
    short = torch.empty(rows, N, dtype=torch.bfloat16, device="cuda")

    def line(run, linear, shape):
        if role == "gate_up":
            run(role, MATMUL_GATE_UP, meta, x, linear, short[:, : N // 2], sums, 4, 1e-6, shape=shape)
        elif role in ("o_proj", "down"):
            run(role, MATMUL_RESIDUAL, meta, x, linear, out, norm, short, sums, shape=shape)
        else:
            run(role, MATMUL_NORMED, meta, x, linear, out, sums, 4, 1e-6, shape=shape)

    return line


def in_use(linear: Linear, rows: int, gated: bool) -> MatmulShape:
    if linear.packed is not None:
        return few_bits_shape(linear, rows)
    shape = few_rows_shape(linear.out_features, linear.in_features, max(rows, 8), gated)
    return shape if isinstance(shape, MatmulShape) else MatmulShape(16, 4, 8, 4)


def candidates(linear: Linear, rows: int, used: MatmulShape) -> list[MatmulShape]:
    """Those that registers may hold, the shape in use first, then the nearest to it."""
    N, K, packed = linear.out_features, linear.in_features, linear.packed
    parts = 1 if packed is None else packed.tile // 32

    def distance(shape):
        """Other numbers of warps and of programs come early: nothing changes more."""
        far = {name: abs(math.log2((getattr(shape, name) or 96) / (getattr(used, name) or 96))) for name in GRID}
        return sum(far.values()) - 0.6 * far["num_warps"] - 0.6 * far["programs"]

    found = {used}
    for values in itertools.product(*GRID.values()):
        shape = MatmulShape(**dict(zip(GRID, values)))
        threads, tiles = 32 * shape.num_warps, -(-K // (32 * parts * shape.num_warps))
        # Registers of a thread: tiles of the weights and of the activations, two sums, and all else.
        needed = shape.block_n // 2 * min(shape.ahead, tiles) + max(rows, 8) // 2 * min(shape.x_ahead, tiles * parts)
        needed += shape.block_n * max(rows, 8) // 32 * 2 + 40
        most = shape.registers or min(65536 // threads, 255)
        blocks = -(-N // shape.block_n)
        fits = needed <= most and (not shape.registers or threads * shape.registers <= 65536)
        if fits and shape.ahead <= tiles and (not shape.programs or 2 * shape.programs <= blocks):
            found.add(shape)
    return sorted(found, key=distance)


def best(line, linears: list[Linear], shapes: list[MatmulShape], seconds: float, run) -> list:
    """(microseconds, shape) of those that are reached in that time, in the order of `shapes`."""
    end, found = time.monotonic() + seconds, []
    for first in range(0, len(shapes), BATCH):
        batch = shapes[first : first + BATCH]
        compile_ahead([partial(line, linear=linears[0], shape=shape) for shape in batch], run, torch.device("cuda", 0))
        for shape in batch:
            if found and time.monotonic() > end:
                return found
            found.append((microseconds(partial(line, run, shape=shape), linears), shape))
        if time.monotonic() > end:
            break
    return found


def search(args) -> None:
    c, pdl = PRESETS[args.preset], torch.cuda.get_device_capability() >= (9, 0)
    bandwidth = measure_read_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e9:,.0f} GB/s")
    sizes = {
        "gate_up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
        "qkv": (c.q_size + 2 * c.kv_size, c.hidden_size), "o_proj": (c.hidden_size, c.q_size),
        "lm_head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip
    sizes = {role: size for role, size in sizes.items() if not args.role or role in args.role}
    end, cases = time.monotonic() + args.seconds, list(itertools.product(sizes.items(), args.rows or [1]))

    def run(role, op, *args, **how):
        op.launch(*args, **how, pdl=pdl)

    for left, ((role, (N, K)), rows) in zip(range(len(cases), 0, -1), cases):
        kind = args.head if role == "lm_head" and args.kind != "dense" else args.kind
        one = random_linear(N, K, kind)
        linears = [one, *(random_linear(N, K, kind) for _ in range(min(int(COLD / one.nbytes), 200)))]
        seconds, shapes = (end - time.monotonic()) / left, candidates(one, rows, in_use(one, rows, role == "gate_up"))
        found = best(product(role, N, K, rows), linears, shapes, seconds, run)
        name = "" if one.packed is None else f"{one.packed.name!r}, "
        print(f"# {role}, {rows} rows: {len(found)} tried of {len(shapes)}, in use {found[0][0]:.2f} us {found[0][1]}")
        for us, shape in sorted(found, key=lambda entry: entry[0])[:BEST]:
            share = 100 * one.nbytes / us / 1e-6 / bandwidth
            values = ", ".join(str(getattr(shape, field)) for field in GRID)
            print(f"        ({name}{N}, {K}): MatmulShape({values}),  # {us:.2f} us, {share:.0f}%", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("search", help="launch shapes")
    command.add_argument("preset", choices=list(PRESETS))
    command.add_argument("kind", choices=[*SCHEMES, "dense"], help="dense: bf16")
    command.add_argument("--head", default="fp8", choices=list(SCHEMES), help="the LM head, if not dense (fp8)")
    command.add_argument("--rows", type=int, action="append", choices=(2, 4, *ROWS), help="of a pass (1); repeatable")
    command.add_argument("--role", action="append", choices=ROLES, help="only this one; repeatable")
    command.add_argument("--seconds", type=float, default=100.0, help="for all matrices together (100)")
    command.set_defaults(run=search)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
