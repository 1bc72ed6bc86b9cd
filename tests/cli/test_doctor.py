"""Tests of the warnings of info (alias doctor) about a machine, each with its fix."""

import json
import os
import re
import stat
from pathlib import Path

import pytest

from tridecode.cli import doctor
from tridecode.cli.info import verdict

GPU = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory": 100 * 2**30, "free": 90 * 2**30}
HEALTHY = {
    "c_compiler": lambda: "/usr/bin/gcc",
    "python_headers": lambda: Path(__file__),
    "triton_cache": lambda: Path("/"),
    "writable": lambda path: True,
}


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a working machine, except for the probes that are passed."""

    def machine(**probes):
        for name, probe in {**HEALTHY, **probes}.items():
            monkeypatch.setattr(doctor, name, probe)

    return machine


def test_no_warnings_on_a_working_machine_or_without_a_gpu(machine):
    machine()
    assert doctor.warnings([GPU], "580.95.05", "13.0") == []
    machine(c_compiler=lambda: None, python_headers=lambda: Path("/no"), writable=lambda path: False)
    assert doctor.warnings([], None, None) == doctor.warnings([], None, "13.0") == []


@pytest.mark.parametrize("gpus, driver, cuda, probes, problem, fix", [
    ([GPU, GPU | {"compute_capability": "7.5"}], "580.1", "13.0", {}, "GPU 1 .* 7.5, and 8.0", "--device cuda:N"),
    ([GPU | {"free": 9 * 2**30}], "580.1", "13.0", {}, "GPU 0 .* only 9% of its memory free", "nvidia-smi"),
    ([], "535.183.01", "13.0", {}, "driver 535.183.01 is older than .* CUDA 13.0 needs .580", "update the driver"),
    ([], "470.1", "12.8", {}, "older than .* CUDA 12.8 needs .525", "update the driver"),
    ([], "580.95.05", "13.0", {}, "PyTorch finds no GPU", "CUDA_VISIBLE_DEVICES"),
    ([], "580.95.05", None, {}, "built without CUDA", "PyTorch's CUDA build"),
    ([GPU], "580.1", "13.0", {"c_compiler": lambda: None}, "no C compiler", "build-essential"),
    ([GPU], "580.1", "13.0", {"python_headers": lambda: Path("/no/Python.h")}, "no /no/Python.h", "python3-dev"),
    ([GPU], "580.1", "13.0", {"writable": lambda path: False}, "cache / cannot be written", "TRITON_CACHE_DIR"),
])  # fmt: skip
def test_a_warning_and_its_fix(machine, gpus, driver, cuda, probes, problem, fix):
    machine(**probes)
    (found,) = doctor.warnings(gpus, driver, cuda)
    assert re.search(problem, found["problem"]) and fix in found["fix"]


def test_the_probes(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.c_compiler() is None and doctor.driver_version() is None
    for name, answer in (("clang", ""), ("nvidia-smi", "echo 580.95.05\necho 580.95.05")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert doctor.c_compiler() == str(tmp_path / "clang") and doctor.driver_version() == "580.95.05"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\n")
    assert doctor.driver_version() is None
    monkeypatch.setenv("CC", "mycc")
    assert doctor.c_compiler() == "mycc"
    assert doctor.python_headers().name == "Python.h"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor.triton_cache() == tmp_path / "cache"


def test_writable_directories(tmp_path, monkeypatch):
    assert doctor.writable(tmp_path) and doctor.writable(tmp_path / "not" / "yet")
    (tmp_path / "file").write_text("")
    assert not doctor.writable(tmp_path / "file" / "below")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not doctor.writable(tmp_path)


def test_info_shows_warnings(run, tiny, machine):
    machine(gpu_facts=lambda: [GPU | {"free": 2**30}], driver_version=lambda: "580.95.05", c_compiler=lambda: None)
    code, out, _ = run("doctor", "--model", tiny, "--device", "cpu")
    lines = out.splitlines()
    rows = [line for line in lines if line.startswith("warning")]
    assert code == 0 and lines[0].startswith("verdict ") and f"{tiny} runs here, on the CPU" in lines[0]
    assert len(rows) == 2 and "1% of its memory free; nvidia-smi" in rows[0] and "no C compiler" in rows[1]
    out = run("info", "--model", tiny, "--device", "cpu", "--json")[1]
    assert [set(found) for found in json.loads(out)["warnings"]] == [{"problem", "fix"}] * 2


@pytest.mark.parametrize(
    "device, gpus, cuda, warnings, problem, end",
    [
        ("cuda:0", [GPU], "13.0", [], None, "m runs here, on the GPU cuda:0"),
        ("cuda:0", [GPU], "13.0", ["x"], None, "m runs here, on the GPU cuda:0; see the 1 warning below"),
        ("cpu", [GPU], "13.0", [], None, "m runs here, on the CPU, though there is a GPU (--device cuda)"),
        ("cpu", [], "13.0", [], None, "m runs here, on the CPU; bench, profile and tune need a GPU"),
        ("cpu", [], None, [], None, "need a GPU, which needs PyTorch's CUDA build"),
        ("cpu", [], None, [], "too large", "m does not fit with these options; see context below"),
    ],
)
def test_the_verdict(device, gpus, cuda, warnings, problem, end):
    report = {"model": {"name": "m", "problem": None}, "run": {"device": device}, "gpus": gpus, "warnings": warnings}
    line = verdict(report | {"versions": {"cuda": cuda}, "memory": {"problem": problem}})
    assert line.endswith(end) and line.startswith("m ")
