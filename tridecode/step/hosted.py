"""Lines of a list that bring what lies in the host's memory: K/V pages, and the projections of the last layers.

Each has a ring of buffers on the device. A "fetch" fills a buffer as soon as what stands before it in the list is done,
beside what comes behind it; with "fetched" the list waits for it. Where nothing lies on the host there are no lines.
"""

from ..blocks.host_layers import LAYER_BUFFERS
from ..kernels.transfer.fetch import FETCH, FETCHED
from .model import DecodeModel
from .run import Run


def fetch_first(run: Run, m: DecodeModel, meta, end: int) -> None:
    """Before the first layer: fill the rings, with the pages of layers below `end`, and with projections. meta: the
    rows of which one must run, None if some do."""
    for i in range(min(m.kv.buffers, end)):
        fetch_pages(run, m, meta, i)
    if host := m.weights.host:
        for i in range(host.first, min(host.first + LAYER_BUFFERS, host.end)):
            _fetch_weights(run, m, meta, i)


def fetch_pages(run: Run, m: DecodeModel, meta, i: int) -> None:
    if m.kv.rings:
        offload = m.kv.offload
        run("fetch", FETCH, meta, offload.fetched, offload.source[i], offload.target[i], config=m.fetch_shape)


def pages_fetched(run: Run, m: DecodeModel, i: int) -> None:
    """Before attention of layer i."""
    if m.kv.rings:
        run("fetched", FETCHED, m.kv.offload.target[i])


def next_pages(run: Run, m: DecodeModel, meta, i: int, end: int) -> None:
    """After attention of layer i: its buffer is the next one's, below `end`, which has the same."""
    if i + m.kv.buffers < end:
        fetch_pages(run, m, meta, i + m.kv.buffers)


def _fetch_weights(run: Run, m: DecodeModel, meta, i: int) -> None:
    host = m.weights.host
    at = i - host.first
    run("fetch", FETCH, meta, host.places, host.source[at], host.target[at], config=m.fetch_shape)


def weights_fetched(run: Run, m: DecodeModel, i: int) -> None:
    """Before the first product of layer i."""
    if (host := m.weights.host) and i >= host.first:
        run("fetched", FETCHED, host.target[i - host.first])


def next_weights(run: Run, m: DecodeModel, meta, i: int) -> None:
    """After the last product of layer i."""
    if (host := m.weights.host) and host.first <= i < host.end - LAYER_BUFFERS:
        _fetch_weights(run, m, meta, i + LAYER_BUFFERS)
