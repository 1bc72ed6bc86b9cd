"""Checkpoints: safetensors files, one or many, to fused weights on the device.

Everything that can be wrong with a checkpoint is found in the headers, before memory is spent. Then each tensor goes
from the file to its place, piece by piece: the device holds the weights and one small piece, the host one such piece.
Files are read, not mapped: one that becomes shorter meanwhile, or a bad disk, is an error and no signal.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from ..arguments import shown
from ..errors import CheckpointError, DeviceError, brief
from .config import ModelConfig, read_config
from .files import open_regular, present, unique, unreadable
from .host_layers import BUFFERS, HostLayers, layer_bytes, make_host_layers
from .hub import INDEX, SINGLE, shard_map
from .weights import LayerWeights, Linear, Weights

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_MOST_DIMENSIONS = 8  # of any tensor in a file; a product of more numbers than that may itself take minutes
_PIECE = 64 * 2**20  # most bytes that travel to the device at once
_QUANTISED = re.compile(r"\.(qweight|qzeros|g_idx|weight_scale(_inv)?|scales|absmax|quant_map|weight_packed)(\.|$)")


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header: its file and where it begins there, dtype by safetensors' name, shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Piece:
    """Where a checkpoint's tensor goes: rows `start` to `start + shape[0]` of the tensor called `target`."""

    target: str
    start: int
    shape: tuple[int, ...]


def _pieces(config: ModelConfig) -> dict[str, Piece]:
    """Every tensor a checkpoint of this configuration must hold, by its name there; targets are named as in Weights."""
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    found = {"model.embed_tokens.weight": Piece("embed", 0, (config.vocab_size, hidden))}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        found[theirs + "input_layernorm.weight"] = Piece(ours + "input_norm", 0, (hidden,))
        for name, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            found[f"{theirs}self_attn.{name}_proj.weight"] = Piece(ours + "qkv.weight", start, (rows, hidden))
            if config.qkv_bias:
                found[f"{theirs}self_attn.{name}_proj.bias"] = Piece(ours + "qkv.bias", start, (rows,))
        if config.qk_norm:
            found[theirs + "self_attn.q_norm.weight"] = Piece(ours + "q_norm", 0, (config.head_dim,))
            found[theirs + "self_attn.k_norm.weight"] = Piece(ours + "k_norm", 0, (config.head_dim,))
        found[theirs + "self_attn.o_proj.weight"] = Piece(ours + "o_proj.weight", 0, (hidden, q))
        found[theirs + "post_attention_layernorm.weight"] = Piece(ours + "post_norm", 0, (hidden,))
        found[theirs + "mlp.gate_proj.weight"] = Piece(ours + "gate_up.weight", 0, (inner, hidden))
        found[theirs + "mlp.up_proj.weight"] = Piece(ours + "gate_up.weight", inner, (inner, hidden))
        found[theirs + "mlp.down_proj.weight"] = Piece(ours + "down.weight", 0, (hidden, inner))
    found["model.norm.weight"] = Piece("final_norm", 0, (hidden,))
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = Piece("lm_head", 0, (config.vocab_size, hidden))
    return found


