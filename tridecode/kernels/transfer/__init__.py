"""Copies between the host's memory and the device."""
