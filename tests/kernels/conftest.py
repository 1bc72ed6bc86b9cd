"""Without a GPU, kernel tests run torch in one thread, which is faster for small tensors."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=not torch.cuda.is_available())
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
