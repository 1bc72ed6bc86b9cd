"""The command line: `tridecode chat | generate | info | bench | profile | tune`."""

from .main import main

__all__ = ["main"]
