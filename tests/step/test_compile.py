"""Every kernel of decode and prompt passes compiles for absent GPUs, within their registers and memory."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from triton.runtime.driver import driver

from tridecode import kernels
from tridecode.step import compiling

FOLDER = Path(kernels.__path__[0])
# Kernels that are compiled only for compute capability 9.0.
PROMPTS = {f"_{name}_kernel" for name in ("prompt_attention", "prompt_splits", "prompt_attention_hopper", "expand_kv")}
HOPPER = {"_matmul_hopper_kernel", "_matmul_ring_kernel", "_expert_ring_kernel", *PROMPTS}
# Kernels that only quantized models launch.
NAMES = "dequantize matmul_groups gate_up_groups down_groups expert_packed down_packed prompt_packed"
OF_QUANTIZED = {f"_{name}_kernel" for name in NAMES.split()}
KERNELS = set(re.findall(r"^def (_\w+_kernel)\(", "".join(file.read_text() for file in FOLDER.rglob("*.py")), re.M))
QUANTIZED = "qwen3-0.6b_int4"  # The LM head of this model is e4m3.
HYBRID = "qwen3.5-0.8b"
MIXTURES = "moe", "moe_shared_int4"
# (model, GPU, passes). For some GPUs all passes are compiled, of models that together use every kernel. For each
# other GPU only the most common passes of a small model are compiled. `compile_step.py` compiles other combinations.
CASES = [
    (("qwen3-4b", HYBRID, QUANTIZED, "qwen3-4b_kv8", *MIXTURES), ("h100",), "all"),
    (("head_dim_80", HYBRID, QUANTIZED, *MIXTURES), ("rtx-5090",), "all"),
    (("head_dim_80", HYBRID, "moe"), ("rtx-3090",), "all"),
    ((QUANTIZED,), ("a100", "rtx-4090", "b200"), "common"),
]


class Launcher:
    """A launcher that takes time to load."""

    loading = max_loading = 0

    def __init__(self, src, metadata):
        Launcher.loading += 1
        Launcher.max_loading = max(Launcher.max_loading, Launcher.loading)
        time.sleep(0.01)
        Launcher.loading -= 1


def test_launchers_are_loaded_one_at_a_time(monkeypatch):
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=Launcher))
    for _ in range(2):
        compiling.serialize_launchers()
    with ThreadPoolExecutor(8) as pool:
        assert all(isinstance(each, Launcher) for each in pool.map(driver.active.launcher_cls, range(8), range(8)))
    assert Launcher.max_loading == 1


@pytest.mark.parametrize("models, gpus, passes", CASES, ids=[",".join(gpus) for _, gpus, _ in CASES])
def test_every_kernel_compiles_within_the_limits_of_the_gpu(models, gpus, passes):
    """The script checks that kernels do not spill and use little shared memory."""
    options = ["--common", "--rules"] if passes == "common" else []
    lines = run_script("compile_step.py", ",".join(models), ",".join(gpus), *options).splitlines()
    # Common passes contain these kernels and others.
    expected = {"_matmul_kernel", "_attention_kernel", "_dequantize_kernel", "_draft_kernel"}
    if passes == "all":
        expected = KERNELS - (set() if QUANTIZED in models else OF_QUANTIZED)
    for gpu in gpus:
        lines_by_rows = {kernel for _, kernel, name, *_ in map(str.split, lines) if name == gpu}
        possible = KERNELS - (HOPPER if gpu != "h100" else set())
        assert expected & possible <= lines_by_rows <= possible, gpu


def test_failed_compilations_and_exceeded_limits_are_reported():
    """One kernel has an error, one ends the compiler's process, and one exceeds the shared memory."""
    lines = run_script("compile_faults.py").splitlines()
    assert len(lines) == 4 and lines[0].startswith("0 CompilationError: "), lines
    assert lines[1].startswith("1 PTXASError: ") and "sm_89" in lines[1]
    assert lines[2].startswith("2 the compiler ended with status -6") and "shared memory" in lines[3]


def test_missing_kernels_are_reported_and_neither_compiled_nor_launched():
    assert run_script("compile_missing.py").splitlines() == ["_matmul_kernel", "True"]


def test_kernels_of_engines_are_listed_without_a_gpu():
    """The keys of the kernels can be computed for another installation of Triton."""
    folder = str(Path(triton.__file__).parents[1])
    rows = ["qwen3-0.6b,322,1", "qwen3-0.6b,322,1", "qwen3-0.6b,320,8,2560,int4"]
    lines_by_rows = run_script("../../benchmarks/precompile.py", *rows, "--count", "--triton", folder)
    kernels, engines = re.fullmatch(r"(\d+) kernels of (\d) engines\n", lines_by_rows).groups()
    assert engines == "2" and int(kernels) > 30


def test_child_processes_compile_and_the_parent_compiles_nothing(tmp_path):
    lacked, here, progress, again = run_script("compile_children.py", cache=tmp_path / "a").splitlines()
    assert (lacked, here, again) == ("6 of 6", "0 here", "0 again")
    assert progress == " ".join(str((done, 6)) for done in range(7))


def test_parent_compiles_if_the_child_processes_fail(tmp_path):
    lacked, here, _, again = run_script("compile_children.py", "broken", cache=tmp_path / "a").splitlines()
    assert (lacked, here, again) == ("6 of 6", "6 here", "0 again")


def test_engines_compile_all_kernels_of_their_passes_at_load():
    """Check all decode passes, and prompts of many lengths."""
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
    "model, gpu, products",
    [
        ("qwen3-0.6b", "h100", "wgmma"),
        (QUANTIZED, "h100", "_matmul_hopper_kernel"),
        (QUANTIZED, "rtx-4090", "_matmul_kernel"),
    ],
)
def test_passes_of_any_number_of_rows_add_in_one_order(model, gpu, products):
    """Test the part of the order that the compiler decides, in batch-invariant mode."""
    lines_by_rows = {}
    for line in run_script("sum_orders.py", model, "1,64", gpu).splitlines():
        rows, rest = line.split(maxsplit=1)
        lines_by_rows.setdefault(rows, []).append(rest)
    assert list(lines_by_rows) == ["1", "64"] and len(lines_by_rows["1"]) > 5
    assert products in "".join(lines_by_rows["1"]), "an expected kernel was not compiled"
    assert lines_by_rows["1"] == lines_by_rows["64"]
