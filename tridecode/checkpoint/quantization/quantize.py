"""Quantization of weights.

Codes are rounded to nearest. Each scale is the candidate with the smallest squared error.
"""

from dataclasses import replace

import torch

from ...kernels.linear.packed import QuantizedWeight
from .compressed_tensors import FloatScheme, IntegerScheme
from .scheme import Quantization, Scheme

GROUP = 128
# Fractions of the largest magnitude that are tried as the range of the codes.
CLIPS = tuple(1 - step / 20 for step in range(1, 9))
HIGHEST = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0}
SCHEMES = {
    "fp8": FloatScheme(8, floating=True),
    "int8": IntegerScheme(8, group=GROUP),
    "int4": IntegerScheme(4, group=GROUP),
}
HEADS = ("keep", *SCHEMES)


def rules(scheme: str, head: str) -> Quantization:
    """Return the rules of `--quantize`.

    Args:
        scheme: name in SCHEMES, for all linears except the LM head.
        head: name in HEADS, for the LM head.
    """
    return Quantization(scheme, (("^lm_head$", SCHEMES.get(head)), ("", SCHEMES[scheme])))


def fitted(scheme: Scheme, k: int) -> Scheme:
    """Return the scheme for rows of k columns, with the largest group size that divides k, or one group."""
    if not scheme.group or k % scheme.group == 0:
        return scheme
    return replace(scheme, group=next((group for group in (64, 32) if k % group == 0), 0))


def quantize(weight: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """Quantize a weight [n, k]. Scales are in bf16, or in fp32 for e4m3."""
    n, k = weight.shape
    group, highest = scheme.group or k, HIGHEST[scheme.number_type]
    parts = weight.float().view(n, -1, group)
    peak = parts.abs().amax(2, keepdim=True).clamp_(min=1e-30)
    best = _rounded(peak * (1 / highest), scheme)
    error = _squared_error(parts, best, highest)
    for clip in () if scheme.floating else CLIPS:
        scale = _rounded(peak * (clip / highest), scheme)
        trial = _squared_error(parts, scale, highest)
        best, error = torch.where(trial < error, scale, best), torch.minimum(trial, error)
    scale = best.squeeze(2)
    if scheme.floating:
        codes = (parts / best).clamp_(-highest, highest).view(n, k).to(torch.float8_e4m3fn)
        return QuantizedWeight(codes, scale, 1, group, 8)
    codes = (_nearest(parts, best, highest) + 2 ** (scheme.bits - 1)).to(torch.uint8).view(n, k)
    return QuantizedWeight(codes, scale.bfloat16(), 1, group, scheme.bits)


def _rounded(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Round scales to the dtype in which they are stored."""
    return scale if scheme.floating else scale.bfloat16().float()


def _squared_error(parts: torch.Tensor, scale: torch.Tensor, highest: float) -> torch.Tensor:
    """Return the sum of the squared errors of each group."""
    return (_nearest(parts, scale, highest) * scale - parts).square_().sum(2, keepdim=True)


def _nearest(parts: torch.Tensor, scale: torch.Tensor, highest: float) -> torch.Tensor:
    """Return the nearest integers to parts / scale, from -highest - 1 to highest."""
    return (parts / scale).round_().clamp_(-highest - 1, highest)
