"""Device of an engine: GPUs that are too old are refused."""

import pytest
import torch

from tridecode.errors import DeviceError
from tridecode.options import EngineOptions
from tridecode.plan.device import find_device


@pytest.fixture
def gpu_of(monkeypatch):
    """Give the machine one GPU of a compute capability."""

    def gpu_of(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return gpu_of


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 1)])
def test_gpus_from_compute_capability_8_are_used(gpu_of, capability):
    gpu_of(capability)
    for device in ("auto", "cuda", "cuda:0"):
        assert find_device(EngineOptions(device=device)) == torch.device("cuda", 0)


@pytest.mark.parametrize("options", [dict(device="cuda"), dict(device="auto", backend="triton")])
def test_requested_older_gpu_is_refused(gpu_of, options):
    gpu_of((7, 5))
    with pytest.raises(DeviceError) as raised:
        find_device(EngineOptions(**options))
    assert "\n" not in str(raised.value) and 'device="cpu"' in str(raised.value)


def test_auto_device_ignores_an_older_gpu(gpu_of):
    gpu_of((7, 5))
    assert find_device(EngineOptions()) == torch.device("cpu")
