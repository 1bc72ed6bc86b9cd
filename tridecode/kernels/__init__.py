"""The operations of a pass: Triton kernels, their launchers and their PyTorch references."""
