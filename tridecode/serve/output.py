"""Output: reads sampled tokens from a ring in host memory that the device writes."""

import time

import torch

from .. import layout
from ..errors import GenerationError
from ..results import TokenLogprobs
from ..step.model import DecodeModel

HANG_TIMEOUT = 120.0  # Seconds after which a pass is reported as hanging.


class Ring:
    """Reads the entries that passes write to host memory."""

    def __init__(self, model: DecodeModel):
        self._workspace, self._device = model.workspace, model.device
        self._entries = model.workspace.out.numpy().data  # A memoryview, which returns int and is faster than numpy.

    def entry(self, slot: int, generation: int, step: int) -> layout.Entry:
        """Wait for the entry of a pass and return it. The device writes entries directly to host memory.

        Args:
            step: number of the slot's pass since the request began.

        Raises:
            GenerationError: the device is idle and wrote no entry, or does not become idle.
        """
        entry = self._read(slot, generation, step)
        return self._wait(slot, generation, step) if entry is None else entry

    def _read(self, slot: int, generation: int, step: int) -> layout.Entry | None:
        return layout.entry_of(self._entries[slot, step % layout.RING], generation, step)

    def _wait(self, slot: int, generation: int, step: int) -> layout.Entry:
        polls, since = 0, time.monotonic()
        while (entry := self._read(slot, generation, step)) is None:
            polls += 1
            time.sleep(0)  # Other threads can run, such as the thread that draws the terminal.
            if polls % 1024:
                continue
            idle, late = self._idle(), time.monotonic() - since > HANG_TIMEOUT
            if (idle or late) and not self._read(slot, generation, step):
                how = "ended without a token" if idle else f"has not ended in {HANG_TIMEOUT:.0f} seconds; the GPU hangs"
                raise GenerationError(f"step {step + 1} {how}")
        return entry

    def _idle(self) -> bool:
        return self._device.type != "cuda" or torch.cuda.current_stream(self._device).query()

    def logprobs(self, slot: int, step: int, count: int) -> TokenLogprobs:
        """Return the log-probabilities of a token whose entry was read, and of the `count` likeliest tokens."""
        ws, place = self._workspace, step % layout.RING
        values = ws.out_logprobs[slot, place, : count + 1].tolist()
        ids = ws.out_top_ids[slot, place, :count].tolist()
        return TokenLogprobs(values[0], tuple(zip(ids, values[1:])))
