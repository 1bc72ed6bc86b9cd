"""check_block: compares a kind of block with its reference in PyTorch, in each kind of pass."""

from collections.abc import Callable

import torch
from models import CUDA, DEVICE, build_engine
from torch.nn.functional import conv1d, normalize, pad, scaled_dot_product_attention, silu, softplus
from util import assert_close

from tridecode import SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.blocks.block import Block
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import rope_tables
from tridecode.blocks.spec import NORM_NAMES, Layer, ModelSpec
from tridecode.blocks.weights import Weights
from tridecode.checkpoint.load import random_weights

VOCAB = 331
# reference(block, weights in fp32 by name, normalized rows [tokens, hidden]) -> output of the block [tokens, hidden]
Reference = Callable[[Block, dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


def spec_of(*layers: Layer, **more) -> ModelSpec:
    return ModelSpec("test", layers[0].mixer.hidden, VOCAB, 512, layers=layers, **more)


def check_block(
    *layers: Layer, references: dict[type, Reference], tokens: int = 90, seed: int = 0, bf16_tolerance: float = 2e-2
) -> None:
    """Check layers against the references of their blocks: in decode passes, in a prompt pass, and in a mix of both.

    Args:
        layers: the layers; a single one is repeated.
        references: the reference of each kind of block.
        tokens: length of the prompt; more than one page.
        bf16_tolerance: relative RMS error of the logits in bf16.
    """
    spec = spec_of(*layers, *layers[: len(layers) == 1])
    ids = [(7 * i + seed) % VOCAB for i in range(tokens)]
    dtypes = {torch.bfloat16: bf16_tolerance, torch.float32: 1e-5} if CUDA else {torch.float32: 1e-5}
    for dtype, tolerance in dtypes.items():
        weights = weights_of(spec, dtype, seed)
        engine = build_engine(spec, weights, 256)
        exact = reference_logits(spec, weights, ids, references)
        assert_close(engine.score(ids), exact, tolerance, "decode passes")
        answer = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=1), reuse_prefix=False)
        assert answer.usage.reused_tokens == 0
        assert_close(engine.model.workspace.logits[0], exact[-1], tolerance, "the prompt pass")
        longer = [*ids, *engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=4)).token_ids]
        exact = reference_logits(spec, weights, longer[:-1], references)
        assert_close(engine.model.workspace.logits[0], exact[-1], tolerance, "decode passes after a prompt pass")


def weights_of(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> Weights:
    """Return random weights, with some heads of recurrent state that forget slowly."""
    weights = random_weights(spec, DEVICE, dtype, seed)
    for layer in weights.layers:
        if "a_log" in layer.weights:
            layer.weights["a_log"].copy_(torch.linspace(-5, 1, len(layer.weights["a_log"])))
            layer.weights["conv"].sub_(0.8)
    return weights


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
    query, kv = block.q_size * (1 + block.gate), block.kv_size
    q, k, v = (part.view(tokens, -1, dim) for part in qkv.split([query, kv, kv], 1))
    gate = q[:, 1::2].flatten(1).sigmoid() if block.gate else 1.0
    q = q[:, ::2] if block.gate else q
    if block.qk_norm:
        q, k = rms_norm(q, w["q_norm"], block.eps), rms_norm(k, w["k_norm"], block.eps)
    cos, sin = (table[:, None] for table in rope_tables(block.rope, dim, tokens, x.device))
    half = cos.shape[-1]
    q, k = (
        torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
        for a, b, rest in (x.split([half, half, dim - 2 * half], -1) for x in (q, k))
    )
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    k, v = (part.repeat_interleave(block.group, 0) for part in (k, v))
    behind = torch.arange(tokens, device=x.device)[:, None] - torch.arange(tokens, device=x.device)
    seen = (behind >= 0) & (behind < (block.window or tokens))
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=block.scale)[0]
    return out.transpose(0, 1).flatten(1) * gate @ w["o_proj"].T


def mlp_reference(block: MLP, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w["gate_up"].T).chunk(2, -1)
    return (silu(gate) * up) @ w["down"].T


def moe_reference(block: MoE, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    inner, stored = block.intermediate, block.experts + block.shared
    gate_up = w["experts_gate_up"].view(stored, 2 * inner, block.hidden)
    down = w["experts_down"].view(stored, block.hidden, inner)
    weights, ids = (x @ w["router"].T).softmax(1).topk(block.top_k, 1)
    if block.normalize:
        weights = weights / weights.sum(1, keepdim=True)
    if block.shared:
        weights = torch.cat((weights, (x @ w["shared_gate"].T).sigmoid()), 1)
        ids = torch.cat((ids, torch.full_like(ids[:, :1], block.experts)), 1)
    gate, up = torch.einsum("tenk,tk->ten", gate_up[ids], x).chunk(2, 2)
    out = torch.einsum("te,tenk,tek->tn", weights, down[ids], silu(gate) * up)
    if block.apart is None:
        return out
    gate, up = (x @ w["shared_gate_up"].T).chunk(2, -1)
    return out + (x @ w["shared_gate"].T).sigmoid() * ((silu(gate) * up) @ w["shared_down"].T)


def delta_reference(block: GatedDelta, w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    tokens, keys, values = len(x), block.key_heads, block.value_heads
    mixed, z = (x @ w["in_proj"].T).split([block.sizes.channels, block.sizes.value_size], 1)
    padded = pad(mixed.T, (block.width - 1, 0))
    mixed = silu(conv1d(padded[None], w["conv"], groups=len(padded))[0].T)
    q, k, v = mixed.split([block.sizes.key_size, block.sizes.key_size, block.sizes.value_size], 1)
    q, k = (normalize(part.view(tokens, keys, -1), dim=-1).repeat_interleave(values // keys, 1) for part in (q, k))
    v, z = v.view(tokens, values, -1), z.view(tokens, values, -1)
    decay = (-w["a_log"].exp() * softplus(x @ w["a"].T + w["dt_bias"])).exp()
    beta = (x @ w["b"].T).sigmoid()
    state, out = x.new_zeros(values, block.key_dim, block.value_dim), []
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        error = v[t] - (state * k[t, :, :, None]).sum(1)
        state = state + k[t, :, :, None] * (beta[t, :, None] * error)[:, None]
        out.append((state * q[t, :, :, None]).sum(1) * block.key_dim**-0.5)
    normed = rms_norm(torch.stack(out), w["delta_norm"], block.eps)
    return (normed * (z.sigmoid() if block.sigmoid else silu(z))).flatten(1) @ w["out_proj"].T


REFERENCES: dict[type, Reference] = {
    Attention: attention_reference,
    GatedDelta: delta_reference,
    MLP: mlp_reference,
    MoE: moe_reference,
}
