"""`info --kernels`: the kernel and launch config of each linear of a model."""

import torch

from ...blocks.spec import ModelSpec
from ...checkpoint.load import empty_weights
from ...kernels.device import Device
from ...step.model import choose_configs, linear_cases
from ...tuning.report import KernelRow, kernel_rows


def kernel_choices(spec: ModelSpec, dtype: torch.dtype, gpu: Device, batch_invariant: bool = False) -> list[KernelRow]:
    """Return the choices for a model on a GPU. No memory is allocated for the weights."""
    weights = empty_weights(spec, "meta", dtype, packs=True)
    configs = choose_configs(spec, weights, gpu, batch_invariant, user_table=True)
    return kernel_rows(linear_cases(spec, weights), configs)
