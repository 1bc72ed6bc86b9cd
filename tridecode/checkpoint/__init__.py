"""Checkpoints: where they come from, their files, quantization, and loading onto the device."""
