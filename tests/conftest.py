"""With no GPU the kernels run in Triton's interpreter, which must be chosen before any of them is imported."""

import os
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "kernels")]


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    """A directory with nothing but the tiny tokenizer; tests only read it."""
    from checkpoints import write_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(path):
    from tridecode.tokenizer import Tokenizer

    return Tokenizer.load(path)


@pytest.fixture(scope="session")
def plain(path):
    """The same tokenizer without anything around it."""
    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
