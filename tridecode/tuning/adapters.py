"""Launch configs of shrink, which multiplies the activations of a linear by the matrix A of adapters."""

from ..kernels.linear.shrink import MAX_SPLIT, ShrinkConfig

COLUMNS = 640  # Columns of a program in a pass of one row. All its tiles are in flight.
COLUMNS_OF_ROWS = 1024  # The same in a pass of several rows. Fewer sums remain to be added.
COLUMNS_OF_STEP = 768  # Columns of a step in a prompt pass.


def shrink_config(k: int, rows: int, batch_invariant: bool, prompt: bool = False) -> ShrinkConfig:
    """Choose the launch config of shrink for a linear of k columns in passes of `rows` rows.

    Args:
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass. It has enough tiles of rows to fill the GPU, so the columns are not
            split.
    """
    if prompt:
        return ShrinkConfig(steps=-(-k // COLUMNS_OF_STEP), num_warps=8)
    columns = COLUMNS if rows == 1 and not batch_invariant else COLUMNS_OF_ROWS
    return ShrinkConfig(min(-(-k // columns), MAX_SPLIT))
