"""Tensor slices: the parts of a checkpoint that a model needs, and the device tensors that they fill."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..blocks.declarations import Linear, Weight
from ..blocks.host_layers import LAYER_BUFFERS, layer_sizes
from ..blocks.spec import ModelSpec
from ..kernels.linear.packed import Packed
from .quantization.quantize import fitted
from .quantization.scheme import Scheme, Stored
from .tensor_info import FLOATS


class TensorSlice(NamedTuple):
    """Destination of a checkpoint tensor: rows `start` to `start + shape[0]` of the device tensor `target`.

    Args:
        scheme: the scheme of the weight in the checkpoint, or None.
        scale: factor that the loader multiplies in.
        offset: number that the loader adds before that.
        stacked: number of matrices in the checkpoint tensor, which then has three dimensions; 0 for two dimensions.
        groups: lengths of runs of rows, as in Part.
    """

    target: str
    start: int
    shape: tuple[int, ...]
    scheme: Scheme | None = None
    scale: float = 1.0
    offset: float = 0.0
    stacked: int = 0
    groups: tuple[int, ...] = ()

    def runs(self, first: int = 0, count: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of `count` rows from row `first` of the checkpoint on, by default of all; see `runs`."""
        return runs(self.groups, self.start, self.shape[0], first, count)


