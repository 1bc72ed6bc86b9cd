"""Records: the recurrent state of requests, which has a fixed size for each record instead of a page for each position.

Each slot has two records. A prompt pass reads one and writes the other, so that it can be repeated after an error. Then
the slot continues with the other one. Nothing resets a record: at position 0 kernels take its state as empty.
"""

from dataclasses import dataclass

import torch

from ..blocks.declarations import Recurrent
from ..blocks.spec import ModelSpec
from ..kernels.delta.arguments import RING, DraftRows, RecordLayer
from ..tensors import short_repr

OF_SLOT = 2  # records of a slot


def records_of(slot: int, number: int) -> tuple[int, int]:
    """Return the record that a slot's prompt pass reads, and the one that it writes, after `number` earlier passes."""
    return OF_SLOT * slot + number % OF_SLOT, OF_SLOT * slot + (number + 1) % OF_SLOT


@dataclass(frozen=True)
class RecordPool:
    """The records of a model.

    Args:
        layers: the records of each layer with recurrent state.
        drafts: the updates by drafts in each of these layers, by slot. Empty if the engine has no drafts.
    """

    layers: tuple[RecordLayer, ...]
    drafts: tuple[DraftRows, ...] = ()

    def __repr__(self) -> str:
        tensors = self.tensors().values()
        return short_repr(self, self.layers[0].state, nbytes=sum(tensor.nbytes for tensor in tensors))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        named = {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer._asdict().items()}
        return named | {
            f"{i}.draft_{name}": t for i, rows in enumerate(self.drafts) for name, t in rows._asdict().items()
        }


def make_records(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, slots: int, drafts: bool
) -> RecordPool | None:
    """Allocate the records of `slots` slots, or return None for a model without recurrent state.

    Args:
        dtype: dtype of the inputs of convolutions. Matrices are fp32.
        drafts: whether passes can verify drafts.
    """
    if not spec.recurrent:
        return None
    count = OF_SLOT * slots

    def layer(declared: Recurrent) -> RecordLayer:
        return RecordLayer(
            torch.zeros(count, declared.value_heads, declared.key_dim, declared.value_dim, device=device),
            torch.zeros(count, RING, declared.channels, dtype=dtype, device=device),
            torch.zeros(count, declared.value_heads, dtype=torch.int32, device=device),
        )

    def rows(declared: Recurrent) -> DraftRows:
        return DraftRows(
            torch.zeros(slots, RING, declared.key_heads, declared.key_dim, device=device),
            torch.zeros(slots, RING, declared.value_heads, declared.value_dim, device=device),
            torch.zeros(slots, RING, declared.value_heads, device=device),
        )

    return RecordPool(tuple(map(layer, spec.recurrent)), tuple(map(rows, spec.recurrent)) if drafts else ())


def slot_record_bytes(spec: ModelSpec, dtype: torch.dtype, drafts: bool) -> int:
    """Return the bytes of the records of one slot. This allocates no memory."""
    pool = make_records(spec, "meta", dtype, 1, drafts)
    return 0 if pool is None else sum(tensor.nbytes for tensor in pool.tensors().values())