def _targets(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor on the device."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in _pieces(config).values():
        rows = shapes.get(piece.target, (0,))[0] + piece.shape[0]
        shapes[piece.target] = (rows, *piece.shape[1:])
    return shapes


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters; a tied LM head counts once."""
    return sum(math.prod(shape) for shape in _targets(config).values())


def weight_bytes(config: ModelConfig, dtype: torch.dtype, on_host: int = 0) -> int:
    """Bytes that the weights take on the device in `dtype`; on_host: as load_weights takes it."""
    total = parameter_count(config) * dtype.itemsize
    return total - (on_host - BUFFERS) * host_layer_bytes(config, dtype) if on_host else total


def host_layer_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one layer in the host's memory."""
    return layer_bytes(_targets(config), dtype)


def load_config(path: Path) -> ModelConfig:
    """The configuration of the checkpoint in directory `path`; raises CheckpointError."""
    path = Path(path)
    config, values = read_config(path)
    if values.get("dtype") is None and values.get("torch_dtype") is None:
        embed = _tensors(path).get("model.embed_tokens.weight") if any(path.glob("*.safetensors")) else None
        if embed is not None and embed.dtype in DTYPES:
            config = replace(config, dtype=str(DTYPES[embed.dtype]).removeprefix("torch."))
    return config


def load_weights(
    path: Path,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    on_host: int = 0,
) -> Weights:
    """Load the checkpoint in directory `path` onto `device`, every tensor converted to `dtype`; on_host: how many of
    the last layers have their projections in the host's memory.

    `progress(done, total)` is called with bytes of the checkpoint's files. Raises CheckpointError, before any memory is
    taken, for a tensor that is wrong, missing, extra or misshapen, and DeviceError when the device is too small.
    """
    path = Path(path)
    tensors = _tensors(path)
    pieces = _pieces(config)
    _check(path, tensors, pieces, config)
    by_file: dict[Path, list[str]] = {}
    for name in sorted(pieces, key=lambda name: tensors[name].begin):  # files are read front to back
        by_file.setdefault(tensors[name].file, []).append(name)
    total = sum(math.prod(piece.shape) * DTYPES[tensors[name].dtype].itemsize for name, piece in pieces.items())
    # A piece in flight may need a second copy, to change its dtype: small beside the weights, however small they are.
    limit = min(_PIECE, max(total // 64, 2**16))
    done = 0
    for file in by_file:
        _check_with_safetensors(file)  # before memory is spent
    targets, host = _allocate(config, torch.device(device), dtype, on_host)
    row_bytes = {n: math.prod(p.shape[1:]) * DTYPES[tensors[n].dtype].itemsize for n, p in pieces.items()}
    buffer = torch.empty(max(limit, *row_bytes.values()), dtype=torch.uint8)
    for file in sorted(by_file):
        with open_regular(file) as opened:
            for name in by_file[file]:
                piece, stored = pieces[name], DTYPES[tensors[name].dtype]
                opened.seek(tensors[name].begin)
                target = targets[piece.target][piece.start : piece.start + piece.shape[0]]
                for place in target.split(max(limit // row_bytes[name], 1)):
                    done += _read_into(place, stored, opened, file, buffer)
                    if progress is not None:
                        progress(done, total)
    return _assemble(config, targets, host)


def _read_into(place: torch.Tensor, stored: torch.dtype, opened: BinaryIO, file: Path, buffer: torch.Tensor) -> int:
    """Fill `place` with the next bytes of `opened`, numbers of type `stored`; returns how many bytes those were."""
    straight = place.dtype == stored and place.device.type == "cpu"
    part = place if straight else buffer[: place.numel() * stored.itemsize].view(stored).view(place.shape)
    try:
        got = opened.readinto(part.view(torch.uint8).numpy())
    except OSError as error:
        raise unreadable(file, error) from None
    if got < part.nbytes:
        raise CheckpointError(f"{file}: became shorter while it was read; load it again once it is whole")
    if not straight:
        # A dtype is changed on the device: the bytes cross the bus as they are in the file.
        place.copy_(part if stored == place.dtype else part.to(place.device))
    return part.nbytes


def _check_with_safetensors(file: Path) -> None:
    """The checks of safetensors itself, which knows more of the format than `read_header`."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{file}: cannot be read ({brief(error)}); download the file again") from None
    except OSError as error:
        raise unreadable(file, error) from None


@torch.no_grad()
def random_weights(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int = 0, on_host: int = 0
) -> Weights:
    """Weights of the configuration's shapes, drawn on the device, with which activations stay near 1; on_host: as
    load_weights takes it.

    For benchmarks and shape tests: the same seed gives the same numbers on the same kind of device only.
    """
    device = torch.device(device)
    targets, host = _allocate(config, device, dtype, on_host)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, target in targets.items():
        tensor = target if target.device.type == device.type else torch.empty_like(target, device=device)
        if tensor.ndim == 2:
            # Each of the 2 * num_layers branches adds its share to the residual stream.
            branch = 2 * config.num_layers if name.endswith(("o_proj.weight", "down.weight")) else 1
            tensor.normal_(0.0, (tensor.shape[1] * branch) ** -0.5, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            tensor.normal_(1.0, 0.1, generator=generator)
        if tensor is not target:
            target.copy_(tensor)
    return _assemble(config, targets, host)


def _allocate(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, on_host: int = 0
) -> tuple[dict[str, torch.Tensor], HostLayers | None]:
    """Every tensor by its name, those of the last `on_host` layers' projections in the host's memory."""
    needed, shapes, layers = weight_bytes(config, dtype, on_host), _targets(config), config.num_layers
    try:
        host = make_host_layers(shapes, device, dtype, layers - on_host, layers) if on_host else None
        stored = host.stored if host else {}
        empty = partial(torch.empty, dtype=dtype, device=device)
        return {name: stored[name] if name in stored else empty(shape) for name, shape in shapes.items()}, host
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        room = f"and about {free / 2**30:.2f} GiB are left"
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        room = "more than there is"
    raise DeviceError(
        f"{device}: the weights need {needed / 2**30:.2f} GiB in {str(dtype).removeprefix('torch.')}, {room}; "
        "choose a smaller model or free memory"
    )


def _assemble(config: ModelConfig, tensors: dict[str, torch.Tensor], host: HostLayers | None = None) -> Weights:
    layers, tensors = [], tensors | (host.read if host else {})
    for i in range(config.num_layers):
        get = {name: tensors.get(f"layers.{i}.{name}") for name in ("input_norm", "q_norm", "k_norm", "post_norm")}
        for name in ("qkv", "o_proj", "gate_up", "down"):
            get[name] = Linear(tensors[f"layers.{i}.{name}.weight"], tensors.get(f"layers.{i}.{name}.bias"))
        layers.append(LayerWeights(**get))
    embed = tensors["embed"]
    return Weights(embed, tuple(layers), tensors["final_norm"], Linear(tensors.get("lm_head", embed)), host)


def _tensors(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in `path`, from its files' headers alone."""
    if present(path / SINGLE):
        return read_header(path / SINGLE)
    index = path / INDEX
    if not present(index):
        pickled = any(path.glob("pytorch_model*.bin"))
        found = " (.bin files are not read: convert them with transformers' save_pretrained)" if pickled else ""
        raise CheckpointError(f"{path}: no {SINGLE} and no {INDEX}{found}; give the directory of a whole checkpoint")
    weight_map = shard_map(index)
    found: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if not present(path / shard):
            raise CheckpointError(f"{index}: names {shard}, which is not in {path}; download the checkpoint again")
        for name, info in read_header(path / shard).items():
            if name in found:
                raise CheckpointError(
                    f"{path / shard}: tensor {shown(name)} is also in {found[name].file.name}; remove one of the two"
                )
            found[name] = info
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise CheckpointError(
                f"{path / shard}: tensor {shown(name)}, there by {INDEX}, is missing; download it again"
            )
    return found


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The entries of a safetensors file, its sizes checked against the file's; raises CheckpointError.

    Format: u64 little-endian n, n bytes of JSON {name: {dtype, shape, data_offsets}}, data.
    """

    def broken(what: str) -> CheckpointError:
        return CheckpointError(f"{file}: {what}; download the file again")

    def twice(name: str) -> CheckpointError:
        return broken(f"its header gives the name {shown(name)} twice")

    try:
        with open_regular(file) as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise broken(f"truncated, or no safetensors file: {size:,} bytes cannot hold a header of {length:,}")
            header = json.loads(opened.read(length), object_pairs_hook=unique(twice))
    except OSError as error:
        raise unreadable(file, error) from None
    except (ValueError, RecursionError):
        raise broken("its header is no JSON") from None
    if not isinstance(header, dict):
        raise broken("its header is no JSON object")
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, end)
            valid = isinstance(dtype, str) and len(shape) <= _MOST_DIMENSIONS and begin <= end
            valid = valid and all(type(n) is int and 0 <= n < 2**63 for n in numbers)
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise broken(f"the header's entry of tensor {shown(name)} is malformed")
        if 8 + length + end > size:
            raise broken(f"truncated: tensor {shown(name)} ends at byte {8 + length + end:,} of a file of {size:,}")
        if dtype in _DTYPE_BYTES and math.prod(shape) * _DTYPE_BYTES[dtype] != end - begin:
            raise broken(f"tensor {shown(name)}, {dtype} of shape {list(shape)}, does not take {end - begin:,} bytes")
        found[name] = TensorInfo(file, dtype, shape, 8 + length + begin)
    return found


def _harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints hold and nothing needs: rotary tables, the copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _check(path: Path, tensors: dict[str, TensorInfo], pieces: dict[str, Piece], config: ModelConfig) -> None:
    """Names, shapes and dtypes of the checkpoint's tensors against what the configuration needs."""
    extra = [name for name in tensors if name not in pieces and not _harmless(name, config)]
    for name in extra:
        if _QUANTISED.search(name):
            raise CheckpointError(
                f"{tensors[name].file}: tensor {shown(name)} belongs to a quantised checkpoint, "
                "which is not supported; use the unquantised one"
            )
    missing = [name for name in pieces if name not in tensors]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        fix = "download the checkpoint again"
        if missing == ["lm_head.weight"]:
            fix = "set tie_word_embeddings to true in config.json if the LM head is the embedding"
        raise CheckpointError(f"{path}: tensor {shown(missing[0])} is missing{more}; {fix}")
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensor {shown(extra[0])}{more} has no place in a {config.family} model of "
            f"{config.num_layers} layers; check config.json, or remove it from the file"
        )
    for name, piece in pieces.items():
        info = tensors[name]
        if info.shape != piece.shape:
            raise CheckpointError(
                f"{info.file}: tensor {shown(name)} must have shape {list(piece.shape)} by config.json, not "
                f"{list(info.shape)}; check that both belong to the same model"
            )
        if info.dtype not in DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {shown(name)} must be one of {', '.join(DTYPES)}, got {shown(info.dtype)}; "
                "use the unquantised checkpoint, or convert it with transformers' save_pretrained"
            )
