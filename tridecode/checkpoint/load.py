"""Loads checkpoints, safetensors or GGUF files, into fused weights on the device.

The headers of the files are checked before memory is allocated. Then each tensor is copied to the device in small
pieces, so that neither the host nor the device stores a second copy of the weights. Files are read instead of mapped.
If a file becomes shorter during the load, or if the disk fails, the loader therefore raises an error instead of
receiving a signal.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..arguments import shown
from ..blocks.host_layers import HostLayers, make_host_layers
from ..blocks.spec import ModelSpec
from ..blocks.weights import LayerWeights, Weights
from ..errors import CheckpointError, DeviceError, brief, counted
from ..kernels.linear.packed import Packed, QuantizedWeight, own_zero
from ..kernels.linear.weight import LoadedLinear
from ..models.files import open_regular, present, unique, unreadable
from .config import read_config
from .contents import adapter, advice
from .gguf.schemes import with_block_types
from .gguf.tensors import check_type, gguf_tensors
from .hub import INDEX, SINGLE, shard_map, weights_present
from .loader import Loader, quantize_into
from .quantization.scheme import Scheme, Stored
from .slices import Target, TensorSlice, device_bytes, stored, targets, tensor_slices, tied_head_scheme
from .tensor_info import DTYPE_BYTES, FLOATS, TensorInfo
from .tied import HEAD_TENSOR, follow_files

log = logging.getLogger("tridecode")
_HEADER_LIMIT = 100_000_000  # Maximum bytes of a header, as in safetensors.
# Maximum number of dimensions of a tensor. A header of 100 MB could list millions, whose product takes minutes.
_MAX_DIMENSIONS = 8
_COPY_BYTES = 64 * 2**20  # Maximum bytes that are copied to the device at once.
_KV_SCALE = re.compile(r"\.self_attn\.([qkv]_proj\.)?[qkv]_scale$")  # Calibrated scales of 8-bit K/V, which are unused.
_QUANTIZED = re.compile(r"\.(qweight|qzeros|g_idx|weight_scale(_inv)?|scales|absmax|quant_map|weight_packed)(\.|$)")


def load_config(path: Path) -> ModelSpec:
    """Return the specification of the checkpoint `path`, a directory or a GGUF file. Raises CheckpointError.

    Weights that are present determine a dtype that config.json lacks, and whether the LM head is tied.
    """
    path = Path(path)
    spec, values = read_config(path)
    has_dtype = values.get("dtype") is not None or values.get("torch_dtype") is not None
    if spec.tie_word_embeddings or not has_dtype or spec.has_experts:
        try:
            tensors = _with_prefix(_tensors(path), spec) if weights_present(path) else {}
        except CheckpointError:  # `load_weights` reports it.
            tensors = {}
        spec = follow_files(spec, tensors)
        embed = tensors.get(spec.embed.tensor)
        if not has_dtype and embed is not None and embed.dtype in FLOATS:
            spec = replace(spec, dtype=str(FLOATS[embed.dtype]).removeprefix("torch."))
    if path.is_file():
        spec = with_block_types(path, spec)
    if spec.has_experts and spec.checkpoint_quantization:
        spec = spec.quantized_as(spec.checkpoint_quantization.scheme)
    for name, tensor_slice in tensor_slices(spec).items():
        if tensor_slice.scheme and (problem := _problem(tensor_slice, tensor_slice.scheme)):
            raise CheckpointError(f"{path / 'config.json'}: quantization_config: {name}: {problem}")
    return spec


def _problem(tensor_slice: TensorSlice, scheme: Scheme) -> str:
    """Return why the loader cannot read a quantized slice, with a fix; "" if it can."""
    columns, rows = tensor_slice.shape[-1], scheme.rows
    if scheme.rows <= 1 and scheme.group and columns % scheme.group:
        of = counted(columns, "column")
        return f"groups of {scheme.group} do not divide its {of}; check that both belong together"
    if tensor_slice.stacked:
        return (
            "a quantized tensor that contains all experts is not supported; "
            "use the unquantized checkpoint, or one with a tensor for each expert"
        )
    if rows > 1 and any(length % rows for length in tensor_slice.groups):
        lengths = ", ".join(str(length) for length in dict.fromkeys(tensor_slice.groups))
        return f"blocks of {rows} rows do not divide its runs of {lengths} rows; use the unquantized checkpoint"
    return ""


def load_weights(
    path: Path,
    spec: ModelSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
    on_host: int = 0,
    packs: bool | None = None,
) -> Weights:
    """Load the checkpoint `path`, a directory or a GGUF file, onto the device.

    Args:
        dtype: dtype of the tensors, except packed tensors.
        progress: called as progress(done, total), with bytes of the files.
        on_host: how many of the last layers have their linears in host memory. Packed tensors cannot be there.
        packs: whether quantized weights become packed tensors. Otherwise they are dequantized. By default true on a
            GPU.

    Raises:
        CheckpointError: a tensor is wrong, missing, unexpected or misshapen. This is checked before memory is
            allocated.
        DeviceError: the device has too little memory.
    """
    path, device = Path(path), torch.device(device)
    packs = device.type == "cuda" if packs is None else packs
    tensors, slices = stored_tensors(path, spec), tensor_slices(spec)
    if spec.skipped:
        names = _tensors(path)
        skipped = [f"{prefix}*" for prefix in spec.skipped if any(name.startswith(prefix) for name in names)]
        if skipped:
            log.info("%s: tensors that are not used: %s", path, ", ".join(skipped))
    if lora := adapter(path):
        log.warning("%s: also holds %s, which is not used without --adapter NAME=%s", path, lora, path)
    total = sum(info.nbytes for info in tensors.values())

    def scale_dtype(name: str) -> torch.dtype:
        parts = (part for part in stored(name, slices[name]) if "scale" in part.rpartition(".")[2])
        return FLOATS[tensors[scale].dtype] if (scale := next(parts, None)) else torch.float16

    plan = targets(spec, packs, scale_dtype)
    # A dtype conversion makes a second copy of a tensor slice, which must be small compared to the weights.
    limit = min(_COPY_BYTES, max(total // 64, 2**16))
    with ExitStack() as opened:
        places, host = _allocate(plan, device, dtype, spec.num_layers, on_host)
        loader = Loader(tensors, plan, places, limit, opened)
        done = 0
        first = {name: tensors[next(iter(stored(name, of)))] for name, of in slices.items()}
        # Read the tensors in the order of the files.
        for name in sorted(slices, key=lambda name: (first[name].file, first[name].begin)):
            for count in loader.place(name, slices[name]):
                done += count
                if progress is not None:
                    progress(done, total)
        if HEAD_TENSOR in plan and (scheme := tied_head_scheme(spec)):
            tensors[HEAD_TENSOR] = tensors[spec.embed.tensor]
            for _ in loader.place(HEAD_TENSOR, TensorSlice(HEAD_TENSOR, 0, spec.embed.shape, scheme)):
                pass
    return _assemble(spec, plan, places, host)


def stored_tensors(path: Path, spec: ModelSpec) -> dict[str, TensorInfo]:
    """Return each tensor of the checkpoint that the model needs.

    Raises:
        CheckpointError: a tensor is wrong, missing, unexpected or misshapen.
    """
    infos = read_tensor_infos(path, spec)
    for file in {info.file for info in infos.values()} if path.is_dir() else ():
        _check_with_safetensors(file)
    return infos


def read_tensor_infos(path: Path, spec: ModelSpec) -> dict[str, TensorInfo]:
    """Return the tensors as `stored_tensors` does, but check only headers, and biases of zeros."""
    return read_infos(path, spec, _with_prefix(_tensors(path), spec))


def read_infos(path: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return those of a checkpoint's tensors that the model needs. Raises CheckpointError."""
    slices = tensor_slices(spec)
    needed = {name: of for key in slices for name, of in stored(key, slices[key]).items()}
    _check(path, tensors, needed, slices, spec)
    # The matrices of a stacked tensor follow each other in memory, so it is read as one matrix.
    flat = {name: of.shape for name, of in slices.items() if of.stacked}
    infos = {name: tensors[name] for name in needed}
    return infos | {name: replace(infos[name], shape=shape) for name, shape in flat.items()}


