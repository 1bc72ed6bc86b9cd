"""The declarations of a model and the blocks of its layers: one file a kind of block."""
