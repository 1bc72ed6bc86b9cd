"""Checkpoints: download, files, quantization, and loading onto the device."""
