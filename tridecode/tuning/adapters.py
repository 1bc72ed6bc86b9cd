"""Launch configs of shrink, which multiplies the activations of a linear by the matrix A of adapters."""

from ..kernels.linear.shrink import MAX_SPLIT, ShrinkConfig

COLUMNS = 640  # Columns of a program in a pass of one row. All its tiles are in flight.
COLUMNS_OF_ROWS = 2048  # The same in a pass of several rows. Fewer sums remain to be added.


def shrink_config(k: int, rows: int, batch_invariant: bool, prompt: bool = False) -> ShrinkConfig:
    """Choose the launch config of shrink for a linear of k columns in passes of `rows` rows.

    Args:
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass, whose tiles of rows occupy the device.
    """
    if prompt:
        return ShrinkConfig(1, 64, block_m=16 if batch_invariant else 1)
    if batch_invariant or rows > 1:
        return ShrinkConfig(min(-(-k // COLUMNS_OF_ROWS), MAX_SPLIT), block_m=16 if batch_invariant else 1)
    return ShrinkConfig(min(-(-k // COLUMNS), MAX_SPLIT))
