"""How a model will run: device, memory, threads."""
