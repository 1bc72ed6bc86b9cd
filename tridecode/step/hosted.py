"""Launches that copy K/V pages, and the linears of the last layers, from host memory to the device.

Pages and linears each have a ring of buffers on the device. A "fetch" fills a buffer. It starts when the launches
before it in the list have finished, and runs in parallel with the launches after it. The line "fetched" waits for it. A
model without host memory has no such lines.
"""

from typing import TYPE_CHECKING

from ..blocks.block import Run
from ..blocks.host_layers import LAYER_BUFFERS
from ..kernels.transfer.fetch import FETCH, FETCHED

if TYPE_CHECKING:
    import torch

    from ..blocks.host_layers import HostLayers
    from .model import DecodeModel


def fetch_first(run: Run, m: "DecodeModel", meta: "torch.Tensor | None", end: int) -> None:
    """Fill the rings before the first layer.

    Args:
        meta: the kernel copies only if one of these rows runs. With None it always copies.
        end: number of layers whose pages the pass reads.
    """
    for i in range(min(m.kv.buffers, end)):
        fetch_pages(run, m, meta, i)
    if host := m.weights.host:
        for i in range(host.first, min(host.first + LAYER_BUFFERS, host.end)):
            _fetch_weights(run, m, host, meta, i)


def fetch_pages(run: Run, m: "DecodeModel", meta: "torch.Tensor | None", i: int) -> None:
    """Fetch the pages of the i-th layer with pages."""
    if m.kv.rings and (offload := m.kv.offload):
        run("fetch", FETCH, meta, offload.fetched, offload.source[i], offload.target[i], config=m.fetch_config)


def pages_fetched(run: Run, m: "DecodeModel", i: int) -> None:
    """Wait for the pages of the i-th layer with pages."""
    if m.kv.rings and (offload := m.kv.offload):
        run("fetched", FETCHED, offload.target[i])


def next_pages(run: Run, m: "DecodeModel", meta: "torch.Tensor | None", i: int, end: int) -> None:
    """After the attention of the i-th layer with pages, fetch a later layer (below `end`) into the same buffer."""
    if i + m.kv.buffers < end:
        fetch_pages(run, m, meta, i + m.kv.buffers)


def _fetch_weights(run: Run, m: "DecodeModel", host: "HostLayers", meta: "torch.Tensor | None", i: int) -> None:
    """Fetch the linears of layer i."""
    at = i - host.first
    run("fetch", FETCH, meta, host.places, host.source[at], host.target[at], config=m.fetch_config)


def weights_fetched(run: Run, m: "DecodeModel", i: int) -> None:
    """Wait for the linears of layer i."""
    if (host := m.weights.host) and i >= host.first:
        run("fetched", FETCHED, host.target[i - host.first])


def next_weights(run: Run, m: "DecodeModel", meta: "torch.Tensor | None", i: int) -> None:
    """After the last linear of layer i, fetch a later layer into the same buffer."""
    if (host := m.weights.host) and host.first <= i < host.end - LAYER_BUFFERS:
        _fetch_weights(run, m, host, meta, i + LAYER_BUFFERS)
