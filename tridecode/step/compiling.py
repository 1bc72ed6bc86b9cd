"""Compilation of kernels before they are launched: in parallel, in child processes, into Triton's cache."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.runtime.cache import FileCacheManager
from triton.runtime.driver import driver

from ..errors import counted
from .run import Lines, Recorder, Run

Kernel = tuple[JITFunction, str]  # A function, and the argument of its `preload`.
Progress = Callable[[int, int], None]  # Called with the number of compiled kernels and the number of all kernels.

MAX_WORKERS = 16  # Maximum number of processes or threads.
# Maximum number of kernels that are compiled in this process. The start of a child process takes some seconds.
MAX_IN_PROCESS = 4
log = logging.getLogger("tridecode")
_hooking = threading.Lock()  # Hooks are global to the process, so their user restores the previous hooks.
_loading = threading.Lock()
_looking = threading.local()


def workers() -> int:
    """Return the number of kernels that are compiled in parallel."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def compile_lists(lists: Iterable[Lines], run: Run, device: torch.device) -> int:
    """Compile the kernels that the lines of `lists` need. Return the number of kernels that were not loaded.

    `run` launches the lines whose kernels are loaded already. Therefore no row may have the status RUN: such launches
    write nothing.

    Raises:
        Exception: any error of Triton's compiler.
    """
    absent = kernels_of(lists, run, device)
    compile_kernels(absent, device)
    return len(absent)


def kernels_of(lists: Iterable[Lines], run: Run, device: torch.device) -> list[Kernel]:
    """Return the kernels that the lines of `lists` need and that are not loaded. For `run`, see compile_lists."""
    recorder = Recorder()
    for lines in lists:
        lines(recorder)
    distinct = {launch.key(): launch for launch in recorder.launches if launch.op.kernels}

    def launches() -> None:
        for launch in distinct.values():
            run(launch.role, launch.op, *launch.args, **launch.options)

    with _on(device):
        return missing(launches)


def missing(launches: Callable[[], None]) -> list[Kernel]:
    """Return the kernels that these launches lack.

    Launches that lack their kernel are skipped; all others run.
    """
    noted, me = {}, threading.get_ident()

    def note(*, key, fn, compile, **_) -> bool:
        if threading.get_ident() == me:  # Launches by other threads belong to other engines and are not affected.
            noted[fn.jit_function, key] = compile["specialization_data"]
        return threading.get_ident() == me  # If True, Triton neither compiles nor launches the kernel.

    with _hooking, knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launches()
    return [(function, specialization) for (function, _), specialization in noted.items()]


def compile_kernels(kernels: Sequence[Kernel], device: torch.device, progress: Progress | None = None) -> int:
    """Compile kernels, and load their code onto the device. Return the number of kernels that were compiled.

    Child processes compile what the cache lacks. The kernels that they cannot compile are compiled here, in threads.
    progress: called with (compiled kernels, all kernels) if the cache lacks some.
    """
    if device.type == "cuda":
        serialize_launchers()
    absent = load_stored(kernels, device)
    if absent:
        log.info("compiling %s", counted(len(absent), "kernel"))
    if len(absent) > MAX_IN_PROCESS:
        with _on(device):
            target = driver.active.get_current_target()
        _compile_in_children(absent, target, progress or (lambda done, total: None))
        left = load_stored(absent, device)
    else:
        left = absent
    _in_threads(lambda kernel: _load(kernel, device), left, device)
    return len(absent)


class _Absent(Exception):
    """Triton's cache does not contain a kernel."""


def load_stored(kernels: Sequence[Kernel], device: torch.device) -> list[Kernel]:
    """Load all kernels that Triton's cache contains onto the device, and return the remaining kernels."""
    absent: list[Kernel] = []

    class StoredOnly(knobs.cache.manager_class or FileCacheManager):  # type: ignore[misc]
        """A cache that raises _Absent for a missing kernel or launcher, in the threads that load stored kernels."""

        def get_group(self, filename: str) -> dict[str, str] | None:
            group = super().get_group(filename)
            if not group and getattr(_looking, "active", False):
                raise _Absent
            return group

        def get_file(self, filename: str) -> str | None:  # Triton 3.6 uses this method to look up launchers.
            path = super().get_file(filename)
            if path is None and getattr(_looking, "active", False):
                raise _Absent
            return path

    def load(kernel: Kernel) -> None:
        _looking.active = True
        try:
            _load(kernel, device)
        except _Absent:
            absent.append(kernel)
        finally:
            _looking.active = False

    with _hooking, knobs.cache.scope():
        knobs.cache.manager_class = StoredOnly
        _in_threads(load, kernels, device)
    return absent