def _check_with_safetensors(file: Path) -> None:
    """Check a file with the safetensors library, which checks more than `read_header`. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{file}: cannot be read ({brief(error)}); download the file again") from None
    except OSError as error:
        raise unreadable(file, error) from None
    except (MemoryError, RuntimeError) as error:  # The library maps the whole file.
        reason = f"cannot be mapped into memory ({brief(error)})"
        raise CheckpointError(f"{file}: {reason}; raise the limit of virtual memory (ulimit -v)") from None


@torch.no_grad()
def random_weights(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, seed: int = 0, on_host: int = 0,
    packs: bool | None = None,
) -> Weights:  # fmt: skip
    """Return random weights, generated on the device. With them, activations have a magnitude of about 1.

    They are for benchmarks and tests. A seed gives the same weights only on devices of the same kind. `load_weights`
    describes on_host and packs.
    """
    device = torch.device(device)
    plan = targets(spec, device.type == "cuda" if packs is None else packs)
    places, host = _allocate(plan, device, dtype, spec.num_layers, on_host)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, target in plan.items():
        if name == HEAD_TENSOR and spec.tie_word_embeddings and target.load_scheme is not None:
            continue  # The code below copies this weight from the embedding.
        # 2 * num_layers linears add to the residual stream, so their weights are smaller.
        std = (target.shape[-1] * (2 * spec.num_layers if target.residual else 1)) ** -0.5
        if name == "embed" and spec.has_experts and not spec.tie_word_embeddings:
            std = 1.0  # The residual streams of the tokens of a prompt differ, so they choose different experts.
        if target.packed is not None and target.load_scheme is None:
            n, step = target.shape[0], max(2**24 // target.shape[1], 1)
            for first in range(0, n, step):
                rows = _random_rows(target.packed, min(step, n - first), std, generator)
                target.packed.pack(places[name], first, rows)
            continue
        tensor = place = places[name]["weight"]
        if target.load_scheme is not None or place.device.type != device.type:
            tensor = torch.empty(target.shape, dtype=dtype, device=device)
        if tensor.ndim == 2:
            tensor.normal_(0.0, std, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.02, generator=generator)
        else:
            tensor.normal_(1.0, 0.1, generator=generator)
        if target.load_scheme is not None:
            quantize_into(places[name], target, 0, tensor)
        elif tensor is not place:
            place.copy_(tensor)
    return _assemble(spec, plan, places, host)


def _random_rows(packed: Packed, n: int, std: float, generator: torch.Generator) -> QuantizedWeight:
    """Return n random rows of integer codes. Their values have the standard deviation `std` and a mean near 0."""
    size, device = 2**packed.bits, generator.device
    step = std * 12**0.5 / size  # The standard deviation of the codes is size / sqrt(12).
    factor = 1.0 if packed.over_group else step
    scale = torch.full((n, -(-packed.k // packed.group)), factor, device=device)
    over = torch.full(packed.shapes(n)["over"][0], step, device=device) if packed.over_group else None
    low = size // 2 - own_zero(packed.bits, packed.minimums)
    return QuantizedWeight(
        torch.randint(size, (n, packed.k), dtype=torch.uint8, device=device, generator=generator),
        scale, 1, packed.group, packed.bits, over=over, over_group=packed.over_group,
        minimum=torch.full(packed.shapes(n)["minimum"][0], low * factor, device=device) if packed.minimums else None,
    )  # fmt: skip


def empty_weights(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, on_host: int = 0, packs: bool | None = None
) -> Weights:
    """Return uninitialized weights."""
    device = torch.device(device)
    plan = targets(spec, device.type == "cuda" if packs is None else packs)
    return _assemble(spec, plan, *_allocate(plan, device, dtype, spec.num_layers, on_host))


def _allocate(
    plan: dict[str, Target], device: torch.device, dtype: torch.dtype, layers: int, on_host: int
) -> tuple[dict[str, dict[str, torch.Tensor]], HostLayers | None]:
    """Allocate the tensors: target -> part -> tensor. The linears of the last `on_host` layers are in host memory."""
    try:
        shapes = {name: target.shape for name, target in plan.items()}
        assert not on_host or all(target.packed is None for target in plan.values()), "a tensor on the host is packed"
        host = make_host_layers(shapes, device, dtype, layers - on_host) if on_host else None
        places = {
            name: {
                part: _empty(shape, part_dtype, device, target.transposed)
                for part, (shape, part_dtype) in target.tensors(dtype).items()
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
        room = "more than is available"
    needed = device_bytes(plan, dtype, on_host)
    raise DeviceError(
        f"{device}: the weights need {needed / 2**30:.2f} GiB in {str(dtype).removeprefix('torch.')}, {room}; "
        "choose a smaller model or free memory"
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, transposed: bool) -> torch.Tensor:
    """Return an uninitialized tensor. If transposed, its first axis is contiguous in memory."""
    if transposed:
        return torch.empty(*shape[1:], shape[0], dtype=dtype, device=device).movedim(-1, 0)
    return torch.empty(shape, dtype=dtype, device=device)


def _assemble(
    spec: ModelSpec, plan: dict[str, Target], places: dict[str, dict[str, torch.Tensor]], host: HostLayers | None
) -> Weights:
    """Build the model's weights from the loaded tensors."""
    # The LM head is a quantized copy of the embedding.
    if spec.tie_word_embeddings and HEAD_TENSOR in plan and plan[HEAD_TENSOR].load_scheme:
        quantize_into(places[HEAD_TENSOR], plan[HEAD_TENSOR], 0, places["embed"]["weight"])

    if host:
        places = places | {name: {"weight": tensor} for name, tensor in host.read.items()}

    def linear(name: str) -> LoadedLinear:
        bias = places.get(f"{name}.bias", {}).get("weight")
        return LoadedLinear(**places[f"{name}.weight"], bias=bias, packed=plan[f"{name}.weight"].packed)

    layers = []
    for i, layer in enumerate(spec.layers):
        tensors = {weight.name: places[f"layers.{i}.{weight.name}"]["weight"] for weight in layer.weights()}
        linears = {each.name: linear(f"layers.{i}.{each.name}") for each in layer.linears()}
        layers.append(LayerWeights(linears, tensors))
    embed = places["embed"]["weight"]
    head = linear("lm_head") if "lm_head.weight" in plan else LoadedLinear(embed)
    return Weights(embed, tuple(layers), places["final_norm"]["weight"], head, host)


