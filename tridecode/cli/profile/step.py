"""The launches of a greedy step and of a prompt chunk as their lists say them: roles, kernels, and bytes."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean

import torch

from ...layout import Chunk
from ...step import decode
from ...step.model import DecodeModel
from ...step.prompt import read, write_chunks
from ...step.run import Launch, Recorder


def step_launches(model: DecodeModel, rows: int = 1) -> list[Launch]:
    """Of a greedy step of `rows` rows, in order."""
    recorder = Recorder()
    decode.decode_pass(recorder, model.of_rows(rows), "greedy")
    return recorder.launches


def prompt_launches(model: DecodeModel, tokens: int) -> list[Launch]:
    """Of a cold chunk of `tokens`, in order."""
    recorder = Recorder()
    with torch.inference_mode():
        write_chunks(model, [Chunk(0, 0, tokens, 0)])
        read(recorder, model, tokens)
    return recorder.launches


def roles_and_kernels(launches: Iterable[Launch]) -> tuple[list[str], list[str]]:
    """The role and the name of each kernel that the launches bring, in order."""
    pairs = [(launch.role, kernel) for launch in launches for kernel in launch.kernels()]
    return [role for role, _ in pairs], [kernel for _, kernel in pairs]


def bytes_by_role(launches: Iterable[Launch]) -> dict[str, float]:
    """Role -> mean bytes per launch, with the state as it is now (windows make layers differ)."""
    return _mean_bytes((launch.role, launch) for launch in launches)


def bytes_by_kernel(launches: Iterable[Launch]) -> dict[str, float]:
    """Kernel -> mean bytes per launch, of the launches that are one kernel of ours."""
    return _mean_bytes((launch.kernels()[0], launch) for launch in launches if len(launch.op.kernels) == 1)


def _mean_bytes(named: Iterable[tuple[str, Launch]]) -> dict[str, float]:
    found = defaultdict(list)
    for name, launch in named:
        found[name].append(launch.bytes())
    return {name: mean(sizes) for name, sizes in found.items()}


def add_bytes(kernels: list[dict], moved: dict[str, float], bandwidth: float) -> None:
    """To each role in `moved` its bytes a launch, and the part of `bandwidth` (bytes per second) at which its cost
    moved them."""
    for role in kernels:
        if role["op"] in moved:
            role["bytes"] = round(moved[role["op"]])
            seconds = role["mean_us"] / 1e6
            role["pct_bandwidth"] = 100 * moved[role["op"]] / seconds / bandwidth if seconds else None
