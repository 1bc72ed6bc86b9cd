"""The description of a model, and the blocks of its layers. Each kind of block has a file."""
