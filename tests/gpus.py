"""GPUs for which launch configs are checked, with the properties that their drivers report."""

from tridecode.kernels.device import Device

# Shared memory of a program and of a multiprocessor in bytes, registers of a multiprocessor: the CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability".
GPUS = {
    "a100": Device("NVIDIA A100-SXM4-80GB", 80, 108, 166912, 167936, 65536),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", 86, 82, 101376, 102400, 65536),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", 89, 128, 101376, 102400, 65536),
    "l4": Device("NVIDIA L4", 89, 58, 101376, 102400, 65536),
    "h100": Device("NVIDIA H100 80GB HBM3", 90, 132, 232448, 233472, 65536),
    "h100-pcie": Device("NVIDIA H100 PCIe", 90, 114, 232448, 233472, 65536),
    "b200": Device("NVIDIA B200", 100, 148, 232448, 233472, 65536),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", 120, 170, 101376, 102400, 65536),
    # Other capabilities that exist; none has rules of its own.
    "orin": Device("Orin", 87, 16, 166912, 167936, 65536),
    "b300": Device("NVIDIA B300", 103, 148, 232448, 233472, 65536),
    "thor": Device("NVIDIA Thor", 110, 20, 232448, 233472, 65536),
    "gb10": Device("NVIDIA GB10", 121, 48, 101376, 102400, 65536),
}
