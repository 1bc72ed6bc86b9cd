"""A checkpoint: what it says and what it holds."""
