"""Search launch shapes of products of few rows, for one model; needs a GPU.

    python benchmarks/few_bits.py search qwen3-4b int4 fp8 --rows 1 --rows 8 --rows 16 --compiling 60 --seconds 100
    python benchmarks/few_bits.py search qwen3-4b dense --rows 8 --role gate_up --role down

Each matrix alone: launches chained with dependent launch in one graph, over copies that no cache holds. Processes
compile, each its share; what is compiled is timed at once, while the others compile. The candidates of all matrices
take turns, those first that change most. Prints each time as it comes, at the end for each matrix the best shapes, as
lines for TUNED in tuning/few_bits.py, with microseconds and % of the read bandwidth of the run, and what is in use.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

import torch
from tridecode.cli.candidates import packed_products
from tridecode.tuning.choose import few_rows_shape
from tridecode.tuning.few_bits import ROLES, ROWS, few_bits_shape
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tridecode import layout
from tridecode.checkpoint.formats.quantize import SCHEMES, fitted
from tridecode.checkpoint.formats.scheme import packed_form
from tridecode.cli.bench.read import measure_read_bandwidth
from tridecode.kernels.linear import matmul
from tridecode.kernels.linear.matmul import MATMUL_GATE_UP, MATMUL_NORMED, MATMUL_RESIDUAL, MatmulConfig
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.models.presets import PRESETS
from tridecode.step.compiling import missing

COLD = 240e6  # bytes of weights between two uses of the same ones
BEST = 3  # shapes that are printed for each matrix


@dataclass(frozen=True)
class Case:
    kind: str  # of the weight
    role: str
    N: int
    K: int
    rows: int

    def __str__(self) -> str:
        return f"{self.kind} {self.role} {self.N} x {self.K}, {self.rows} rows"


def random_linear(N: int, K: int, kind: str, device: str) -> LoadedLinear:
    if kind == "dense":
        return LoadedLinear(torch.randn(N, K, dtype=torch.bfloat16, device=device), None)
    scheme = fitted(SCHEMES[kind], K)
    form = packed_form(scheme, K, [0], torch.float32 if scheme.floating else torch.bfloat16)
    tensors = {part: torch.empty(shape, dtype=dtype, device=device) for part, (shape, dtype) in form.shapes(N).items()}
    tensors["weight"].random_(-(2**31), 2**31 - 1).bitwise_and_(-0x40404041)  # no NaN of e4m3
    tensors["scale"].fill_(1e-3)
    return LoadedLinear(**tensors, packed=form)


def microseconds(run, linears: list[LoadedLinear], repeats: int = 7) -> float:
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
        torch.cuda._sleep(1_500_000)  # until all that follows has been asked for, on a CPU that others use too
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[repeats // 2]


def product(case: Case, device: str):
    """(run, linear, shape -> the line of a list that multiplies; x; what it writes)."""
    role, N, K, rows = case.role, case.N, case.K, case.rows
    meta = torch.zeros(rows, layout.META_WIDTH, dtype=torch.int32, device=device)
    meta[:, layout.STATUS] = layout.RUN
    x = torch.randn(ROWS[-1], K, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)[:rows]
    sums = torch.ones(rows, N, device=device)
    norm = torch.ones(N, dtype=torch.bfloat16, device=device)
    out = torch.zeros(rows, N, device=device)  # of o_proj and down: what is added to
    short = torch.empty(rows, N, dtype=torch.bfloat16, device=device)

    def line(run, linear, shape):
        if role == "gate_up":
            run(role, MATMUL_GATE_UP, meta, x, linear, short[:, : N // 2], sums, 4, 1e-6, config=shape)
        elif role in ("o_proj", "down"):
            run(role, MATMUL_RESIDUAL, meta, x, linear, out, norm, short, sums, config=shape)
        else:
            run(role, MATMUL_NORMED, meta, x, linear, out, sums, 4, 1e-6, config=shape)

    return line, x, short[:, : N // 2] if role == "gate_up" else out


def check(case: Case, y: torch.Tensor, out: torch.Tensor) -> None:
    """That `out` is what `product` makes of y, x @ weight.T in fp32."""
    if case.role not in ("o_proj", "down"):
        y = y * (4 / case.K + 1e-6) ** -0.5
    if case.role == "gate_up":
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    error = ((out.float() - y).abs().max() / y.abs().max()).item()
    if not error < (1e-2 if case.role == "gate_up" else 1e-3):
        raise RuntimeError(f"the product is wrong by {error:.2g} of its largest number")


def in_use(linear: LoadedLinear, rows: int, gated: bool) -> MatmulConfig:
    if linear.packed is not None:
        return few_bits_shape(linear, rows)
    shape = few_rows_shape(linear.out_features, linear.in_features, max(rows, 8), gated)
    return shape if isinstance(shape, MatmulConfig) else MatmulConfig(16, 4, 8, 4)


class NoGPU:
    """A driver for processes that only compile: they need no context on the GPU."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def begin_compiling(target: tuple) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    driver.set_active(NoGPU(GPUTarget(*target)))


