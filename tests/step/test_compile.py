"""Every kernel of the step and of the prompt pass compiles for GPUs that are not here, within registers and memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from models import CUDA

from tridecode import kernels
from tridecode.models.presets import PRESETS

FOLDER = Path(kernels.__path__[0])
SHARED = 48 * 1024  # bytes; above, Triton asks for the largest carve-out, and the step's other kernels lose their L1
MOST = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB; what a program can have at most, for tiles
# For 9.0 only.
PROMPTS = {f"_{name}_kernel" for name in ("prompt_attention", "prompt_splits", "prompt_attention_hopper", "expand_kv")}
HOPPER = {"_matmul_hopper_kernel", "_matmul_ring_kernel", *PROMPTS}
LARGE = {"_matmul_tiles_kernel", "_attention_rows_kernel"} | HOPPER  # beside others like them
# Bytes of a thread's stack, not in what runs once a tile: where Triton 3.9 puts part of an item's first tile, and the
# numbers of an item that are wanted again at its end; in a program with 64 or 80 registers up to four. But of groups
# of 3 and 7 heads Triton 3.6 has up to eight numbers of 16 bits there, in turns of splits that are dealt out.
STACK = {
    "_attention_kernel": 16, "_attention_rows_kernel": 104, "_matmul_ring_kernel": 16,
    "_prompt_attention_kernel": 24,
}  # fmt: skip
MOST = {arch: 1024 * size for arch, size in MOST.items()}
ODD = ("head_dim_80", "head_dim_96", "head_dim_256", "group_16", "qwen3-4b_fp16")
KERNELS = set(re.findall(r"^def (_\w+_kernel)\(", "".join(file.read_text() for file in FOLDER.rglob("*.py")), re.M))
QUANTIZED = "qwen3-0.6b_int4"  # its LM head is e4m3
# The interpreter's machine compiles what takes it minutes, of each kernel something; a GPU machine, all.
FEW = [(("qwen3-4b", QUANTIZED, "qwen3-4b_kv8"), (90,)), (("head_dim_80", QUANTIZED), (80, 120))]
MORE = (QUANTIZED, "qwen3-4b_int4", "qwen3-4b_fp8", "qwen3-4b_kv8")
ALL = [((*PRESETS, *ODD, *MORE), (arch,)) for arch in (80, 86, 89, 90, 100, 120)]
CASES = ALL if CUDA else FEW


@pytest.mark.parametrize("models, archs", CASES, ids=[",".join(f"sm_{arch}" for arch in archs) for _, archs in CASES])
def test_every_kernel_compiles_without_spills_or_much_shared_memory(models, archs):
    lines = run_script("compile_step.py", ",".join(models), ",".join(map(str, archs))).splitlines()
    rows = [line.split() for line in lines]
    for arch in archs:
        expected = KERNELS - (HOPPER if arch != 90 else set())
        assert {row[1] for row in rows if int(row[2]) == arch} == expected, arch
    spilled = [row for row in rows if int(row[4]) > STACK.get(row[1], 0) or row[5] != "0"]
    assert not spilled, f"kernels with stack or local memory: {spilled}"
    heavy = [row for row in rows if int(row[6]) > (MOST[int(row[2])] if row[1] in LARGE else SHARED)]
    assert not heavy, f"kernels with more than {SHARED} bytes of shared memory: {heavy}"


def test_what_a_launch_lacks_is_told_and_neither_compiled_nor_launched():
    """By the same function for engines that start and for the search of launch shapes."""
    assert run_script("compile_missing.py").splitlines() == ["_matmul_kernel", "True"]


def test_what_engines_launch_on_a_gpu_is_found_without_one():
    """With keys as Triton makes them, whosever files they are of."""
    folder = str(Path(triton.__file__).parents[1])
    rows = ["qwen3-0.6b,322,1", "qwen3-0.6b,322,1", "qwen3-0.6b,320,8,2560,int4"]
    found = run_script("../../benchmarks/precompile.py", *rows, "--count", "--triton", folder)
    kernels, engines = re.fullmatch(r"(\d+) kernels of (\d) engines\n", found).groups()
    assert engines == "2" and int(kernels) > 30


def test_child_processes_compile_and_the_parent_compiles_nothing(tmp_path):
    lacked, here, progress, again = run_script("compile_children.py", cache=tmp_path / "a").splitlines()
    assert (lacked, here, again) == ("6 of 6", "0 here", "0 again")
    assert progress == " ".join(str((done, 6)) for done in range(7))


@pytest.mark.skipif(CUDA, reason="takes as long again")
def test_the_parent_compiles_if_no_child_process_works(tmp_path):
    lacked, here, _, again = run_script("compile_children.py", "broken", cache=tmp_path / "a").splitlines()
    assert (lacked, here, again) == ("6 of 6", "6 here", "0 again")


def test_engines_compile_all_kernels_of_their_passes_at_load():
    """Of many lengths of prompts, and of all decode passes."""
    for line in run_script("reach_kernels.py").splitlines():
        _, _, compiled, *lacking = line.split()
        assert int(compiled) > 30 and not lacking, line


def run_script(script: str, *arguments: str, cache: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), environment.get("PYTHONPATH", "")])
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / script, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "model, arch, products",
    [("qwen3-0.6b", 90, "wgmma"), (QUANTIZED, 90, "_matmul_hopper_kernel"), (QUANTIZED, 89, "_matmul_kernel")],
)
def test_passes_of_any_number_of_rows_add_in_one_order(model, arch, products):
    """In the batch-invariant mode, as far as the compiler decides it."""
    found = {}
    for line in run_script("sum_orders.py", model, "1,64", str(arch)).splitlines():
        rows, rest = line.split(maxsplit=1)
        found.setdefault(rows, []).append(rest)
    assert list(found) == ["1", "64"] and len(found["1"]) > 5
    assert products in "".join(found["1"]), "the products that were meant"
    assert found["1"] == found["64"]
