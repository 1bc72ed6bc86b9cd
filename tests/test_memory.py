"""The memory plan: what fits, what does not, and a container's own limit."""

import pytest
import torch
from models import tiny_config

from tridecode import memory
from tridecode.errors import DeviceError
from tridecode.memory import MemoryPlan, container_memory, plan_memory

GIB = 2**30


def test_the_context_is_what_fits_beside_the_weights():
    plan = MemoryPlan(free=10 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192, headroom=0.1)
    assert plan.max_context == 2048
    assert plan.capacity(None, "x") == 2048 and plan.capacity(1000, "x") == 1000
    with pytest.raises(DeviceError, match=r"3,000 positions need 9\.93 GiB .* at most 2,048 positions fit"):
        plan.capacity(3000, "x")


def test_weights_that_do_not_fit():
    plan = MemoryPlan(free=5 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192)
    with pytest.raises(DeviceError, match="choose a smaller model"):
        plan.capacity(None, "x")


def test_the_plan_leaves_a_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    plan = plan_memory(tiny_config(max_position=2**24), torch.float32, torch.device("cpu"))
    assert plan.needed(plan.max_context) <= 0.75 * GIB < plan.needed(plan.max_context + 1)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"memory.max": "1000", "memory.current": "1400"}, 0),
        ({"memory.max": "max", "memory.current": "400"}, float("inf")),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 800),
        ({}, float("inf")),
    ],
    ids=["v2", "over", "unlimited", "v1", "none"],
)
def test_container_memory(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert container_memory(tmp_path) == expected