def compile_one(work: tuple) -> tuple:
    """(what it is, None or why it was not compiled). Triton's cache has the rest."""
    entry, specialization = work
    try:
        matmul._matmul_kernel.preload(specialization)
    except Exception as error:  # one shape's, whatever it is: the others go on
        return entry, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return entry, None


def specialized(line, linear: LoadedLinear, shape: MatmulConfig, run) -> str | None:
    """What Triton would compile for a launch; None if it is there."""
    return next((specialization for _, specialization in missing(lambda: line(run, linear, shape))), None)


def compiled(work: list, seconds: float, workers: int) -> Iterator[tuple]:
    """(entry, None or why not) of each (entry, specialization), as they come, for so long."""
    end, target = time.monotonic() + seconds, driver.active.get_current_target()
    begin = (target.backend, target.arch, target.warp_size)
    pool = multiprocessing.get_context("spawn").Pool(workers, begin_compiling, (begin,))
    try:
        results = pool.imap_unordered(compile_one, work)
        for _ in work:
            yield results.next(max(end - time.monotonic(), 0.01))
    except multiprocessing.TimeoutError:
        return
    finally:
        pool.terminate()


_copies: dict = {}  # in the process that times: (kind, N, K) -> weights
_exact: dict = {}  # case -> its product


def time_one(case: Case, shape: MatmulConfig) -> float:
    """Microseconds, in the process that times."""
    key = (case.kind, case.N, case.K)
    if key not in _copies:
        one = random_linear(case.N, case.K, case.kind, "cuda")
        more = min(int(COLD / one.nbytes), 200)
        _copies[key] = [one, *(random_linear(case.N, case.K, case.kind, "cuda") for _ in range(more))]
    line, x, out = product(case, "cuda")
    if case not in _exact:
        _exact[case] = x.float() @ _copies[key][0].matrix().float().T
    line(launch, _copies[key][0], shape)
    check(case, _exact[case], out)
    return microseconds(partial(line, launch, config=shape), _copies[key])


def launch(role, op, *args, **how) -> None:
    op.launch(*args, **how, pdl=torch.cuda.get_device_capability() >= (9, 0))


class Timer:
    """A process that times: another one if a shape has ended it, or left its GPU unusable."""

    def __init__(self):
        self.pool = None

    def __call__(self, case: Case, shape: MatmulConfig) -> float:
        if self.pool is None:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            return self.pool.submit(time_one, case, shape).result(45)
        except Exception as error:
            if isinstance(error, (BrokenProcessPool, TimeoutError)) or "CUDA" in str(error):
                self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            for process in list((self.pool._processes or {}).values()):
                process.kill()
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None


