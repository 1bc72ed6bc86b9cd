"""Device and dtype of a model."""

from dataclasses import replace

import torch

from ..blocks.spec import ModelSpec
from ..checkpoint.quantization.quantize import rules
from ..errors import DeviceError, ParameterError, conflict, counted
from ..options import EngineOptions


def find_device(options: EngineOptions) -> torch.device:
    """Return the device that options request, if it is usable. Raises DeviceError."""
    kind, _, index = options.device.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= count:
        usable = f"{counted(count, 'CUDA GPU')} {'is' if count == 1 else 'are'} usable here"
        raise DeviceError(f'device {options.device} was requested, but {usable}; use device="cpu"')
    if kind == "auto":
        gpu = count > 0 and options.backend != "torch"
        # A GPU that is too old is not used, unless options request a backend that needs a GPU.
        gpu = gpu and (options.backend == "triton" or torch.cuda.get_device_capability(0) >= (8, 0))
        kind = "cuda" if gpu else "cpu"
    device = torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")
    if options.backend == "triton" and kind != "cuda":
        raise DeviceError('backend triton needs an NVIDIA GPU, but no GPU is used; use backend="torch"')
    if kind == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise DeviceError(f'{device} has a compute capability below 8.0, which is not supported; use device="cpu"')
    return device


def quantized(options: EngineOptions, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the quantization that options request for weights and K/V, and the dtype of the state.

    Weights are quantized while they are loaded. The LM head is quantized to fp8 by default. K/V are quantized while
    they are written. Raises ParameterError.
    """
    if options.state_dtype == "float16":
        if not spec.recurrent:
            raise conflict("state_dtype", ": the model has no recurrent state; leave it out")
        spec = replace(spec, fp16_state=True)
    if options.kv_dtype == "fp8":
        spec = replace(spec, fp8_kv=True)
    if options.quantize is None:
        return spec
    if (stored := spec.checkpoint_quantization) is not None:
        why = f" {options.quantize}: the checkpoint is quantized already ({stored.name})"
        raise conflict("quantize", why)
    return replace(spec, load_quantization=rules(options.quantize, options.quantize_head or "fp8"))


def resolve_dtype(dtype: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the dtype of activations and of unquantized weights.

    On a GPU it is bfloat16 if weights or K/V are quantized. Raises ParameterError.
    """
    if (spec.quantization or spec.fp8_kv) and device.type == "cuda":
        if dtype not in ("auto", "bfloat16"):
            what = "quantized weights" if spec.quantization else "kv_dtype fp8"
            message = f"dtype must be bfloat16 on a GPU with {what}, got {dtype}"
            raise ParameterError(message, "dtype", "conflict")
        return torch.bfloat16
    if dtype == "auto" and device.type == "cpu":
        return torch.float32
    if dtype == "auto":
        dtype = "bfloat16" if spec.dtype == "float32" else spec.dtype
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved
