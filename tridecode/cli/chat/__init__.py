"""`tridecode chat`."""
