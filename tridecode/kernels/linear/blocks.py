"""RowBlocks: what launch configs share whose programs take blocks of a weight's rows."""


class RowBlocks:
    """Launch configs whose programs take block_n rows of the weights at a time."""

    def grid(self, N: int) -> tuple[int, int]:
        """Blocks of N rows, and programs to launch."""
        blocks = -(-N // self.block_n)
        return blocks, min(self.programs or blocks, blocks)
