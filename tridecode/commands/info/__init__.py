"""`tridecode info`."""