def runs(
    groups: tuple[int, ...], start: int, rows: int, first: int = 0, count: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yield (row in the checkpoint, row on the device, number of rows) of each run of rows that stay neighbors.

    Args:
        groups: lengths of runs of rows, as in Part.
        start: first row on the device.
        rows: number of rows of the module.
        first, count: the rows of the checkpoint to yield. By default all rows.
    """
    end = rows if count is None else first + count
    if not groups:
        yield first, start + first, end - first
        return
    size = sum(groups)
    number = rows // size
    for group in range(first // size, -(-end // size)):
        row, target = group * size, start
        for length in groups:
            begin, stop = max(row, first), min(row + length, end)
            if begin < stop:
                yield begin, target + group * length + begin - row, stop - begin
            row, target = row + length, target + number * length


@dataclass(frozen=True)
class Target:
    """A tensor or packed tensor on the device.

    Args:
        shape: shape of the tensor, or of the weight.
        packed: the description of the packed tensor. None: the tensor is dense.
        load_scheme: the scheme in which the loader quantizes the weight, or None.
        residual: a linear adds its product to the residual stream.
        dtype: dtype of a dense tensor, None for that of the model's weights.
        transposed: the first axis of a dense tensor is contiguous in memory.
    """

    shape: tuple[int, ...]
    packed: Packed | None = None
    load_scheme: Scheme | None = None
    residual: bool = False
    dtype: torch.dtype | None = None
    transposed: bool = False

    def tensors(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each part by name. A dense tensor has the single part "weight"."""
        return (
            {"weight": (self.shape, self.dtype or dtype)} if self.packed is None else self.packed.shapes(self.shape[0])
        )


def declared(spec: ModelSpec) -> Iterator[tuple[str, str, Linear | Weight]]:
    """Yield (target, prefix of its names in the checkpoint, declaration) of every tensor, in the order of a pass."""
    yield "embed", "", spec.embed
    for i, layer in enumerate(spec.layers):
        for each in layer.declarations():
            yield f"layers.{i}.{each.name}", spec.layer_prefix(i), each
    yield "final_norm", "", spec.final_norm
    yield "lm_head", "", spec.lm_head


def linear_modules(spec: ModelSpec) -> set[str]:
    """Return the modules of the checkpoint that linears consist of."""
    linears = ((prefix, each) for _, prefix, each in declared(spec) if isinstance(each, Linear))
    return {prefix + part.module for prefix, linear in linears for part in linear.parts}


def tensor_slices(spec: ModelSpec) -> dict[str, TensorSlice]:
    """Return every tensor slice of an unquantized checkpoint by its name in the checkpoint.

    Targets are named as in Weights.
    """
    slices = {}
    for target, prefix, each in declared(spec):
        if isinstance(each, Weight):
            slices[prefix + each.tensor] = TensorSlice(
                target, 0, each.shape, None, each.scale, each.offset, groups=each.groups
            )
            continue
        start = 0
        for part in each.parts:
            module, shape = prefix + part.module, (part.rows, each.k)
            scheme = spec.checkpoint_quantization.scheme(module) if spec.checkpoint_quantization else None
            slices[prefix + part.tensor] = TensorSlice(
                f"{target}.weight", start, shape, scheme, each.scale, stacked=part.stacked, groups=part.groups
            )
            if each.bias:
                slices[f"{module}.bias"] = TensorSlice(f"{target}.bias", start, (part.rows,), scale=each.scale)
            start += part.rows
    return slices


def stored(name: str, tensor_slice: TensorSlice) -> dict[str, Stored]:
    """Return the checkpoint tensors that store a slice, by name. The largest comes first."""
    if tensor_slice.scheme is None:
        shape, stacked = tensor_slice.shape, tensor_slice.stacked
        return {name: Stored((stacked, shape[0] // stacked, shape[1]) if stacked else shape, tuple(FLOATS))}
    module = name.removesuffix("weight")
    return {module + suffix: tensor for suffix, tensor in tensor_slice.scheme.tensors(*tensor_slice.shape).items()}


def targets(spec: ModelSpec, packs: bool, scale_dtype: Callable[[str], torch.dtype] | None = None) -> dict[str, Target]:
    """Return all tensors on the device, by name.

    Args:
        packs: a quantized weight becomes a packed tensor if all its slices have one scheme, or schemes with a common
            packed tensor. All other quantized weights are dequantized.
        scale_dtype: returns the dtype of a slice's scales, by the slice's name in the checkpoint.
    """
    known = tensor_slices(spec)
    members: dict[str, list[str]] = {}
    for name, of in known.items():
        members.setdefault(of.target, []).append(name)
    targets = {}
    for target, prefix, each in declared(spec):
        if isinstance(each, Weight):
            dtype = torch.float32 if each.dtype == "float32" else None
            targets[target] = Target(each.shape, dtype=dtype, transposed=each.transposed)
            continue
        residual = each.epilogue == "residual"
        if each.parts:
            names = members[f"{target}.weight"]
            targets[f"{target}.weight"] = _weight_target(spec, each, names, known, packs, scale_dtype, residual)
        elif packs and (scheme := tied_head_scheme(spec)):
            targets[f"{target}.weight"] = Target((each.n, each.k), scheme.packed(each.k, [0], _scale_dtype(scheme)))
        elif _load_scheme(spec, prefix + target):  # The LM head is a quantized copy of the embedding.
            targets[f"{target}.weight"] = _loaded_target(spec, prefix + target, (each.n, each.k), [], packs, residual)
        if each.bias:
            targets[f"{target}.bias"] = Target((each.n,))
    return targets


def _weight_target(
    spec: ModelSpec, linear: Linear, names: list[str], known: dict[str, TensorSlice], packs: bool,
    scale_dtype: Callable[[str], torch.dtype] | None, residual: bool,
) -> Target:  # fmt: skip
    """Return the target of a weight whose slices are `names`."""
    own = [known[name] for name in names]
    shape, schemes = (linear.n, linear.k), {of.scheme for of in own}
    if schemes == {None}:
        return _loaded_target(spec, names[0].removesuffix(".weight"), shape, own, packs, residual)
    scheme = own[0].scheme
    if scheme is None or None in schemes or not packs:
        return Target(shape, residual=residual)
    if len(schemes) > 1:
        return Target(shape, scheme.common({each for each in schemes if each}, linear.k), residual=residual)
    dtypes = {scale_dtype(name) for name in names} if scale_dtype else {_scale_dtype(scheme)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return Target(shape, scheme.packed(linear.k, _starts(own), dtype), residual=residual)


def _starts(slices: list[TensorSlice]) -> list[int]:
    """Return the rows of the target at which runs of rows begin."""
    return [start for of in slices for _, start, _ in of.runs()]


def _loaded_target(
    spec: ModelSpec, module: str, shape: tuple[int, int], slices: list[TensorSlice], packs: bool, residual: bool
) -> Target:
    """Return the target of a weight that is not quantized in the checkpoint; the loader may quantize it."""
    scheme = _load_scheme(spec, module)
    if scheme is None:
        return Target(shape, residual=residual)
    scheme = fitted(scheme, shape[1])
    packed = scheme.packed(shape[1], _starts(slices), _scale_dtype(scheme)) if packs else None
    return Target(shape, packed, scheme, residual)


def tied_head_scheme(spec: ModelSpec) -> Scheme | None:
    """Return the scheme of a tied LM head that is a packed copy of the embedding in the checkpoint, or None."""
    stored = spec.checkpoint_quantization
    return stored.scheme("lm_head") if spec.tie_word_embeddings and stored and stored.packs_tied_head else None


def _load_scheme(spec: ModelSpec, module: str) -> Scheme | None:
    """Return the scheme in which the loader quantizes a module."""
    return None if spec.load_quantization is None else spec.load_quantization.scheme(module)


def _scale_dtype(scheme: Scheme) -> torch.dtype:
    """Return the dtype of scales that the loader computes."""
    return torch.float32 if scheme.floating else torch.bfloat16


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of parameters; a tied LM head counts once."""
    return sum(math.prod(of.shape) for of in tensor_slices(spec).values())


@lru_cache(maxsize=8)  # A plan needs the same number several times.
def weight_bytes(spec: ModelSpec, dtype: torch.dtype, packs: bool = False, on_host: int = 0) -> int:
    """Return the bytes of the weights on the device. Weights that are not packed have the dtype `dtype`.

    Args:
        on_host: how many of the last layers have their linears in host memory.
    """
    return device_bytes(targets(spec, packs), dtype, on_host)


def host_layer_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of host memory for one layer. Every layer gets the size of the largest one."""
    return max(_layer_sizes(targets(spec, packs=False), dtype))


def device_bytes(device_targets: dict[str, Target], dtype: torch.dtype, on_host: int) -> int:
    """Return the bytes on the device, with the linears of the last `on_host` layers in host memory."""
    parts = [part for target in device_targets.values() for part in target.tensors(dtype).values()]
    total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
    if not on_host:
        return total
    sizes = _layer_sizes(device_targets, dtype)[-on_host:]
    return total - sum(sizes) + LAYER_BUFFERS * max(sizes)


def _layer_sizes(device_targets: dict[str, Target], dtype: torch.dtype) -> list[int]:
    """Return the bytes of the linears of each layer."""
    return layer_sizes({name: target.shape for name, target in device_targets.items()}, dtype)
