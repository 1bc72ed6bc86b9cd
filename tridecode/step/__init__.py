"""One pass over the model: its lists, its buffers, and who runs it."""
