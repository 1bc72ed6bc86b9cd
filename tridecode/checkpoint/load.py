"""Checkpoints: safetensors files, one or many, to fused weights on the device.

Everything that can be wrong with a checkpoint is found in the headers, before memory is spent. Then each tensor goes
from the file to its place, piece by piece: the device holds the weights and one small piece, the host one such piece.
Files are read, not mapped: one that becomes shorter meanwhile, or a bad disk, is an error and no signal.
"""

import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..arguments import shown
from ..blocks.host_layers import HostLayers, make_host_layers
from ..blocks.spec import ModelSpec
from ..blocks.weights import Weights
from ..errors import CheckpointError, DeviceError, brief, counted
from ..kernels.linear.weight import LoadedLinear
from ..models.files import open_regular, present, unique, unreadable
from .config import read_config
from .hub import INDEX, SINGLE, shard_map
from .loader import Loader, quantize_into
from .quantization.scheme import Stored
from .slices import FLOATS, Target, TensorSlice, device_bytes, stored, targets, tensor_slices

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of safetensors
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_DTYPE_BYTES |= {"I8": 1, "U8": 1, "F8_E4M3": 1}
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_MOST_DIMENSIONS = 8  # of any tensor in a file; a product of more numbers than that may itself take minutes
_PIECE = 64 * 2**20  # most bytes that travel to the device at once
_QUANTIZED = re.compile(r"\.(qweight|qzeros|g_idx|weight_scale(_inv)?|scales|absmax|quant_map|weight_packed)(\.|$)")


