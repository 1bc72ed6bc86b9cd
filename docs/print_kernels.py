"""Print the kernels of Qwen3-4B on an H200, on any machine: python docs/print_kernels.py bf16|int4."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from tridecode.checkpoint.quantization.quantize import rules  # noqa: E402
from tridecode.cli.info import kernel_choices  # noqa: E402
from tridecode.kernels.device import Device  # noqa: E402
from tridecode.models.presets import PRESETS  # noqa: E402
from tridecode.tuning.report import render  # noqa: E402

H200 = Device("NVIDIA H200", 90, 132, 232448, 233472, 65536)
QUANTIZATION = {"bf16": None, "int4": rules("int4", "fp8")}

spec = replace(PRESETS["qwen3-4b"], load_quantization=QUANTIZATION[sys.argv[1]])
print(render(kernel_choices(spec, torch.bfloat16, H200)), end="")
