"""The memory plan: what fits, what does not, and a container's own limit."""

import pytest
import torch
from models import tiny_config

from tridecode import cgroup, memory
from tridecode.errors import DeviceError
from tridecode.memory import MemoryPlan, plan_memory

GIB = 2**30


def test_the_context_is_what_fits_beside_the_weights():
    plan = MemoryPlan(free=10 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192, headroom=0.1)
    assert plan.max_context == 2048
    assert plan.capacity(None, "x") == 2048 and plan.capacity(1000, "x") == 1000
    with pytest.raises(DeviceError, match=r"3000 positions need 9\.93 GiB .* at most 2048 positions fit"):
        plan.capacity(3000, "x")


def test_weights_that_do_not_fit():
    plan = MemoryPlan(free=5 * GIB, weights=6 * GIB, per_token=2**20, fixed=GIB, model_limit=8192)
    with pytest.raises(DeviceError, match="choose a smaller model"):
        plan.capacity(None, "x")


def test_the_plan_leaves_a_share_of_the_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: GIB)
    plan = plan_memory(tiny_config(max_position=2**24), torch.float32, torch.device("cpu"))
    assert plan.needed(plan.max_context) <= 0.75 * GIB < plan.needed(plan.max_context + 1)


V2, V1 = "0::/app\n", "4:memory:/app\n"
CACHE = "anon 100\ninactive_file 200\nactive_file 50\ntotal_inactive_file 300\ntotal_active_file 60\n"


@pytest.mark.parametrize(
    "own, files, expected",
    [
        (V2, {"memory.max": "1000", "memory.current": "400"}, 600),
        (V2, {"memory.max": "1000", "memory.current": "1400"}, 0),
        (V2, {"memory.max": "max", "memory.current": "400"}, float("inf")),
        (V2, {"app/memory.max": "700", "app/memory.current": "400", "memory.max": "999", "memory.current": "9"}, 300),
        (V2, {"app/memory.max": "1000", "app/memory.current": "700", "app/memory.stat": CACHE}, 550),
        (V1, {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 800),
        (V1, {"memory/app/memory.limit_in_bytes": "900", "memory/app/memory.usage_in_bytes": "100"}, 800),
        (V1, {f"memory/{n}": t for n, t in (("memory.limit_in_bytes", "900"), ("memory.usage_in_bytes", "800"),
                                            ("memory.stat", CACHE))}, 460),
        ("", {}, float("inf")),
    ],
    ids=["v2", "over", "unlimited", "own_group", "file_cache", "v1", "v1_own_group", "v1_file_cache", "none"],
)  # fmt: skip
def test_container_memory(own, files, expected, tmp_path):
    for name, text in ({"own": own} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cgroup.free_memory(tmp_path, tmp_path / "own") == expected
