"""check_block: a kind of block against its reference in PyTorch, in every form of pass."""

from collections.abc import Callable

import torch
from models import CUDA, DEVICE, build_engine
from torch.nn.functional import scaled_dot_product_attention, silu
from util import assert_close

from tridecode import SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.blocks.block import Block
from tridecode.blocks.mlp import MLP
from tridecode.blocks.rope import rope_tables
from tridecode.blocks.spec import NORM_NAMES, Layer, ModelSpec
from tridecode.checkpoint.load import random_weights

VOCAB = 331
# reference(block, weights in fp32 by name, normalized rows [tokens, hidden]) -> output of the block [tokens, hidden]
Reference = Callable[[Block, dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


def spec_of(*layers: Layer, **more) -> ModelSpec:
    return ModelSpec("test", layers[0].mixer.hidden, VOCAB, 512, layers=layers, **more)


def check_block(layer: Layer, references: dict[type, Reference], tokens: int = 90, seed: int = 0) -> None:
    """Check two layers of the block against their reference: decode passes, a prompt pass, and one after the other.

    Args:
        layer: the layer whose blocks are checked, repeated twice.
        references: the reference of each kind of block.
        tokens: length of the prompt; more than one page.
    """
    spec = spec_of(layer, layer)
    ids = [(7 * i + seed) % VOCAB for i in range(tokens)]
    dtypes = {torch.bfloat16: 2e-2, torch.float32: 1e-5} if CUDA else {torch.float32: 1e-5}
    for dtype, tolerance in dtypes.items():
        weights = random_weights(spec, DEVICE, dtype, seed)
        engine = build_engine(spec, weights, 256)
        exact = reference_logits(spec, weights, ids, references)
        assert_close(engine.score(ids), exact, tolerance, "decode passes")
        answer = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=1), reuse_prefix=False)
        assert answer.usage.reused_tokens == 0
        assert_close(engine.model.workspace.logits[0], exact[-1], tolerance, "the prompt pass")
        longer = [*ids, *engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=4)).token_ids]
        exact = reference_logits(spec, weights, longer[:-1], references)
        assert_close(engine.model.workspace.logits[0], exact[-1], tolerance, "decode passes after a prompt pass")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.no_grad()
def reference_logits(spec: ModelSpec, weights, ids, references: dict[type, Reference]) -> torch.Tensor:
    """Compute logits [tokens, vocab] in fp32, all positions at once."""
    h = weights.embed.float()[torch.tensor(ids, device=weights.device)]
    for layer, loaded in zip(spec.layers, weights.layers):
        w = {name: value.float() for name, value in loaded.weights.items()}
        w |= {name: linear.matrix() for name, linear in loaded.linears.items()}
        w |= {f"{n}.bias": linear.bias.float() for n, linear in loaded.linears.items() if linear.bias is not None}
        for norm, block in zip(NORM_NAMES, layer.blocks):
            h = h + references[type(block)](block, w, rms_norm(h, w[norm], block.eps))
    return rms_norm(h, weights.final_norm.float(), spec.eps) @ weights.lm_head.matrix().T


def attention_reference(block: Attention, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    tokens, dim = len(x), block.head_dim
    qkv = x @ w["qkv"].T + w.get("qkv.bias", 0)
    q, k, v = qkv.view(tokens, -1, dim).split([block.heads, block.kv_heads, block.kv_heads], 1)
    if block.qk_norm:
        q, k = rms_norm(q, w["q_norm"], block.eps), rms_norm(k, w["k_norm"], block.eps)
    cos, sin = (table[:, None] for table in rope_tables(block.rope, dim, tokens, x.device))
    q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    k, v = (part.repeat_interleave(block.group, 0) for part in (k, v))
    behind = torch.arange(tokens, device=x.device)[:, None] - torch.arange(tokens, device=x.device)
    seen = (behind >= 0) & (behind < (block.window or tokens))
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=block.scale)[0]
    return out.transpose(0, 1).flatten(1) @ w["o_proj"].T


def mlp_reference(block: MLP, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w["gate_up"].T).chunk(2, -1)
    return (silu(gate) * up) @ w["down"].T


REFERENCES: dict[type, Reference] = {Attention: attention_reference, MLP: mlp_reference}
