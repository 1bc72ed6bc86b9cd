"""What comes from host memory into the ring, against indexing; in the interpreter and on a GPU."""

import pytest
import torch
from util import CUDA, DEVICE, Case, cases, meta_rows

from tridecode import layout
from tridecode.kernels.transfer.fetch import FETCH, FetchConfig, fetch, fetch_bytes, fetch_ref
from tridecode.state.offload import host_pages

CASES = cases(
    Case(
        "qwen3-4b",
        gpu=dict(host=70, layers=36, kv=8, page=64, d=128),
        small=dict(host=7, layers=3, kv=1, page=16, d=32),
    ),
    Case(
        "heads_of_80",
        gpu=dict(host=70, layers=4, kv=5, page=64, d=80),
        small=dict(host=5, layers=2, kv=1, page=16, d=20),
    ),
)
POISON = -(2**62)


def bits_of(case):
    """host int64 [pages, layers, cell] of random bits, and the launch shape."""
    s = case.sizes
    shape = s["layers"], 2, s["kv"], s["page"], s["d"]
    host = host_pages(s["host"], shape, torch.bfloat16, torch.device(DEVICE))
    bits = host.flatten(2).view(torch.int64)
    bits.copy_(torch.randint(-(2**60), 2**60, bits.shape, generator=torch.Generator().manual_seed(1)))
    return bits, FetchConfig() if CUDA else FetchConfig(programs=3, num_warps=4, tile=128)


def listed(*pages: int, room: int) -> torch.Tensor:
    places = torch.full((1 + room,), -1, dtype=torch.int32)
    places[0], places[1 : 1 + len(pages)] = len(pages), torch.tensor(pages, dtype=torch.int32)
    return places.to(DEVICE)


@CASES
@pytest.mark.parametrize("pages", [(), (2,), (4, -1, 0, 3)], ids=["none", "one", "with_a_gap"])
def test_fetch_brings_the_layers_part_of_the_pages_that_are_wanted(case, pages):
    host, shape = bits_of(case)
    layer, room = 1, 6
    ring = torch.full((room, host.shape[2]), POISON, device=DEVICE)
    fetch(None, listed(*pages, room=room), host[:, layer], ring, config=shape)
    for place in range(room):
        page = pages[place] if place < len(pages) else -1
        wanted = host[page, layer] if page >= 0 else torch.full_like(host[0, 0], POISON)
        assert torch.equal(ring[place].cpu(), wanted), place
    reference = torch.full_like(ring, POISON)
    fetch_ref(None, listed(*pages, room=room), host[:, layer], reference)
    assert torch.equal(ring, reference)


@pytest.mark.parametrize("status", [layout.RUN, layout.STOP, layout.WAIT], ids=["run", "stop", "wait"])
def test_nothing_comes_for_a_pass_in_which_no_row_runs(status):
    host, shape = bits_of(CASES.args[1][0])
    meta = meta_rows(5, 7, 9, status=layout.STOP)
    meta[1, layout.STATUS] = status
    for run in (fetch, FETCH.ref):
        ring = torch.full((4, host.shape[2]), POISON, device=DEVICE)
        run(meta, listed(3, 1, room=4), host[:, 0], ring, **{"shape": shape} if run is fetch else {})
        assert torch.equal(ring[0].cpu(), host[3, 0]) == (status == layout.RUN)
        assert (ring == POISON).all() == (status != layout.RUN)


def test_what_a_fetch_moves():
    host, _ = bits_of(CASES.args[1][0])
    ring = torch.zeros(6, host.shape[2], dtype=torch.int64)
    assert fetch_bytes(None, listed(2, -1, 3, room=6), host[:, 0], ring) == 2 * host[0, 0].nbytes


def test_pages_of_the_host_are_aligned_and_lie_in_one_range():
    host = host_pages(5, (3, 2, 1, 16, 20), torch.bfloat16, torch.device(DEVICE))
    assert host.shape == (5, 3, 2, 1, 16, 20)
    host.zero_()
    host[3, 2] = 1.0
    assert host.float().sum() == host[0, 0].numel() and host[3, 2].float().mean() == 1
    if CUDA:
        assert host.is_pinned() and host.data_ptr() % 4096 == 0 and 2 * host.stride(0) % 4096 == 0
