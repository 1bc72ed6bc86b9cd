"""Which tensors a checkpoint of a configuration must hold, and where each goes on the device."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..blocks.host_layers import LAYER_BUFFERS, layer_bytes
from ..kernels.linear.packed import Packed
from ..models.config import ModelConfig
from .formats.quantize import fitted
from .formats.scheme import Scheme, Stored, packed_form

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Piece:
    """Where a checkpoint's tensor goes: rows `start` to `start + shape[0]` of the one called `target`. scheme: how it
    stands in the checkpoint; None, as it is."""

    target: str
    start: int
    shape: tuple[int, ...]
    scheme: Scheme | None = None


@dataclass(frozen=True)
class Target:
    """A tensor on the device, or a weight in packed form. made: the scheme that its pieces are quantised by."""

    shape: tuple[int, ...]
    packed: Packed | None = None
    made: Scheme | None = None

    def tensors(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Part -> shape and dtype; a tensor as it is has the one part "weight"."""
        return {"weight": (self.shape, dtype)} if self.packed is None else self.packed.shapes(self.shape[0])


def pieces(config: ModelConfig) -> dict[str, Piece]:
    """Every tensor of an unquantised checkpoint of this configuration, by its name there; targets are named as in
    Weights."""
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    found = {"model.embed_tokens.weight": Piece("embed", 0, (config.vocab_size, hidden))}

    def product(name: str, target: str, start: int, shape: tuple[int, int]) -> None:
        scheme = config.quantisation and config.quantisation.scheme(name)
        found[f"{name}.weight"] = Piece(f"{target}.weight", start, shape, scheme)

    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        found[theirs + "input_layernorm.weight"] = Piece(ours + "input_norm", 0, (hidden,))
        for name, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            product(f"{theirs}self_attn.{name}_proj", ours + "qkv", start, (rows, hidden))
            if config.qkv_bias:
                found[f"{theirs}self_attn.{name}_proj.bias"] = Piece(ours + "qkv.bias", start, (rows,))
        if config.qk_norm:
            found[theirs + "self_attn.q_norm.weight"] = Piece(ours + "q_norm", 0, (config.head_dim,))
            found[theirs + "self_attn.k_norm.weight"] = Piece(ours + "k_norm", 0, (config.head_dim,))
        product(theirs + "self_attn.o_proj", ours + "o_proj", 0, (hidden, q))
        found[theirs + "post_attention_layernorm.weight"] = Piece(ours + "post_norm", 0, (hidden,))
        product(theirs + "mlp.gate_proj", ours + "gate_up", 0, (inner, hidden))
        product(theirs + "mlp.up_proj", ours + "gate_up", inner, (inner, hidden))
        product(theirs + "mlp.down_proj", ours + "down", 0, (hidden, inner))
    found["model.norm.weight"] = Piece("final_norm", 0, (hidden,))
    if not config.tie_word_embeddings:
        product("lm_head", "lm_head", 0, (config.vocab_size, hidden))
    return found


def stored(name: str, piece: Piece) -> dict[str, Stored]:
    """The tensors of a checkpoint that hold a piece, by their names; the largest comes first."""
    if piece.scheme is None:
        return {name: Stored(piece.shape, FLOATS)}
    module = name.removesuffix("weight")
    return {module + suffix: of for suffix, of in piece.scheme.read.tensors(piece.scheme, *piece.shape).items()}


def targets(
    config: ModelConfig, packs: bool, scale_dtype: Callable[[str], torch.dtype] | None = None
) -> dict[str, Target]:
    """Name -> every tensor on the device. packs: weights in fewer bits stay so, if all pieces of one are alike.
    scale_dtype: of a tensor of the checkpoint by name."""
    members: dict[str, list[str]] = {}
    known = pieces(config)
    for name, piece in known.items():
        members.setdefault(piece.target, []).append(name)
    found = {}
    for target, names in members.items():
        own = [known[name] for name in names]
        shape = (sum(piece.shape[0] for piece in own), *own[0].shape[1:])
        schemes, starts = {piece.scheme for piece in own}, [piece.start for piece in own]
        if len(shape) == 1 or target == "embed":
            found[target] = Target(shape)
        elif schemes == {None}:
            found[target] = _made(config, names[0].removesuffix(".weight"), shape, starts, packs)
        elif len(schemes) == 1 and packs:
            scheme = own[0].scheme
            dtypes = {scale_dtype(name) for name in names} if scale_dtype else {_usual(scheme)}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            found[target] = Target(shape, packed_form(scheme, shape[1], starts, dtype))
        else:
            found[target] = Target(shape)
    if config.tie_word_embeddings and config.quantise and config.quantise.scheme("lm_head"):
        found["lm_head.weight"] = _made(config, "lm_head", (config.vocab_size, config.hidden_size), [0], packs)
    return found


def _made(config: ModelConfig, module: str, shape: tuple[int, int], starts: list[int], packs: bool) -> Target:
    """Of a weight that stands in the checkpoint as it is."""
    scheme = config.quantise and config.quantise.scheme(module)
    if not scheme:
        return Target(shape)
    scheme = fitted(scheme, shape[1])
    return Target(shape, packed_form(scheme, shape[1], starts, _usual(scheme)) if packs else None, scheme)


def _usual(scheme: Scheme) -> torch.dtype:
    """Of scales where no file says it."""
    return torch.float32 if scheme.floating else torch.bfloat16


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied LM head counts once."""
    return sum(math.prod(piece.shape) for piece in pieces(config).values())


def weight_bytes(config: ModelConfig, dtype: torch.dtype, packs: bool = False, on_host: int = 0) -> int:
    """Bytes that the weights take on the device, those that are not packed in `dtype`; on_host: layers whose
    projections are in the host's memory."""
    return device_bytes(targets(config, packs), dtype, on_host)


def host_layer_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one layer in the host's memory."""
    return _layer_bytes(targets(config, packs=False), dtype)


def device_bytes(found: dict[str, Target], dtype: torch.dtype, on_host: int) -> int:
    parts = [part for target in found.values() for part in target.tensors(dtype).values()]
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    return total - (on_host - LAYER_BUFFERS) * _layer_bytes(found, dtype) if on_host else total


def _layer_bytes(found: dict[str, Target], dtype: torch.dtype) -> int:
    return layer_bytes({name: target.shape for name, target in found.items()}, dtype)
