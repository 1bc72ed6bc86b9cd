"""Launch configs of shrink, which multiplies the activations of a linear by the matrix A of adapters."""

from ..kernels.linear.shrink import MAX_SPLIT, ShrinkConfig

COLUMNS = 640  # Columns of a program in a pass of one row. All its tiles are in flight.
COLUMNS_OF_ROWS = 1024  # The same in a pass of several rows. Fewer sums remain to be added.


def shrink_config(k: int, rows: int, batch_invariant: bool, prompt: bool = False) -> ShrinkConfig:
    """Choose the launch config of shrink for a linear of k columns in passes of `rows` rows.

    Args:
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass, whose tiles of rows occupy the device.
    """
    columns = COLUMNS if rows == 1 and not (batch_invariant or prompt) else COLUMNS_OF_ROWS
    parts, block_m = min(-(-k // columns), MAX_SPLIT), 16 if batch_invariant else 8
    return ShrinkConfig(steps=parts, block_m=block_m) if prompt else ShrinkConfig(parts, block_m=block_m)
