"""GPUs that have no tuning table, with the properties that their drivers report."""

from tridecode.kernels import device
from tridecode.kernels.device import Device

# Shared memory of a program and of a multiprocessor in bytes, registers of a multiprocessor: the CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability".
GPUS = {name: gpu for name, gpu in device.GPUS.items() if name != "h200"} | {
    "h100-pcie": Device("NVIDIA H100 PCIe", 90, 114, 232448, 233472, 65536),
    # GPUs of other capabilities, for which there are no special rules.
    "orin": Device("Orin", 87, 16, 166912, 167936, 65536),
    "b300": Device("NVIDIA B300", 103, 148, 232448, 233472, 65536),
    "thor": Device("NVIDIA Thor", 110, 20, 232448, 233472, 65536),
    "gb10": Device("NVIDIA GB10", 121, 48, 101376, 102400, 65536),
}
