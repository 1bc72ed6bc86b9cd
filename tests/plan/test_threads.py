"""CPU threads: one for a tiny model, free cores for others, or the number that the user sets."""

import os
import subprocess
import sys
import time

import pytest
import torch
from chats import ROOT

from tridecode.plan import cgroup, threads

SCENARIOS = {
    # name: (statements of a program, numbers of threads that it prints)
    "untouched": ("load(); show(torch.get_num_threads())", "1"),
    "set before, as many as PyTorch's own": (
        "torch.set_num_threads(N); load(); show(torch.get_num_threads() == N)",
        "True",
    ),
    "set before": ("torch.set_num_threads(3); load(); show(torch.get_num_threads())", "3"),
    "set after": ("e = load(); torch.set_num_threads(3); answer(e); show(torch.get_num_threads())", "3"),
    "loaded and used in threads of their own": (
        "torch.ones(2) + 1; e = elsewhere(load); answer(e); show(torch.get_num_threads());"
        "show(elsewhere(lambda: (answer(e), torch.get_num_threads())[1]))",
        "1 1",
    ),
    "one engine after another": (
        "a, b = load(), load(); b.threads = 2;"
        "answer(b); show(torch.get_num_threads()); answer(a); show(torch.get_num_threads())",
        "2 1",
    ),
}
PROGRAM = """
import os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from tridecode import Engine, SamplingParams

def show(value):
    print(value, end=" ")

def answer(engine):
    engine.generate("Hello", SamplingParams(max_tokens=2))

def load():
    engine = Engine.load(device="cpu")
    answer(engine)
    return engine

def elsewhere(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()

N = torch.get_num_threads()
for code in sys.argv[1:]:  # each in a copy of this process, which has computed nothing yet
    if not (child := os.fork()):
        exec(code)
        print(flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def run(*codes: str, **environment) -> list[list[str]]:
    """Return the words that each program prints."""
    kept = {name: value for name, value in os.environ.items() if name not in threads.VARIABLES}
    command = [sys.executable, "-c", PROGRAM, *codes]
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_number_of_threads():
    codes, expected = zip(*SCENARIOS.values())
    assert run(*codes) == [numbers.split() for numbers in expected]
    assert run("load(); show(torch.get_num_threads())", OMP_NUM_THREADS="2") == [["2"]]


class Free:
    def count(self):
        return 7


def test_tiny_model_uses_one_thread():
    assert threads.choose(threads.TINY - 1, Free()) == 1
    assert threads.choose(threads.TINY, Free()) == 7


@pytest.mark.parametrize("idle, own, cores", [(4.0, 0, 4), (3.0, 1.0, 4), (1.9, 0.9, 3), (0.2, 0.6, 1), (0, 0, 1)])
def test_cores_used_by_other_programs_are_not_free(monkeypatch, idle, own, cores):
    """The machine has four cores: `idle` are idle, `own` are busy with this process."""
    clock = {"now": 100.0}
    monkeypatch.setattr(threads, "DEFAULT", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cgroup, "cpus", lambda: float("inf"))
    monkeypatch.setattr(threads, "_idle_seconds", lambda: idle * clock["now"])
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(time, "process_time", lambda: own * clock["now"])
    watched = threads.FreeCores()
    clock["now"] += 2.0
    assert watched.count() == cores


@pytest.mark.parametrize("quota, affinity, cores", [(1.5, {0, 1, 2, 3}, 1), (2.0, {0, 1, 2, 3}, 2), (0.5, {1}, 1)])
def test_quota_and_affinity_limit_the_cores(monkeypatch, quota, affinity, cores):
    monkeypatch.setattr(threads, "DEFAULT", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity)
    monkeypatch.setattr(cgroup, "cpus", lambda: quota)
    monkeypatch.setattr(threads, "_idle_seconds", lambda: 4 * time.monotonic())
    assert threads.FreeCores().count() == cores


def test_idle_time_can_be_measured():
    assert threads._idle_seconds() > 0
    assert 1 <= threads.FreeCores().count() <= max(torch.get_num_threads(), threads.DEFAULT)


CGROUPS = {
    "v2": ("0::/user/app\n", {"user/app/cpu.max": "150000 100000"}, 1.5),
    "v2, the tightest is further up": ("0::/user/app\n", {"user/app/cpu.max": "max 100000", "cpu.max": "2 1"}, 2.0),
    "v2, its own name is not visible": ("0::/gone/app\n", {"cpu.max": "200000 100000"}, 2.0),
    "v2, outside of what is visible": ("0::/../../app\n", {"cpu.max": "200000 100000"}, 2.0),
    "v1": ("3:cpu,cpuacct:/app\n", {"cpu/app/cpu.cfs_quota_us": "50000", "cpu/app/cpu.cfs_period_us": "100000"}, 0.5),
    "v1 without a quota": ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "none": ("", {}, None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_quotas(name, tmp_path):
    own, files, expected = CGROUPS[name]
    for file, text in ({"own": own} | files).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert cgroup.cpus(tmp_path, tmp_path / "own") == (expected or float("inf"))
