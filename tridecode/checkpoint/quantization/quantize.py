"""Quantize weights while they are loaded: to nearest, each scale the best of a few by the squares of the errors."""

import torch

from ...kernels.linear.packed import Codes
from .compressed_tensors import READINGS
from .scheme import Quantization, Scheme

GROUP = 128
CLIPS = tuple(1 - step / 20 for step in range(9))  # of the largest magnitude, down to 0.6
HIGHEST = {"e4m3": 448.0, "int8": 127.0, "int4": 7.0}
SCHEMES = {
    "fp8": Scheme(8, True, 0, 1, False, False, READINGS["float-quantized"]),
    "int8": Scheme(8, False, GROUP, 1, False, False, READINGS["pack-quantized"]),
    "int4": Scheme(4, False, GROUP, 1, False, False, READINGS["pack-quantized"]),
}
HEADS = ("keep", *SCHEMES)


def rules(kind: str, head: str) -> Quantization:
    """Return the rules that quantize all linears by `kind` of SCHEMES, but the LM head by `head` of HEADS."""
    return Quantization(kind, (("^lm_head$", SCHEMES.get(head)), ("", SCHEMES[kind])))


def fitted(scheme: Scheme, k: int) -> Scheme:
    """The scheme for rows of k columns: in the largest groups that divide them, or one."""
    if not scheme.group or k % scheme.group == 0:
        return scheme
    group = next((group for group in (64, 32) if k % group == 0), 0)
    return Scheme(scheme.bits, scheme.floating, group, 1, False, False, scheme.read)


def quantized(weight: torch.Tensor, scheme: Scheme) -> Codes:
    """The codes of weight [n, k], its scales in bf16, those of e4m3 in fp32."""
    n, k = weight.shape
    group, most = scheme.group or k, HIGHEST[scheme.name]
    parts = weight.float().view(n, -1, group)
    peak = parts.abs().amax(2, keepdim=True).clamp_(min=1e-30)
    best, error = None, None
    for clip in (1.0,) if scheme.floating else CLIPS:
        scale = _rounded(peak * (clip / most), scheme)
        found = (_nearest(parts, scale, most) * scale - parts).square_().sum(2, keepdim=True)
        better = scale if best is None else torch.where(found < error, scale, best)
        best, error = better, found if error is None else torch.minimum(found, error)
    scale = best.squeeze(2)
    if scheme.floating:
        values = (parts / best).clamp_(-most, most).view(n, k).to(torch.float8_e4m3fn)
        return Codes(values, scale, 1, group, 8)
    values = (_nearest(parts, best, most) + 2 ** (scheme.bits - 1)).to(torch.uint8).view(n, k)
    return Codes(values, scale.bfloat16(), 1, group, scheme.bits)


def _rounded(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return scale if scheme.floating else scale.bfloat16().float()


def _nearest(parts: torch.Tensor, scale: torch.Tensor, most: float) -> torch.Tensor:
    return (parts / scale).round_().clamp_(-most - 1, most)
