"""The command line: `tridecode chat | generate | info | bench`."""

from .main import main

__all__ = ["main"]