def _with_prefix(tensors: dict[str, TensorInfo], spec: ModelSpec) -> dict[str, TensorInfo]:
    """Return the tensors with the prefix "model." that a checkpoint of a model without LM head lacks."""
    embed, base = spec.embed.tensor, "model."
    if embed in tensors or embed.removeprefix(base) not in tensors:
        return tensors
    return {name if name.startswith((base, "lm_head.")) else base + name: info for name, info in tensors.items()}


def _tensors(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint in `path`, read from the headers of its files."""
    if path.is_file():
        return gguf_tensors(path)
    if present(path / SINGLE):
        return read_header(path / SINGLE)
    index = path / INDEX
    if not present(index):
        fix = advice(path, "give the directory of a whole checkpoint")
        raise CheckpointError(f"{path}: no {SINGLE} and no {INDEX}; {fix}")
    weight_map = shard_map(index)
    infos: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if not present(path / shard):
            raise CheckpointError(f"{index}: names {shard}, which is not in {path}; download the checkpoint again")
        for name, info in read_header(path / shard).items():
            if name in infos:
                raise CheckpointError(
                    f"{path / shard}: tensor {shown(name)} is also in {infos[name].file.name}; remove one of the two"
                )
            infos[name] = info
    for name, shard in weight_map.items():
        if name not in infos or infos[name].file.name != shard:
            raise CheckpointError(
                f"{path / shard}: tensor {shown(name)}, which {INDEX} lists, is missing; download it again"
            )
    return infos


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the entries of a safetensors file, after checking their sizes against the file. Raises CheckpointError.

    Format: u64 little-endian n, n bytes of JSON {name: {dtype, shape, data_offsets}}, data.
    """

    def broken(reason: str) -> CheckpointError:
        return CheckpointError(f"{file}: {reason}; download the file again")

    def duplicate(name: str) -> CheckpointError:
        return broken(f"its header gives the name {shown(name)} twice")

    try:
        with open_regular(file) as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise broken(f"truncated, or not a safetensors file: {size:,} bytes cannot hold a header of {length:,}")
            header = json.loads(opened.read(length), object_pairs_hook=unique(duplicate))
    except OSError as error:
        raise unreadable(file, error) from None
    except (ValueError, RecursionError):
        raise broken("its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise broken("its header is not a JSON object")
    header.pop("__metadata__", None)
    infos = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, end)
            valid = isinstance(dtype, str) and len(shape) <= _MAX_DIMENSIONS and begin <= end
            valid = valid and {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 2**63
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise broken(f"the header's entry of tensor {shown(name)} is malformed")
        if 8 + length + end > size:
            raise broken(f"truncated: tensor {shown(name)} ends at byte {8 + length + end:,} of a file of {size:,}")
        if dtype in DTYPE_BYTES and math.prod(shape) * DTYPE_BYTES[dtype] != end - begin:
            raise broken(f"tensor {shown(name)}, {dtype} of shape {list(shape)}, does not take {end - begin:,} bytes")
        infos[name] = TensorInfo(file, dtype, shape, 8 + length + begin)
    return infos


def _is_ignorable(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor may be ignored, such as rotary tables and copies of a tied embedding in old checkpoints.

    Parts of a model that the engine does not use are ignored too.
    """
    if name.removeprefix("model.").startswith(spec.skipped) or name.startswith(spec.skipped):
        return True
    if spec.checkpoint_quantization and _KV_SCALE.search(name):
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings)


def _is_zero_bias(name: str, info: TensorInfo, slices: dict[str, TensorSlice]) -> bool:
    """Return whether a tensor is a bias of only zeros of a quantized weight. AutoGPTQ writes one for each linear."""
    weight = slices.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
    if weight is None or weight.scheme is None or info.dtype not in FLOATS or info.shape != weight.shape[:1]:
        return False
    with ExitStack() as opened:
        return not Loader({name: info}, {}, {}, 0, opened).read(name, 0, None).any()


def _check(
    path: Path, tensors: Mapping[str, TensorInfo], needed: dict[str, Stored], slices: dict[str, TensorSlice],
    spec: ModelSpec,
) -> None:  # fmt: skip
    """Check the names, shapes and dtypes of a checkpoint's tensors. Raises CheckpointError.

    Args:
        tensors: the tensors of the checkpoint.
        needed: the tensors that the model needs, by their names in the checkpoint.
        slices: the slices, by the names of the unquantized tensors.
    """
    unused = {
        name.removesuffix("weight") + suffix
        for name, tensor_slice in slices.items()
        if tensor_slice.scheme is not None
        for suffix in tensor_slice.scheme.unused
    }
    extra = [name for name in tensors if name not in needed and name not in unused and not _is_ignorable(name, spec)]
    extra = [name for name in extra if not _is_zero_bias(name, tensors[name], slices)]
    missing = [name for name in needed if name not in tensors]
    if spec.checkpoint_quantization is None:
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
        elif missing[0] not in slices and spec.checkpoint_quantization:
            fix = f"quantization_config ({spec.checkpoint_quantization.name}) requires it; both must belong together"
        raise CheckpointError(f"{path}: tensor {shown(missing[0])} is missing{more}; {fix}")
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        layers = counted(spec.num_layers, "layer")
        experts = {linear.experts - linear.always for linear in spec.linears() if linear.experts}
        size = f"{layers} and {counted(max(experts), 'expert')}" if experts else layers
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensor {shown(extra[0])}{more} does not belong to a {spec.family} model of "
            f"{size}; check config.json, or remove it from the file"
        )
    gguf = path.is_file()
    for name, of in needed.items():
        info = tensors[name]
        stacked = name in slices and slices[name].stacked
        if stacked and info.shape != of.shape and info.shape == (of.shape[0], *of.shape[:0:-1]):
            raise CheckpointError(
                f"{info.file}: the matrices of tensor {shown(name)} are transposed ({list(info.shape)} instead of "
                f"{list(of.shape)}), which is not supported; convert it with transformers' save_pretrained"
            )
        if _shape(info.shape) != _shape(of.shape):
            raise CheckpointError(
                f"{info.file}: tensor {shown(name)} must have shape {list(of.shape)} by config.json, not "
                f"{list(info.shape)}; check that both belong to the same model"
            )
        if gguf:
            check_type(info, len(of.shape))
        elif info.dtype not in of.dtypes:
            fix = "check that config.json belongs to it"
            if of.dtypes == tuple(FLOATS):
                fix = "use the unquantized checkpoint, or convert it with transformers' save_pretrained"
            raise CheckpointError(
                f"{info.file}: tensor {shown(name)} must be one of {', '.join(of.dtypes)}, got {shown(info.dtype)}; "
                f"{fix}"
            )


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop dimensions of size 1, except the first dimension.

    Checkpoints store scales of rows as [n] or [n, 1], and one scale as [] or [1].
    """
    return (*shape[:1], *(size for size in shape[1:] if size != 1)) or (1,)
