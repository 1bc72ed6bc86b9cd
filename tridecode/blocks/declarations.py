"""Declarations: the weights, buffers and state of a block.

Loading, the memory plan, the workspace, tuning, byte counts, quantization and offload read these declarations.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Rows of a linear that come from one module of the checkpoint. The parts of a linear follow each other.

    Args:
        module: name in the layer, without ".weight", for example "self_attn.q_proj".
        rows: number of rows.
        stacked: number of matrices in the module's tensor, which is named as the module and has three dimensions; 0
            for a tensor of two dimensions.
        groups: the lengths of the runs of rows that alternate in the checkpoint. On the device, all runs of the first
            length come first, then those of the second. Empty: the rows are in order.
    """

    module: str
    rows: int
    stacked: int = 0
    groups: tuple[int, ...] = ()

    @property
    def tensor(self) -> str:
        """Name of the tensor in the layer."""
        return self.module if self.stacked else f"{self.module}.weight"


@dataclass(frozen=True)
class Linear:
    """A product with a weight matrix.

    Args:
        name: role in the lists of launches, unique within a layer.
        n, k: rows and columns of the weight.
        parts: modules of the checkpoint that contain the rows. Empty for a tied LM head.
        epilogue: the computation that the decode pass fuses with the matrix product: "normed", "gated" or "residual"
            (see kernels/linear/project.py).
        bias: every part has a bias. Only the epilogue normed allows one.
        scale: factor that the loader multiplies into weight and bias.
        experts: number of experts whose weights follow each other in the rows; 0 if all rows are one weight. The ops
            of kernels/moe multiply by the weights of experts, not `project`.
        active: number of experts that a row uses.
        always: number of experts that every row uses, such as a shared one. `experts` and `active` include them.
    """

    name: str
    n: int
    k: int
    parts: tuple[Part, ...]
    epilogue: str
    bias: bool = False
    scale: float = 1.0
    experts: int = 0
    active: int = 0
    always: int = 0

    def __post_init__(self) -> None:
        if self.bias and self.epilogue != "normed":
            raise ValueError(f"{self.name}: a linear with the epilogue {self.epilogue} has no bias")

    def experts_of(self, rows: int) -> float:
        """Return the expected number of distinct experts of `rows` rows, if all experts are equally likely."""
        chosen, others = self.active - self.always, self.experts - self.always
        return self.always + others * (1 - (1 - chosen / others) ** rows)


@dataclass(frozen=True)
class Weight:
    """A tensor that does not belong to a linear, such as the weight of a norm or an embedding.

    Args:
        name: unique within a layer.
        tensor: name in the checkpoint, relative to the layer.
        shape: shape in the checkpoint and on the device.
        scale: factor that the loader multiplies in.
        offset: number that the loader adds. Zero-centered norms store their weight minus 1.
        dtype: "weights" (the dtype of the model's weights) or "float32".
        transposed: the first axis is contiguous in memory.
        groups: as in Part.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    scale: float = 1.0
    offset: float = 0.0
    dtype: str = "weights"
    transposed: bool = False
    groups: tuple[int, ...] = ()


def norm_weight(name: str, tensor: str, size: int, offset: float, scale: float = 1.0) -> Weight:
    """Return the weight of a norm. 1 + weight is stored in fp32, because bf16 would round the sum."""
    return Weight(name, tensor, (size,), scale, offset, "float32" if offset else "weights")


@dataclass(frozen=True)
class Buffer:
    """Activations of a pass. Blocks that declare equal buffers share one tensor.

    Args:
        name: name in `PassState.buffers`.
        shape: shape of one row.
        dtype: "weights" (the dtype of the weights), "activation" (bf16 for bf16 weights, fp32 for all others),
            "float32" or "int32".
        tile: whether a linear reads the buffer in tiles of many rows. If so, the number of rows is rounded up to whole
            tiles.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "activation"
    tile: bool = False


@dataclass(frozen=True)
class Pages:
    """K and V of one layer for every position, stored in pages."""

    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Number of elements in K, and in V, of one position."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Recurrent:
    """State of one layer with a fixed size per record: a matrix for each V head, and recent inputs of a convolution.

    Args:
        key_heads, value_heads: numbers of heads.
        key_dim, value_dim: rows and columns of a matrix.
        channels: channels of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
