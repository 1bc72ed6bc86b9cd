"""Contexts larger than the device's memory: pages in host memory, whose texts are those of pages on the device."""

import pytest
import torch
from models import CUDA, tiny_engine

from tridecode import SamplingParams
from tridecode.cache.offload import Offload

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PAGE = 64 if CUDA else 16
LONG = [(11 * i + i // 7) % 300 for i in range(9 * PAGE + 5)]


def engine_of(pages=None, ring=0, host=40, slots=1, buffers=2, layers=3, **build):
    """An engine of 16 pages of context a slot; pages: of the device, with `host` beside them."""
    build |= {"slots": slots, "page": PAGE, "pages": pages}
    if pages is not None:
        build["offload"] = Offload(host, ring, buffers)
    dtype = torch.bfloat16 if CUDA else torch.float32
    return tiny_engine(
        dtype=dtype, capacity=16 * PAGE, max_position=16 * PAGE, num_layers=layers, tie_word_embeddings=False, build=build
    )


@pytest.fixture(scope="module")
def alone():
    """What an engine says that has all on its device and one request at a time."""
    engine = engine_of()
    return lambda ids, params=GREEDY: engine.generate(ids, params, reuse_prefix=False).token_ids


def on_host(engine) -> int:
    """Pages of running requests in the host's memory."""
    return len(engine.scheduler.slots._ring)


@pytest.mark.parametrize("pages", [4, 5, 8, 11, 16], ids=lambda pages: f"{pages}_of_11_pages")
@pytest.mark.parametrize("buffers", [2, 3], ids=lambda buffers: f"ring_of_{buffers}")
def test_a_text_is_the_same_wherever_its_pages_lie(pages, buffers, alone):
    engine = engine_of(pages, ring=16, buffers=buffers)
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=3 * PAGE, ignore_eos=True)):
        request = engine.submit(LONG, params, reuse_prefix=False)
        most = 0
        for _ in request:
            most = max(most, on_host(engine))
            engine.scheduler.assert_consistent()
        assert request.result().token_ids == alone(LONG, params)
        assert most >= min(10, max(10 - pages, 0)), "what the device does not hold was on the host"
        assert on_host(engine) == 0
