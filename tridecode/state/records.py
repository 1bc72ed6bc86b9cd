"""Records: the recurrent state of requests, which has a fixed size for each record instead of a page for each position.

Each slot has two records. A prompt pass reads one and writes the other, so that it can be repeated after an error. Then
the slot continues with the other one. Nothing resets a record: at position 0 kernels take its state as empty. Further
records are snapshots, from which later requests resume (snapshots.py).
"""

from collections import Counter
from dataclasses import dataclass

import torch

from ..blocks.declarations import Recurrent
from ..blocks.spec import ModelSpec
from ..kernels.delta.arguments import RING, DraftRows, RecordLayer
from ..tensors import short_repr

OF_SLOT = 2  # records of a slot


def records_of(slot: int, number: int = 0) -> tuple[int, int]:
    """Return the record that a slot's prompt pass reads, and the one that it writes, after `number` earlier passes.

    This holds until a slot gives a record away (Slots.release).
    """
    return OF_SLOT * slot + number % OF_SLOT, OF_SLOT * slot + (number + 1) % OF_SLOT


@dataclass(frozen=True)
class RecordPool:
    """The records of a model.

    Args:
        layers: the records of each layer with recurrent state.
        stacked: the same tensors, [layers, records, ...] for all layers with equal sizes.
        drafts: the updates by drafts in each of these layers, by slot. Empty if the engine has no drafts.
        snapshots: number of records in addition to those of slots.
    """

    layers: tuple[RecordLayer, ...]
    stacked: tuple[RecordLayer, ...]
    drafts: tuple[DraftRows, ...] = ()
    snapshots: int = 0

    def __repr__(self) -> str:
        tensors = self.tensors().values()
        return short_repr(self, self.layers[0].state, nbytes=sum(tensor.nbytes for tensor in tensors))

    @torch.inference_mode()
    def fill(self, generator: torch.Generator | None = None) -> None:
        """Fill the states and windows with random numbers of a magnitude of about 1, for benchmarks."""
        for tensors in self.stacked:
            tensors.state.normal_(generator=generator)
            tensors.window.normal_(generator=generator)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Copy a record to another one, in stream order."""
        for tensors in self.stacked:
            for tensor in tensors:
                tensor[:, target].copy_(tensor[:, source])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        named = {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer._asdict().items()}
        return named | {
            f"{i}.draft_{name}": t for i, rows in enumerate(self.drafts) for name, t in rows._asdict().items()
        }


def make_records(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, slots: int, drafts: bool, snapshots: int = 0
) -> RecordPool | None:
    """Allocate the records of `slots` slots, or return None for a model without recurrent state.

    Args:
        dtype: dtype of the inputs of convolutions. The spec determines the dtype of matrices.
        drafts: whether passes can verify drafts.
        snapshots: number of records in addition to those of slots.
    """
    if not spec.recurrent:
        return None
    count, matrices = OF_SLOT * slots + snapshots, torch.float16 if spec.fp16_state else torch.float32

    def stack(declared: Recurrent, layers: int) -> RecordLayer:
        heads = layers, count, declared.value_heads
        return RecordLayer(
            torch.zeros(*heads, declared.key_dim, declared.value_dim, dtype=matrices, device=device),
            torch.zeros(layers, count, RING, declared.channels, dtype=dtype, device=device),
            torch.zeros(heads, dtype=torch.int32, device=device),
        )

    def rows(declared: Recurrent) -> DraftRows:
        return DraftRows(
            torch.zeros(slots, RING, declared.key_heads, declared.key_dim, device=device),
            torch.zeros(slots, RING, declared.value_heads, declared.value_dim, device=device),
            torch.zeros(slots, RING, declared.value_heads, device=device),
        )

    stacks = {declared: stack(declared, layers) for declared, layers in Counter(spec.recurrent).items()}
    unbound = {declared: zip(*(tensor.unbind(0) for tensor in tensors)) for declared, tensors in stacks.items()}
    layers = tuple(RecordLayer(*next(unbound[declared])) for declared in spec.recurrent)
    return RecordPool(layers, (*stacks.values(),), tuple(map(rows, spec.recurrent)) if drafts else (), snapshots)


def slot_record_bytes(spec: ModelSpec, dtype: torch.dtype, drafts: bool) -> int:
    """Return the bytes of the records of one slot. This allocates no memory."""
    pool = make_records(spec, "meta", dtype, 1, drafts)
    return 0 if pool is None else sum(tensor.nbytes for tensor in pool.tensors().values())


def snapshot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one record, 0 for a model without recurrent state. This allocates no memory."""
    return slot_record_bytes(spec, dtype, drafts=False) // OF_SLOT
