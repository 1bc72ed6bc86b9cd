"""attention_queries: attention of several new tokens of each request, which attend to each other."""

from dataclasses import dataclass

from ..op import Op
from .arguments import Heads, KVLayer, Rope, Scratch
from .attention import OUTPUTS, _attention_kernel, attention_bytes, attention_ref, launch_attention


@dataclass(frozen=True)
class QueriesConfig:
    """Launch config of attention of several rows of each request.

    The other fields are described in AttentionConfig. They apply to a request instead of a row.
    """

    queries: int  # Number of rows of each request.
    block_t: int = 32
    splits: int = 32
    num_warps: int = 8
    ahead: int = 1
    short_splits: int = 0
    short_iterations: int = 32
    least: int = 2  # Minimum number of iterations of a split.
    # Whether all programs run at once and combine together, if no request has more than short_splits splits.
    together: bool = False
    registers: int = 0


def attention_queries(meta, qkv, out, kv: KVLayer, rope: Rope, scratch: Scratch, heads: Heads, *, config, pdl=False):
    """Compute attention of config.queries rows of each request, at consecutive positions. Running rows come first."""
    arguments = config.queries, config.least, config.together
    launch_attention(meta, qkv, out, kv, rope, scratch, heads, config, pdl, *arguments)


ATTENTION_QUERIES = Op(attention_queries, attention_ref, attention_bytes, (_attention_kernel,), outputs=OUTPUTS)