def _load(kernel: Kernel, device: torch.device) -> None:
    """Compile a kernel unless Triton's cache contains it, and load it onto a GPU, so that a capture may launch it.

    Triton would load it, and in 3.6 compile a launcher in C, at its first launch.
    """
    function, specialization = kernel
    compiled = function.preload(specialization)
    if device.type == "cuda":
        _ = compiled.run


def serialize_launchers() -> None:
    """Make all threads load launchers one after the other.

    In Triton 3.6 a launcher is a C extension module, and all launchers have the same module name. If Python loads such
    a file a second time, it writes the functions of the file into the module of that name that was loaded last. If
    another thread has just loaded that module, it would get the launcher of another kernel.
    """
    launcher = driver.active.launcher_cls
    if not isinstance(launcher, _Serialized):
        driver.active.launcher_cls = _Serialized(launcher)


class _Serialized:
    """A function that runs in one thread at a time."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args) -> Any:
        with _loading:
            return self._function(*args)


def _in_threads(work: Callable[[Kernel], Any], kernels: Sequence[Kernel], device: torch.device) -> None:
    """Call work(kernel) for each kernel in a pool of threads. The first error is raised after all calls."""

    def on_device(kernel: Kernel) -> None:
        with _on(device):  # Every thread has its own current device.
            work(kernel)

    pool = ThreadPoolExecutor(workers())
    try:
        errors = [future.exception() for future in [pool.submit(on_device, kernel) for kernel in kernels]]
    finally:
        pool.shutdown(cancel_futures=True)  # After Ctrl-C, wait only for kernels in progress.
    for error in filter(None, errors):
        raise error


def _on(device: torch.device):
    """Return a context in which `device` is the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _compile_in_children(kernels: Sequence[Kernel], target: Any, progress: Progress) -> None:
    """Let child processes compile kernels into Triton's cache. A kernel that fails there is skipped and logged."""
    todo, done, lock = iter(kernels), count(1), threading.Lock()
    children: list[subprocess.Popen] = []
    pool = ThreadPoolExecutor(workers())

    def work(child: subprocess.Popen) -> None:
        assert child.stdin and child.stdout
        while True:
            with lock:
                kernel = next(todo, None)
            if kernel is None:
                return
            function, specialization = kernel
            child.stdin.write(json.dumps((function.fn.__module__, function.fn.__name__, specialization)) + "\n")
            child.stdin.flush()
            if error := _answer(child):
                log.warning("a child process could not compile %s: %s", function.fn.__name__, error)
            with lock:
                progress(next(done), len(kernels))

    try:
        for _ in range(min(workers(), len(kernels))):
            children.append(_start_child(target))
        progress(0, len(kernels))
        list(pool.map(work, children))
    except OSError as error:  # A process could not be started, or has ended unexpectedly.
        log.warning("child processes cannot compile kernels: %s", error)
    finally:
        for child in children:
            child.kill()
            child.wait()
        pool.shutdown()  # Threads whose child process has ended end too.


def _start_child(target: Any) -> subprocess.Popen:
    """Start a compiler process. It is in a session of its own, so that Ctrl-C reaches only this process."""
    package = str(Path(__file__).parents[2])
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": knobs.cache.dir,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "tridecode.step.compiler", target.backend, str(target.arch), str(target.warp_size)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def _answer(child: subprocess.Popen) -> str | None:
    """Return the error of the kernel that the child process compiles, or None.

    Lines that are not answers come from the compiler and are skipped.
    """
    assert child.stdout
    for line in child.stdout:
        try:
            return json.loads(line)["error"]
        except (ValueError, TypeError, KeyError):
            continue
    raise BrokenPipeError(f"a compiler process ended with code {child.wait()}")
