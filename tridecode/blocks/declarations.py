"""Declarations: the weights, buffers and state that a block consists of.

Every loop over a model reads them: loading, memory plan, workspace, tuning, byte counts, quantization, offload.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Rows of a linear that one module of the checkpoint holds.

    module: its name in the layer, without ".weight", for example "self_attn.q_proj". rows: their number. The parts of a
    linear follow each other.
    """

    module: str
    rows: int


@dataclass(frozen=True)
class Linear:
    """A product with a weight matrix.

    name: its role in the lists of launches; unique within a layer. n, k: rows and columns of the weight. parts: where
    the rows come from; none for the embedding's own matrix. epilogue: what the decode pass fuses behind the product
    (kernels/linear/project.py: "normed", "gated" or "residual"). bias: whether each part has one. scale: a factor that
    the loader multiplies into weight and bias.
    """

    name: str
    n: int
    k: int
    parts: tuple[Part, ...]
    epilogue: str
    bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Weight:
    """A tensor that no linear multiplies by: a norm's weight, an embedding.

    name: unique within a layer. tensor: its name in the checkpoint, relative to the layer. scale: a factor that the
    loader multiplies in.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Buffer:
    """Activations of a pass. Blocks that declare equal buffers share one tensor.

    shape: of one row. dtype: "activation" (bf16, or fp32 beside fp16 and fp32 weights), "weights" (the weights' dtype),
    "float32" or "int32". tile: a linear reads it in tiles of many rows, so it has the rows of a whole tile.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "activation"
    tile: bool = False


@dataclass(frozen=True)
class Pages:
    """State of every position: the K and V of one layer, in pages."""

    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers of K, and of V, of one position."""
        return self.kv_heads * self.head_dim
