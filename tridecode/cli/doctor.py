"""Problems that prevent the program from using the GPU of this machine, each with its fix."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

# CUDA version -> oldest driver that runs its programs, by NVIDIA's compatibility tables.
OLDEST_DRIVER = {"12": 525, "13": 580}
NEEDED = (8, 0)  # Minimum compute capability.
LOW_MEMORY = 0.1  # Share of a GPU's memory below which a warning is shown.


def warnings(gpus: list[dict], driver: str | None, cuda: str | None) -> list[dict]:
    """Return a {"problem": ..., "fix": ...} for each problem. The CPU needs neither driver nor compiler.

    Args:
        gpus: result of gpu_facts.
        driver: version of the driver, or None without a driver.
        cuda: version of CUDA that PyTorch was built for, or None for a build without CUDA.
    """
    problems = []

    def add(problem: str, fix: str) -> None:
        problems.append({"problem": problem, "fix": fix})

    if driver and not gpus:
        add(*unusable_driver(driver, cuda))
    for index, gpu in enumerate(gpus):
        name = f"GPU {index} ({gpu['name']})"
        if tuple(map(int, gpu["compute_capability"].split("."))) < NEEDED:
            problem = f"{name} has compute capability {gpu['compute_capability']}, and 8.0 is the least supported"
            add(problem, "choose another with --device cuda:N, or use --device cpu")
        if gpu["free"] < LOW_MEMORY * gpu["memory"]:
            problem = f"{name} has only {100 * gpu['free'] / gpu['memory']:.0f}% of its memory free"
            add(problem, "nvidia-smi shows which programs use it; end what you do not need")
    if gpus:
        if c_compiler() is None:
            fix = "install gcc or clang (build-essential on Debian and Ubuntu), or name one in CC"
            add("there is no C compiler, and Triton builds a launcher at the first run", fix)
        if not python_headers().is_file():
            fix = "install Python's headers (python3-dev on Debian and Ubuntu)"
            add(f"there is no {python_headers()}, which Triton's launcher includes", fix)
        if not writable(triton_cache()):
            fix = "set TRITON_CACHE_DIR to a directory that can be written"
            add(f"Triton's cache {triton_cache()} cannot be written", fix)
    return problems


def unusable_driver(driver: str, cuda: str | None) -> tuple[str, str]:
    """Return the problem and its fix if there is a driver, but no GPU that torch can use."""
    if cuda is None:
        return "this PyTorch was built without CUDA, and there is an NVIDIA driver", "install PyTorch's CUDA build"
    oldest = OLDEST_DRIVER.get(cuda.split(".")[0])
    if oldest and int(driver.split(".")[0]) < oldest:
        problem = f"the driver {driver} is older than this PyTorch's CUDA {cuda} needs ({oldest})"
        return problem, "update the driver, or install a PyTorch (2.11 or newer) built for an older CUDA"
    fix = "check CUDA_VISIBLE_DEVICES and that this user or container may use the GPU (nvidia-smi -L)"
    return f"there is an NVIDIA driver ({driver}), but PyTorch finds no GPU", fix


def driver_version() -> str | None:
    """Return the version that nvidia-smi reports. torch knows only the driver's CUDA version."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    first = done.stdout.split("\n")[0].strip()
    return first if first.split(".")[0].isdigit() else None


def gpu_facts() -> list[dict]:
    """Return the GPUs that torch can use; sizes are in bytes."""
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append({"name": properties.name, "compute_capability": capability, "memory": total, "free": free})
    return gpus


def c_compiler() -> str | None:
    """Return the compiler that Triton would use."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def python_headers() -> Path:
    """Return the path of Python.h, which Triton needs to compile its launchers."""
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


def triton_cache() -> Path:
    """Return the directory of Triton's compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def writable(path: Path) -> bool:
    """Return whether files can be created in a directory, or in the nearest parent that exists."""
    nearest = next((each for each in (path, *path.parents) if each.exists()), path)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
