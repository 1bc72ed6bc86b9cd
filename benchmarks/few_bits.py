"""Search launch shapes of products whose weights have fewer bits, for one model and pass; needs a GPU.

    python benchmarks/few_bits.py qwen3-4b int4 --rows 1

Each matrix alone: launches chained with dependent launch in one graph, over copies that no cache holds. Prints for each
the best shapes with microseconds and % of the read bandwidth of the run, as lines for TUNED in step/few_bits.py.
"""

import argparse
import itertools

import torch

from tridecode import layout
from tridecode.commands.bench.read import measure_read_bandwidth
from tridecode.kernels.matmul import MATMUL_GATE_UP, MATMUL_NORMED, MATMUL_RESIDUAL
from tridecode.model.formats.packed import packed_form
from tridecode.model.formats.quantise import SCHEMES, fitted
from tridecode.model.presets import PRESETS
from tridecode.model.weights import Linear
from tridecode.step.shapes import MatmulShape

COLD = 240e6  # bytes of weights between two uses of the same ones
GRID = {"block_n": (16, 32, 64), "num_warps": (1, 2, 4, 8), "ahead": (2, 4, 6, 8, 12, 16), "x_ahead": (4, 8)}


def random_linear(N: int, K: int, kind: str) -> Linear:
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


def runner(role: str, N: int, K: int, rows: int, shape: MatmulShape, pdl: bool):
    meta = torch.zeros(rows, layout.META_WIDTH, dtype=torch.int32, device="cuda")
    meta[:, layout.STATUS] = layout.RUN
    x = torch.ones(rows, K, dtype=torch.bfloat16, device="cuda")
    sums = torch.ones(rows, N, device="cuda")
    norm = torch.ones(N, dtype=torch.bfloat16, device="cuda")
    if role == "gate_up":
        out = torch.empty(rows, N // 2, dtype=torch.bfloat16, device="cuda")
        return lambda linear: MATMUL_GATE_UP.launch(meta, x, linear, out, sums, 4, 1e-6, shape=shape, pdl=pdl)
    out = torch.zeros(rows, N, device="cuda")
    if role in ("o_proj", "down"):
        normed = torch.empty(rows, N, dtype=torch.bfloat16, device="cuda")
        return lambda linear: MATMUL_RESIDUAL.launch(meta, x, linear, out, norm, normed, sums, shape=shape, pdl=pdl)
    return lambda linear: MATMUL_NORMED.launch(meta, x, linear, out, sums, 4, 1e-6, shape=shape, pdl=pdl)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("kind", choices=list(SCHEMES))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--role", help="only this one")
    args = parser.parse_args()
    c, pdl = PRESETS[args.preset], torch.cuda.get_device_capability() >= (9, 0)
    bandwidth = measure_read_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e9:,.0f} GB/s")
    sizes = {
        "qkv": (c.q_size + 2 * c.kv_size, c.hidden_size), "o_proj": (c.hidden_size, c.q_size),
        "gate_up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
        "lm_head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip
    for role, (N, K) in sizes.items():
        if args.role not in (None, role):
            continue
        one = random_linear(N, K, args.kind)
        linears = [one, *(random_linear(N, K, args.kind) for _ in range(min(int(COLD / one.nbytes), 200)))]
        found = []
        for values in itertools.product(*GRID.values()):
            shape = MatmulShape(**dict(zip(GRID, values)))
            tiles = -(-K // (one.packed.tile * shape.num_warps))
            registers = shape.block_n * 64 // 128 * min(shape.ahead, tiles)  # of weights in flight
            if registers > 112 or (shape.ahead > tiles and shape.ahead != min(a for a in GRID["ahead"] if a >= tiles)):
                continue
            try:
                found.append((microseconds(runner(role, N, K, args.rows, shape, pdl), linears), shape))
            except Exception as error:
                print(f"{role} {shape}: {type(error).__name__}")
        found.sort(key=lambda entry: entry[0])
        for us, shape in found[:3]:
            share = 100 * one.nbytes / us / 1e-6 / bandwidth
            name = one.packed.name
            print(f"{role} {us:.2f} us {share:.0f}%  ({name!r}, {N}, {K}): {shape},", flush=True)


if __name__ == "__main__":
    main()
