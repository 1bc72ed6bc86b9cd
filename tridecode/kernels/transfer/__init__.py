"""Copies from host memory to the device."""
