"""The command line: `tridecode chat | generate | serve | info | bench | profile | tune`."""

try:
    from .main import main
except KeyboardInterrupt:  # Ctrl-C in the first moment, before anybody could handle it
    raise SystemExit(130) from None

__all__ = ["main"]
