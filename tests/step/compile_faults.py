"""Compile kernels that fail, each in another way; a script, not interpreted. Prints how each of them fails."""

import ctypes

import triton
import triton.language as tl
from compile_step import GPUS, Launch, Resources, compile_all


@triton.jit
def _undefined_kernel(x_ptr):
    tl.store(x_ptr, undefined)  # noqa: F821


@triton.jit
def _newer_kernel(x_ptr):
    """Use an instruction of compute capability 8.9."""
    code = tl.inline_asm_elementwise(
        "{ .reg .b32 w; cvt.rn.f16x2.e4m3x2 w, $1; mov.b32 {$0, _}, w; }", "=h,h", [tl.load(x_ptr)], dtype=tl.int16,
        is_pure=True, pack=1,
    )  # fmt: skip
    tl.store(x_ptr, code)


class Abort(Launch):
    def compile(self, capability: int):
        ctypes.CDLL(None).abort()


@triton.jit
def _large_kernel(x_ptr):
    """Transpose a tile of 64 KiB."""
    offs = tl.arange(0, 128)
    tile = tl.load(x_ptr + offs[:, None] * 128 + offs[None, :])
    tl.store(x_ptr + offs[:, None] + offs[None, :] * 128, tl.dot(tile, tl.trans(tile)))


def main() -> None:
    options = {"num_warps": 4}
    launches = [
        Launch(_undefined_kernel, {"x_ptr": "*fp32"}, {}, {}, options, False),
        Launch(_newer_kernel, {"x_ptr": "*i16"}, {}, {}, options, False),
        Abort(_newer_kernel, {"x_ptr": "*i16"}, {}, {}, options, False),
        Launch(_large_kernel, {"x_ptr": "*fp32"}, {}, {}, options, False),
    ]
    results = dict(compile_all((launch, 86) for launch in launches))
    for index, result in sorted(results.items()):
        if isinstance(result, Resources):
            excess = result.excess(launches[index].kernel.__name__, GPUS["rtx-3090"])
            print(index, [fault.rpartition(" > ")[0].rpartition(" ")[0] for fault in excess])
        else:
            print(index, " ".join(result.split()))


if __name__ == "__main__":
    main()
