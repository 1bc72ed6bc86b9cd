"""`tridecode profile`."""
