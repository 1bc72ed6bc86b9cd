"""The plan of an engine: device, memory, threads."""
