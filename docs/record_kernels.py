"""Write the kernels of Qwen3-4B on an H200 into docs/design.md, between the marks: python docs/record_kernels.py."""

from dataclasses import replace
from pathlib import Path

import torch

from tridecode.checkpoint.quantization.quantize import rules
from tridecode.cli.info import kernel_choices
from tridecode.kernels.device import Device
from tridecode.models.presets import PRESETS
from tridecode.tuning.report import render

H200 = Device("NVIDIA H200", 90, 132, 232448, 233472, 65536)
PAGE = Path(__file__).parent / "design.md"
BEGIN, END = "<!-- kernels:begin -->", "<!-- kernels:end -->"


def recorded() -> str:
    spec = PRESETS["qwen3-4b"]
    texts = []
    for name, each in (("bf16", spec), ("int4", replace(spec, load_quantization=rules("int4", "fp8")))):
        table = render(kernel_choices(each, torch.bfloat16, H200))
        texts.append(f"\n{name}:\n\n```\n{table}```\n")
    return BEGIN + "".join(texts) + "\n" + END


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + recorded() + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
