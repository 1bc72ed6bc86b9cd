"""fetch copies one layer of pages from host memory into a ring buffer."""

import pytest
import torch
from check import check_op
from util import CUDA, DEVICE, Case, cases, meta_rows

from tridecode import layout
from tridecode.kernels.transfer.fetch import FETCH, FetchConfig
from tridecode.state.offload import host_pages

QWEN3 = Case(
    "qwen3-4b",
    gpu=dict(host=70, layers=36, kv=8, page=64, d=128),
    small=dict(host=7, layers=3, kv=1, page=16, d=32),
)
ODD = Case(
    "heads_of_80",
    gpu=dict(host=70, layers=4, kv=5, page=64, d=80),
    small=dict(host=5, layers=2, kv=1, page=16, d=20),
)
CONFIG = FetchConfig() if CUDA else FetchConfig(programs=3, num_warps=4, tile=128)
UNTOUCHED = -(2**62)


def check(case: Case, pages: tuple[int, ...], meta=None, layer: int = 1) -> list[int]:
    """Check a fetch into a ring of six places; return the places that it fills."""
    sizes, places = case.sizes, 6
    shape = sizes["layers"], 2, sizes["kv"], sizes["page"], sizes["d"]
    host = host_pages(sizes["host"], shape, torch.bfloat16, torch.device(DEVICE)).flatten(2).view(torch.int64)
    host.copy_(torch.randint(-(2**60), 2**60, host.shape, generator=torch.Generator().manual_seed(1)))
    cell = host.shape[2]
    ring = torch.full((places, cell), UNTOUCHED, device=DEVICE)
    requested = torch.tensor([len(pages), *pages] + [-1] * (places - len(pages)), dtype=torch.int32, device=DEVICE)
    moved = 8 * cell * sum(page >= 0 for page in pages)
    args = meta, requested, host[:, layer], ring
    ring = check_op(FETCH, args, dict(config=CONFIG), accumulates=("ring",), moved=moved).launched["ring"].cpu()
    filled = [place for place in range(places) if (ring[place] != UNTOUCHED).any()]
    assert all(torch.equal(ring[place], host[pages[place], layer]) for place in filled)
    return filled


@cases(QWEN3, ODD)
@pytest.mark.parametrize("pages", [(), (2,), (4, -1, 0, 3)], ids=["none", "one", "with_a_gap"])
def test_fetch_copies_the_pages_of_one_layer(case, pages):
    assert check(case, pages) == [place for place, page in enumerate(pages) if page >= 0]


@pytest.mark.parametrize("status", [layout.RUN, layout.STOP, layout.WAIT], ids=["run", "stop", "wait"])
def test_fetch_copies_nothing_if_no_row_runs(status):
    meta = meta_rows(5, 7, 9, status=layout.STOP)
    meta[1, layout.STATUS] = status
    assert check(QWEN3, (3, 1), meta, layer=0) == ([0, 1] if status == layout.RUN else [])


def test_host_pages_are_contiguous_and_aligned():
    host = host_pages(5, (3, 2, 1, 16, 20), torch.bfloat16, torch.device(DEVICE))
    assert host.shape == (5, 3, 2, 1, 16, 20)
    host.zero_()
    host[3, 2] = 1.0
    assert host.float().sum() == host[0, 0].numel() and host[3, 2].float().mean() == 1
    if CUDA:
        assert host.is_pinned() and host.data_ptr() % 4096 == 0 and 2 * host.stride(0) % 4096 == 0
