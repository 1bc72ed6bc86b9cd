"""Formats of weights in fewer bits: how they stand in checkpoints (a file each), and how the kernels read them."""
