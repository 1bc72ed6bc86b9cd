"""Queue: where each job stands: it waits, its prompt is being read, or it has a row."""

from array import array
from collections import Counter, deque

from ..layout import OWN
from ..state.offloaded_slots import OffloadedSlots
from ..state.slots import Slots, common_prefix
from ..step.model import DecodeModel
from ..text.tokenizer import Tokenizer
from .masks import Masks
from .output import Output
from .policy import Policy
from .request import Job
from .running import Running


class Queue:
    """jobs: those that have not ended, in the order of arrival; waiting: for a slot, the next one first, and what has
    ended meanwhile; admitted: those that have a slot, the oldest first; reading: of these those whose prompts are being
    read, always the youngest; rows: and all others.

    The jobs are the truth, all else follows from them: see `recover`.
    """

    def __init__(self, model: DecodeModel, tokenizer: Tokenizer | None, policy: Policy):
        self.slots = (OffloadedSlots if model.kv.offload else Slots)(model, policy.prefix_sharing)
        self._model, self._tokenizer, self._masks = model, tokenizer, Masks(model)
        self._sharing, self._fixed = policy.prefix_sharing, model.fixed_chunk
        self.jobs: dict[Job, None] = {}
        self.reset()

    def reset(self) -> None:
        """All jobs wait, as if none had ever had a slot."""
        self.waiting = deque(self.jobs)
        self.admitted: list[Running] = []
        self.reading: list[Running] = []
        self.rows: list[Running] = []
        self._refused: tuple | None = None  # who could not be admitted, and in which state of all else

    def add(self, job: Job) -> None:
        self.jobs[job] = None
        self.waiting.append(job)

    def admit(self) -> bool:
        """Give the first in the queue a slot, and pages for its prompt, if both are there."""
        while self.waiting and self.waiting[0] not in self.jobs:
            self.waiting.popleft()
        if not self.waiting or all(held.busy for held in self.slots.held):
            return False
        slots, job = self.slots, self.waiting[0]
        if self._refused == (job, slots.pages.changes, self.reading):  # a long prompt is not looked for in each pass
            return False
        ids = job.tokens
        position = 0 if job.scores else len(job.ids if self._fixed else ids) - 1
        wanted = ids[: position if job.reuse_prefix else 0]
        if self._soon_there(wanted, job.salt) or (admitted := slots.admit(wanted, position + 1, job.salt)) is None:
            self._refused = job, slots.pages.changes, [*self.reading]
            return False
        self._refused = None
        slot, read = admitted
        if job.reused is None:
            job.reused = read
        self.waiting.popleft()
        end, output = job.limit - 1, self.output(job)
        running = Running(job, output, slot, read, ids[:position], ids[position], position, end)
        running.given = len(job.pieces) if job.scores else len(ids) - 1 - position
        if job.grammar:
            running.mask = self._masks.follow(job.grammar, ids[len(job.ids) :].tolist())
        self.reading.append(running)
        self.admitted.append(running)
        needed = slots.pages_for(position + 1)
        needed += slots.spare(needed - len(slots.held[slot].pages))
        slots.write_tokens(slot, ids, min(needed * slots.page, end))
        return True

    def _soon_there(self, ids: array, salt: str) -> bool:
        """Whether a prompt that is being read has more whole pages of these than there are yet: worth a wait."""
        if not self._sharing:
            return False
        page, others = self.slots.page, (other.tokens for other in self.reading if other.job.salt == salt)
        coming = max((common_prefix(tokens, ids) // page * page for tokens in others), default=0)
        return coming > 0 and self.slots.cache.match(ids, salt).tokens(page) < coming

    def begin(self, running: Running, source: int = OWN) -> None:
        """Its prompt is read, up to the last token or, in the row `source` of a pass, with it: it gets the next row."""
        job = running.job
        running.generation = self.slots.begin(
            running.slot,
            len(self.rows),
            job.params,
            position=running.position,
            n_known=job.known,
            limit=job.limit,
            stop_ids=job.stop_ids,
            prompt=len(job.ids),
            source=source,
        )
        if running.mask:
            running.mask.begin(running.slot, running.generation, running.position + running.given)
        running.row, running.room = len(self.rows), self.slots.room(running.slot)
        self.rows.append(running)
        self.reading.remove(running)

    def finish(self, job: Job, running: Running | None) -> None:
        """The job has ended. What is in flight belongs to a generation that nobody awaits any more."""
        if running:
            self._vacate(running)
            self.slots.release(running.slot)
        self.jobs.pop(job, None)
        self._refused = None

    def put_off(self, running: Running) -> None:
        """Let a job that runs wait again, before all others."""
        self._vacate(running)
        self.slots.release(running.slot)
        self.waiting.appendleft(running.job)

    def _vacate(self, running: Running) -> None:
        """Take its row; the last row fills the gap, so that passes stay small."""
        running.gone = True
        if running.mask:
            running.mask.drop()
        self.admitted.remove(running)
        if running in self.reading:
            self.reading.remove(running)
            return
        last = self.rows.pop()
        if last is not running:
            self.rows[running.row] = last
        self.slots.vacate(running.row, last.row)
        last.row = running.row

    def recover(self) -> None:
        """Let all jobs that have not ended wait again, whatever was interrupted."""
        self.jobs = {job: None for job in self.jobs if not job.ended}
        for running in self.admitted:
            if running.mask:
                running.mask.drop()
        self.slots.recover()
        self.reset()

    def output(self, job: Job) -> Output:
        """What makes the job's pieces, behind those that it has."""
        return Output(job, None if job.scores else self._tokenizer, self._model.weights.dtype)

    def assert_consistent(self) -> None:
        """Every job waits, is read or has a row, once; rows and slots are as they say; no page is lost."""
        admitted = self.admitted
        known = [job for job in self.waiting if job in self.jobs] + [running.job for running in admitted]
        assert len(known) == len(set(known)) and set(known) == set(self.jobs), "a job is lost, or known twice"
        assert [running.row for running in self.rows] == list(range(len(self.rows)))
        assert Counter(self.rows + self.reading) == Counter(admitted)
        busy = {running.slot for running in admitted}
        assert len(busy) == len(admitted) and busy == {i for i, held in enumerate(self.slots.held) if held.busy}
        assert all(running.position <= running.room == self.slots.room(running.slot) for running in self.rows)
        self.slots.assert_consistent()
