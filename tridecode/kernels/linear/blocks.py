"""RowBlocks: the base of launch configs whose programs take blocks of a weight's rows."""

from typing import TYPE_CHECKING


class RowBlocks:
    """A launch config whose programs take block_n rows of the weight at a time."""

    if TYPE_CHECKING:  # The launch configs declare these attributes.

        @property
        def block_n(self) -> int:
            """Rows of a block."""

        @property
        def programs(self) -> int:
            """Maximum number of programs; 0: one for each block."""

    def grid(self, N: int) -> tuple[int, int]:
        """Return the number of blocks of N rows, and the number of programs to launch."""
        blocks = -(-N // self.block_n)
        return blocks, min(self.programs or blocks, blocks)
