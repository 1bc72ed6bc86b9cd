"""The command line: `tridecode chat | generate | info`."""

from .main import main

__all__ = ["main"]