@dataclass(frozen=True)
class TensorInfo:
    """One entry of a safetensors header: its file and where it begins there, dtype by safetensors' name, shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def load_config(path: Path) -> ModelSpec:
    """The configuration of the checkpoint in directory `path`; raises CheckpointError."""
    path = Path(path)
    spec, values = read_config(path)
    if values.get("dtype") is None and values.get("torch_dtype") is None:
        embed = _tensors(path).get(spec.embed.tensor) if any(path.glob("*.safetensors")) else None
        if embed is not None and embed.dtype in DTYPES:
            spec = replace(spec, dtype=str(DTYPES[embed.dtype]).removeprefix("torch."))
    for name, piece in tensor_slices(spec).items():
        if (scheme := piece.scheme) and scheme.rows <= 1 and scheme.group and piece.shape[1] % scheme.group:
            raise CheckpointError(
                f"{path / 'config.json'}: quantization_config: groups of {scheme.group} do not divide the "
                f"{counted(piece.shape[1], 'column')} of {name}; check that both belong together"
            )
    return spec


def load_weights(
    path: Path,
    spec: ModelSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    on_host: int = 0,
    packs: bool | None = None,
) -> Weights:
    """Load the checkpoint in directory `path` onto `device`, every tensor converted to `dtype`, but for weights in
    fewer bits, which are packed for the kernels; packs: whether, by default on a GPU, else they are dequantized.
    on_host: how many of the last layers have their projections in the host's memory, all of them as they are.

    `progress(done, total)` is called with bytes of the checkpoint's files. Raises CheckpointError, before any memory is
    taken, for a tensor that is wrong, missing, extra or misshapen, and DeviceError when the device is too small.
    """
    path, device = Path(path), torch.device(device)
    packs = device.type == "cuda" if packs is None else packs
    tensors, wanted = stored_tensors(path, spec), tensor_slices(spec)
    total = sum(info.nbytes for info in tensors.values())

    def scale_dtype(name: str) -> torch.dtype:
        scale = next(part for part in stored(name, wanted[name]) if "scale" in part.rpartition(".")[2])
        return DTYPES[tensors[scale].dtype]

    plan = targets(spec, packs, scale_dtype)
    # A piece in flight may need a second copy, to change its dtype: small beside the weights, however small they are.
    limit = min(_PIECE, max(total // 64, 2**16))
    with ExitStack() as opened:
        places, host = _allocate(plan, device, dtype, spec.num_layers, on_host)
        loader = Loader(tensors, plan, places, limit, opened)
        done = 0
        first = {name: tensors[next(iter(stored(name, piece)))] for name, piece in wanted.items()}
        for name in sorted(wanted, key=lambda name: (first[name].file, first[name].begin)):  # front to back
            for count in loader.place(name, wanted[name]):
                done += count
                if progress is not None:
                    progress(done, total)
    return _assemble(spec, plan, places, host)


def stored_tensors(path: Path, spec: ModelSpec) -> dict[str, TensorInfo]:
    """Of each tensor that the model is made of where it stands in `path`. Raises CheckpointError, before memory is
    spent, for one that is wrong, missing, extra or misshapen."""
    found = told_tensors(path, spec)
    for file in {info.file for info in found.values()}:
        _check_with_safetensors(file)
    return found


def told_tensors(path: Path, spec: ModelSpec) -> dict[str, TensorInfo]:
    """stored_tensors, by what the files' headers tell alone."""
    tensors, wanted = _tensors(path), tensor_slices(spec)
    needed = {name: of for piece in wanted for name, of in stored(piece, wanted[piece]).items()}
    _check(path, tensors, needed, wanted, spec)
    return {name: tensors[name] for name in needed}


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
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, seed: int = 0, on_host: int = 0,
    packs: bool | None = None,
) -> Weights:  # fmt: skip
    """Weights of the configuration's shapes, drawn on the device, with which activations stay near 1; on_host, packs:
    as load_weights takes them.

    For benchmarks and shape tests: the same seed gives the same numbers on the same kind of device only.
    """
    device = torch.device(device)
    plan = targets(spec, device.type == "cuda" if packs is None else packs)
    places, host = _allocate(plan, device, dtype, spec.num_layers, on_host)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, target in plan.items():
        if name == "lm_head.weight" and spec.tie_word_embeddings:
            continue  # the embedding's numbers
        tensor = place = places[name]["weight"]
        if target.made is not None or place.device.type != device.type:
            tensor = torch.empty(target.shape, dtype=dtype, device=device)
        if tensor.ndim == 2:
            # Each of the 2 * num_layers branches adds its share to the residual stream.
            branch = 2 * spec.num_layers if target.residual else 1
            tensor.normal_(0.0, (tensor.shape[1] * branch) ** -0.5, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            tensor.normal_(1.0, 0.1, generator=generator)
        if target.made is not None:
            quantize_into(places[name], target, 0, tensor)
        elif tensor is not place:
            place.copy_(tensor)
    return _assemble(spec, plan, places, host)


def empty_weights(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, on_host: int = 0, packs: bool | None = None
) -> Weights:
    """Weights that nobody has filled."""
    device = torch.device(device)
    plan = targets(spec, device.type == "cuda" if packs is None else packs)
    return _assemble(spec, plan, *_allocate(plan, device, dtype, spec.num_layers, on_host))


def _allocate(
    plan: dict[str, Target], device: torch.device, dtype: torch.dtype, layers: int, on_host: int
) -> tuple[dict[str, dict[str, torch.Tensor]], HostLayers | None]:
    """Target -> part -> tensor, not filled, those of the last `on_host` layers' projections in the host's memory."""
    try:
        shapes = {name: target.shape for name, target in plan.items()}
        assert not on_host or all(target.packed is None for target in plan.values()), "words stay on the device"
        host = make_host_layers(shapes, device, dtype, layers - on_host) if on_host else None
        places = {
            name: {
                part: torch.empty(shape, dtype=kind, device=device)
                for part, (shape, kind) in target.tensors(dtype).items()
            }
            for name, target in plan.items()
            if host is None or name not in host.stored
        }
        return places | {name: {"weight": tensor} for name, tensor in host.stored.items()} if host else places, host
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        room = f"and about {free / 2**30:.2f} GiB are left"
    except RuntimeError as error:
        if "alloc" not in str(error):
            raise
        room = "more than there is"
    needed = device_bytes(plan, dtype, on_host)
    raise DeviceError(
        f"{device}: the weights need {needed / 2**30:.2f} GiB in {str(dtype).removeprefix('torch.')}, {room}; "
        "choose a smaller model or free memory"
    )


def _assemble(
    spec: ModelSpec, plan: dict[str, Target], places: dict[str, dict[str, torch.Tensor]], host: HostLayers | None
) -> Weights:
    if spec.tie_word_embeddings and "lm_head.weight" in plan:  # the embedding again, in another format
        quantize_into(places["lm_head.weight"], plan["lm_head.weight"], 0, places["embed"]["weight"])

    if host:
        places = places | {name: {"weight": tensor} for name, tensor in host.read.items()}

    def linear(name: str) -> LoadedLinear:
        bias = places.get(f"{name}.bias", {}).get("weight")
        return LoadedLinear(**places[f"{name}.weight"], bias=bias, packed=plan[f"{name}.weight"].packed)

    layers = []
    for i, layer in enumerate(spec.layers):
        tensors = {weight.name: places[f"layers.{i}.{weight.name}"]["weight"] for weight in layer.weights()}
        linears = {each.name: linear(f"layers.{i}.{each.name}") for each in layer.linears()}
        layers.append(tensors | linears)
    embed = places["embed"]["weight"]
    head = linear("lm_head") if "lm_head.weight" in plan else LoadedLinear(embed)
    return Weights(embed, tuple(layers), places["final_norm"]["weight"], head, host)


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


def _harmless(name: str, spec: ModelSpec) -> bool:
    """Tensors that old checkpoints hold and nothing needs: rotary tables, the copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings)


def _check(
    path: Path, tensors: dict[str, TensorInfo], needed: dict[str, Stored], wanted: dict[str, TensorSlice],
    spec: ModelSpec,
) -> None:  # fmt: skip
    """Names, shapes and dtypes of the checkpoint's tensors against what the configuration needs."""
    harmless = {
        name.removesuffix("weight") + suffix
        for name, piece in wanted.items()
        if piece.scheme is not None
        for suffix in piece.scheme.read.harmless
    }
    extra = [name for name in tensors if name not in needed and name not in harmless and not _harmless(name, spec)]
    missing = [name for name in needed if name not in tensors]
    if spec.quantization is None:
        for name in extra:
            if _QUANTIZED.search(name):
                raise CheckpointError(
                    f"{tensors[name].file}: tensor {shown(name)} belongs to a quantized checkpoint, "
                    "but config.json has no quantization_config; restore it, or use the unquantized one"
                )
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        fix = "download the checkpoint again"
        if missing == ["lm_head.weight"]:
            fix = "set tie_word_embeddings to true in config.json if the LM head is the embedding"
        elif missing[0] not in wanted:
            fix = f"quantization_config ({spec.quantization.method}) asks for it: both must belong together"
        raise CheckpointError(f"{path}: tensor {shown(missing[0])} is missing{more}; {fix}")
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensor {shown(extra[0])}{more} has no place in a {spec.family} model of "
            f"{counted(spec.num_layers, 'layer')}; check config.json, or remove it from the file"
        )
    for name, of in needed.items():
        info = tensors[name]
        if _shape(info.shape) != _shape(of.shape):
            raise CheckpointError(
                f"{info.file}: tensor {shown(name)} must have shape {list(of.shape)} by config.json, not "
                f"{list(info.shape)}; check that both belong to the same model"
            )
        if info.dtype not in of.dtypes:
            fix = "check that config.json belongs to it"
            if of.dtypes == FLOATS:
                fix = "use the unquantized checkpoint, or convert it with transformers' save_pretrained"
            raise CheckpointError(
                f"{info.file}: tensor {shown(name)} must be one of {', '.join(of.dtypes)}, got {shown(info.dtype)}; "
                f"{fix}"
            )


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop dimensions of 1 after the first one: scales of rows are written as [n] or [n, 1], one scale as [] or [1]."""
    return (*shape[:1], *(size for size in shape[1:] if size != 1)) or (1,)
