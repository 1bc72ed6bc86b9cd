"""`tridecode precompile`: compile the kernels of an engine in advance, also on a machine without its GPU."""

import time

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ..checkpoint.hub import resolve_model
from ..checkpoint.load import empty_weights, load_config
from ..engine import model_of
from ..errors import DeviceError, conflict
from ..kernels.device import GPUS, Device, device_of, simulated
from ..options import EngineOptions
from ..plan.resolve import EnginePlan, resolve
from ..step.compiler import OfflineDriver
from ..step.compiling import Kernel, compile_kernels
from ..step.reachable import reachable_kernels
from .options import engine_options
from .terminal import Output, counted

META = torch.device("meta")


def precompile(args, output: Output) -> int:
    """Run `tridecode precompile`: compile the kernels of a model for a GPU that need not be present."""
    options = EngineOptions(**engine_options(args))
    for name in ("kv_offload", "weights_offload"):
        if getattr(options, name) is not None:
            raise conflict(name, " is not planned for a GPU that is not used; leave it out of precompile")
    gpu, started = gpu_of(args.gpu), time.perf_counter()
    spec = load_config(resolve_model(args.model, weights=False))
    with simulated(gpu):
        driver.set_active(OfflineDriver(GPUTarget("cuda", gpu.capability, 32)))
        plan = resolve(options, spec, torch.device("cuda"))
        plan.check()
        kernels = planned_kernels(plan)
        with output.loading() as progress:
            compiled = compile_kernels(kernels, META, progress.kernels)
    seconds = time.perf_counter() - started
    output.note(
        f"compiled {counted(compiled, 'kernel')} in {seconds:,.0f} s for {gpu.name}; the engine needs "
        f"{len(kernels):,}, which are in {knobs.cache.dir}"
    )
    return 0


def gpu_of(name: str | None) -> Device:
    """Return the GPU of GPUS with this name, by default the one of this machine."""
    if name is not None:
        return GPUS[name]
    gpu = device_of(torch.device("cuda"))
    if not gpu.capability:
        raise DeviceError(f"this machine has no GPU that PyTorch can use; name one by --gpu: {', '.join(GPUS)}")
    return gpu


def planned_kernels(plan: EnginePlan) -> list[Kernel]:
    """Return the kernels that an engine compiles at load, without its weights.

    The plan is for a simulated GPU, and Triton's driver is an OfflineDriver.
    """
    if not plan.graphs.captured:
        raise conflict("backend", f" {plan.backend} compiles no kernels")
    weights = empty_weights(plan.spec, META, plan.dtype, packs=True)
    return reachable_kernels(model_of(plan, weights), plan.graphs.sizes, plan.graphs.prompt_attention)
