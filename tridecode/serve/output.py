"""Output: reads sampled tokens from the ring in host memory that the device writes."""

import time

import torch

from .. import layout
from ..errors import GenerationError
from ..results import TokenLogprobs
from ..step.model import DecodeModel

PATIENCE = 120.0  # seconds for which a pass is awaited


class Ring:
    """Reads the entries that steps leave in host memory."""

    def __init__(self, model: DecodeModel):
        self._workspace, self._device = model.workspace, model.device
        self._entries = model.workspace.out.numpy().data  # a memoryview, which returns int and is faster than numpy

    def entry(self, slot: int, generation: int, step: int) -> layout.Entry:
        """The entry of a step; waits for it. The device writes it there: no copy, no synchronisation.

        Raises GenerationError where everything enqueued has ended without it, or does not end.
        """
        found = self._look(slot, generation, step)
        return self._wait(slot, generation, step) if found is None else found

    def _look(self, slot: int, generation: int, step: int) -> layout.Entry | None:
        return layout.entry_of(self._entries[slot, step % layout.RING], generation, step)

    def _wait(self, slot: int, generation: int, step: int) -> layout.Entry:
        polls, since = 0, time.monotonic()
        while (found := self._look(slot, generation, step)) is None:
            polls += 1
            time.sleep(0)  # let the thread that draws the screen run
            if polls % 1024:
                continue
            idle, late = self._idle(), time.monotonic() - since > PATIENCE
            if (idle or late) and not self._look(slot, generation, step):
                how = "ended without a token" if idle else f"has not ended in {PATIENCE:.0f} seconds; the GPU hangs"
                raise GenerationError(f"step {step + 1} {how}")
        return found

    def _idle(self) -> bool:
        return self._device.type != "cuda" or torch.cuda.current_stream(self._device).query()

    def logprobs(self, slot: int, step: int, count: int) -> TokenLogprobs:
        """Of the token of a step that was seen, with the `count` likeliest."""
        ws, place = self._workspace, step % layout.RING
        values = ws.out_logprobs[slot, place, : count + 1].tolist()
        ids = ws.out_top_ids[slot, place, :count].tolist()
        return TokenLogprobs(values[0], tuple(zip(ids, values[1:])))
