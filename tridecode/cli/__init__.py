"""The command line: `tridecode chat | generate | serve | info | bench | profile | tune`."""

try:
    from .main import main
except KeyboardInterrupt:  # The user pressed Ctrl-C before the program could handle it.
    raise SystemExit(130) from None

__all__ = ["main"]
