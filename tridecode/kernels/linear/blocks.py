"""RowBlocks: the base of launch configs whose programs take blocks of a weight's rows."""


class RowBlocks:
    """A launch config whose programs take block_n rows of the weight at a time."""

    def grid(self, N: int) -> tuple[int, int]:
        """Return the blocks of N rows and the programs to launch."""
        blocks = -(-N // self.block_n)
        return blocks, min(self.programs or blocks, blocks)