def search_cases(cases: list[Case], args, run, timed: Callable, bandwidth: float) -> dict:
    """Case -> [(microseconds, shape)], those in use first; prints as it goes."""
    start, found, failed, work, used = time.monotonic(), {}, 0, [], {}
    sizes = {}
    for case in cases:
        linear = random_linear(case.N, case.K, case.kind, "meta")
        used[case], (line, _, _) = in_use(linear, case.rows, case.role == "gate_up"), product(case, "meta")
        found[case], sizes[case] = [], linear.nbytes
        for place, shape in enumerate(packed_products(linear, case.rows, used[case])):
            try:
                work.append((place, (case, shape), specialized(line, linear, shape, run)))
            except Exception as error:
                print(f"# {case}, {astuple(shape)}: {type(error).__name__}: {error}", flush=True)
    work.sort(key=lambda entry: entry[0])  # the first of each matrix, then the second, ...
    work = [(entry, specialization) for _, entry, specialization in work if specialization is not None]
    print(f"# {len(work)} shapes of {len(cases)} products to compile, {time.monotonic() - start:.1f} s", flush=True)
    harmful = 0  # errors of shapes that fetch into the L2 cache
    for (case, shape), why in compiled(work, args.compiling, args.workers):
        if time.monotonic() - start > args.seconds:
            break
        if shape.fetch and harmful >= 2 and not any(shape.fetch for of in found.values() for _, shape in of):
            continue
        try:
            if why is not None:
                raise RuntimeError(why)
            us = timed(case, shape)
        except Exception as error:
            failed, harmful = failed + 1, harmful + (why is None and shape.fetch > 0)
            print(f"# {case}, {astuple(shape)}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        found[case].append((us, shape))
        share, mark = 100 * sizes[case] / us / 1e-6 / bandwidth, ", in use" if shape == used[case] else ""
        at = time.monotonic() - start
        print(f"{at:6.1f} s {case}: {us:.2f} us, {share:.0f}%, {astuple(shape)}{mark}", flush=True)
        save(args.out, found, sizes, bandwidth)
    print(f"# {sum(map(len, found.values()))} timed, {failed} failed, of {len(work)}", flush=True)
    for case, entries in found.items():
        before = next((f"{us:.2f} us" for us, shape in entries if shape == used[case]), "not timed")
        print(f"# {case}: {len(entries)} timed, in use {before} {astuple(used[case])}")
        name = "" if case.kind == "dense" else f"{named(case)!r}, "
        for us, shape in sorted(entries, key=lambda entry: entry[0])[:BEST]:
            share, values = 100 * sizes[case] / us / 1e-6 / bandwidth, ", ".join(map(str, astuple(shape)))
            print(f"        ({name}{case.N}, {case.K}): MatmulConfig({values}),  # {us:.2f} us, {share:.0f}%")
    sys.stdout.flush()
    return found


def named(case: Case) -> str:
    """The format's name in TUNED."""
    return random_linear(case.N, case.K, case.kind, "meta").format


def save(path: Path | None, found: dict, sizes: dict, bandwidth: float) -> None:
    if path is None:
        return
    lines = [
        {"kind": case.kind, "role": case.role, "N": case.N, "K": case.K, "rows": case.rows, "us": us,
         "share": sizes[case] / us / 1e-6 / bandwidth, "shape": list(astuple(shape))}
        for case, entries in found.items() for us, shape in sorted(entries, key=lambda entry: entry[0])
    ]  # fmt: skip
    path.write_text(json.dumps(lines, indent=0))


def cases_of(args) -> list[Case]:
    c = PRESETS[args.preset]
    sizes = {
        "gate_up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
        "qkv": (c.q_size + 2 * c.kv_size, c.hidden_size), "o_proj": (c.hidden_size, c.q_size),
        "lm_head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip
    roles = args.role or [role for role in sizes if role != "lm_head"]
    found = [
        Case(args.head if role == "lm_head" and kind != "dense" else kind, role, *sizes[role], rows)
        for rows, kind, role in itertools.product(args.rows or [1], args.kinds, roles)
    ]
    return list(dict.fromkeys(found))


def search(args) -> None:
    bandwidth, timer = measure_read_bandwidth(torch.device("cuda")), Timer()
    print(f"{torch.cuda.get_device_name()}: {bandwidth / 1e9:,.0f} GB/s", flush=True)
    try:
        search_cases(cases_of(args), args, launch, timer, bandwidth)
    finally:
        timer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("search", help="launch shapes")
    command.add_argument("preset", choices=list(PRESETS))
    command.add_argument("kinds", nargs="+", choices=[*SCHEMES, "dense"], help="of the weights; dense: bf16")
    command.add_argument("--head", default="fp8", choices=list(SCHEMES), help="the LM head, if not dense (fp8)")
    command.add_argument("--rows", type=int, action="append", choices=(2, 4, *ROWS), help="of a pass (1); repeatable")
    command.add_argument("--role", action="append", choices=ROLES, help="only this one; repeatable (all but lm_head)")
    command.add_argument("--compiling", type=float, default=70.0, help="seconds of it, for all together (70)")
    command.add_argument("--seconds", type=float, default=100.0, help="for all together, timing too (100)")
    command.add_argument("--workers", type=int, default=max((os.cpu_count() or 1) - 2, 1), help="that compile")
    out = os.environ.get("OUT")
    command.add_argument("--out", type=Path, default=out and Path(out, "few_bits.json"), help="JSON of all times")
    command.set_defaults(run=search)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
