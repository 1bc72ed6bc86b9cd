"""Checkpoints: where they come from, their files and formats, and loading onto the device."""
