"""With no GPU the kernels run in Triton's interpreter, which must be chosen before any of them is imported."""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "kernels")]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
