"""Scheduler: whose rows the next pass holds. It does nothing by itself: add, step, cancel."""

from collections import deque
from collections.abc import Callable

import torch

from ..errors import GenerationError, QueueFull, counted
from ..layout import LATE_TOKEN, NO_TOKEN, Chunk, Entry
from ..results import TokenLogprobs
from ..sampling import SamplingParams
from ..step.decode import KINDS
from ..step.graphs import DecodePasses
from ..step.model import DecodeModel
from ..step.prompt_graphs import PromptPasses
from ..text.tokenizer import Tokenizer
from .masks import wait_for
from .output import Ring
from .policy import Policy
from .queue import Queue
from .request import Job
from .running import Load, Pass, Running


class Scheduler:
    """First come, first served, over the slots of a model.

    steps, prompts: who runs decode passes, and prompt passes, now. ahead: passes that are enqueued before the one
    awaited has ended.

    Where each job stands is the queue's. Jobs and what slots hold are the truth, all else follows from them. So
    whatever an interrupt or an error leaves half done is thrown away: every job that has not ended begins again behind
    its last piece, as a preempted one does.
    """

    def __init__(
        self,
        model: DecodeModel,
        tokenizer: Tokenizer | None,
        steps: Callable[[], DecodePasses],
        prompts: Callable[[], PromptPasses],
        ahead: int,
        policy: Policy,
    ):
        self.queue = Queue(model, tokenizer, policy)
        self.slots = self.queue.slots
        self._model, self._ring, self._ahead = model, Ring(model), ahead
        self._steps, self._prompts = steps, prompts
        self._policy, self._chunk = policy, min(policy.chunk_tokens, self.slots.most_read())
        self._fixed = model.fixed_chunk
        self._in_flight: deque[Pass] = deque()
        self._unsettled = False  # something was begun and not finished
        self.answered = False  # a job has ended by itself: until then nothing is captured that can wait
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return bool(self.queue.jobs)

    def load(self) -> Load:
        """How busy it is; to be called from any thread, between whose numbers a pass may come."""
        jobs, pages = len(self.queue.jobs), self._model.kv.runnable
        waiting = max(jobs - len(self.queue.admitted), 0)
        return Load(jobs, waiting, len(self.queue.rows), pages, self.slots.available(), self.preemptions)

    def reading(self) -> tuple[int, int, int] | None:
        """Of the oldest prompt that is being read, from any thread: tokens that were there already, those whose passes
        were enqueued too (on a GPU two may be under way), and all; of one that was preempted also what it has drawn.
        None where there is none."""
        for running in tuple(self.queue.reading):
            return running.job.reused or 0, running.read, running.position + 1
        return None

    def check_queue(self, coming: int, going: int) -> None:
        """Raises QueueFull where one more, behind the `coming` that are about to be added, would be too many; to be
        called from any thread. The `going`, which the next step cancels, count no more, as far as they are no more than
        there may be."""
        slots, most = len(self.slots.held), self._policy.max_queue
        if most is not None and len(self.queue.jobs) + coming - min(going, slots + most) >= slots + most:
            raise QueueFull(
                f"the queue is full: {counted(slots, 'request')} under way and {most:,} waiting; try again later, or "
                "raise max_queue"
            )

    def add(self, job: Job) -> None:
        """Put the job last in the queue, unless it is there."""
        self._settle()
        if job in self.queue.jobs:
            return
        self._unsettled = True
        self.queue.add(job)
        self._unsettled = False

    def step(self) -> None:
        """Enqueue passes as far as may be, and wait for the oldest in flight: of these what there is to do."""
        self._settle()
        self._unsettled = True
        while self._in_flight and (part := self._in_flight[0].part) and all(running.gone for running in part):
            self._in_flight.popleft()
        self._await_masks()
        while len(self._in_flight) <= self._ahead and self._enqueue():
            pass
        if self._in_flight:
            self._drain()
        self._unsettled = False

    def cancel(self, job: Job) -> bool:
        """End the job, unless it has ended; what it left in the cache stays."""
        if job in self.queue.jobs:
            self._settle()
        if job not in self.queue.jobs:
            return False
        self._unsettled = True
        running = next((running for running in self.queue.admitted if running.job is job), None)
        output = running.output if running else self.queue.output(job)
        output.end("cancelled")
        self.queue.finish(job, running)
        self._unsettled = False
        return True

    def cancel_all(self) -> None:
        for job in list(self.queue.jobs):
            self.cancel(job)

    def rewind(self, positions: list[int], params: SamplingParams, given: int = 0) -> None:
        """Slots.rewind, for benchmarks. Whatever runs or waits is cancelled."""
        self.cancel_all()
        self._unsettled = True  # the next job finds all rows idle and all pages free
        self.slots.rewind(positions, params, given)

    def assert_consistent(self) -> None:
        self._settle()
        self.queue.assert_consistent()

    # ---- prompts

    def _choose(self) -> list[tuple[Running, int]]:
        """Whose prompts the next pass reads, and how many tokens of each: first come, first served, of those that wait
        for a slot too. Who has but one token left to read gets a row instead, as if he decoded. In the batch-invariant
        mode it is one prompt, up to the next multiple of the fixed chunk, and never its last token."""
        most, chosen, reading = self._chunk, [], deque(self.queue.reading)
        if not self._fixed and any(running.runs for running in self.queue.rows) and (reading or self.queue.waiting):
            start = reading[0].read if reading else 0
            most = self._prompts().tokens_within(self._policy.prompt_ms / 1e3, start, most)
        while most > 0 and (reading or self.queue.admit()):
            running = reading.popleft() if reading else self.queue.reading[-1]
            if running.left == 1:
                self.queue.begin(running)
                continue
            if self._fixed:
                chosen.append((running, min(running.left - 1, most - running.read % most)))
                break
            chosen.append((running, min(running.left, most)))
            most -= chosen[-1][1]
        return chosen

    def _read(self, chosen: list[tuple[Running, int]], rows: int) -> list[Chunk]:
        """Enqueue a pass that reads what was chosen, beside the first `rows` rows; what it reads as its chunks."""
        prompts, chunks = self._prompts(), []
        first = decoding = prompts.decoding(rows)
        for running, count in chosen:
            if self._fixed:
                first = running.read % self._fixed
            chunks.append(Chunk(running.slot, first, count, running.read))
            first += count
        self.slots.write_chunks(chunks)
        prompts.read(chunks, sum(chunk.count for chunk in chunks), decoding)
        return chunks

    def _have_read(self, chosen: list[tuple[Running, int]], chunks: list[Chunk]) -> None:
        """What a pass that was enqueued reads is there for all; whose prompt ends gets a row."""
        for (running, count), chunk in zip(chosen, chunks):
            running.read += count
            self.slots.publish(running.slot, running.tokens[: running.read])
            if running.left == 0:
                self.queue.begin(running, chunk.rows.stop - 1)
            elif self._fixed and running.left == 1:
                self.queue.begin(running)

    # ---- passes

    def _enqueue(self) -> bool:
        """Enqueue a pass of what prompts are to be read and of the rows that can take part, of the strongest kind among
        them; False where there is neither."""
        for running in [running for running in self.queue.admitted if running.needs_pages]:
            if not running.gone:
                self._grow(running)
        chosen = self._choose()
        before = [running for running in self.queue.rows if running.runs]
        while chosen:
            try:
                chunks = self._read(chosen, before[-1].row + 1 if before and not self._fixed else 0)
            except Exception as error:  # out of memory, mostly: it is one prompt's alone
                if len(chosen) == 1:
                    chosen[0][0].job.failure = error
                    self.queue.finish(chosen[0][0].job, chosen[0][0])
                    return True
                chosen = chosen[:1]
            else:
                self._have_read(chosen, chunks)
                break
        part = [running for running in self.queue.rows if running.runs]
        if not chosen and all(running.lacks_mask for running in part):
            return False
        rows = self._draw(part, ends_prompts=bool(chosen) and not self._fixed) if part else 0
        done = None
        if not part and self._model.device.type == "cuda":
            done = torch.cuda.current_stream(self._model.device).record_event()
        self._in_flight.append(Pass(part, [running.room for running in part], rows, done))
        return True

    def _draw(self, part: list[Running], ends_prompts: bool) -> int:
        """Enqueue what draws their tokens: a decode pass, or the end of the prompt pass that they were in. Returns how
        many rows each has in it."""
        kind = part[0].job.kind if len(part) == 1 else max((r.job.kind for r in part), key=KINDS.index)
        count, masked, rows = part[-1].row + 1, any(running.mask for running in part), 1
        self.slots.before_pass()
        if ends_prompts:
            self._prompts().finish(kind, count, masked)
        else:
            if self._model.verify and not masked and all(running.job.logits is None for running in part):
                rows = self._steps().tokens(kind, count, [running.wants for running in part], self.answered)
            self._steps().replay(kind, count, masked, rows)
        for running in part:
            if running.job.logits is not None:
                position = running.position + running.in_flight
                running.job.logits[position].copy_(self._model.workspace.logits[running.row])
            running.in_flight += 1
            running.rows_in_flight += rows
        return rows

    def _grow(self, running: Running) -> None:
        """More pages for a row: ahead of need such as nobody has; at the end of its own those of the youngest."""
        slots, waits = self.slots, running.position + running.in_flight >= running.room
        if waits and running.in_flight:
            return  # one of these passes may have ended it: then nobody else needs to go
        while not slots.make_room(1):
            if not waits:
                return
            self._preempt(youngest := self.queue.admitted[-1])
            if youngest is running:
                return
        lacking = slots.pages_for(running.end) - len(slots.held[running.slot].pages)
        slots.grow(running.slot, running.row, min(1 + slots.spare(1), lacking))
        running.room = slots.room(running.slot)

    def _await_masks(self) -> None:
        """Give masks that are on their way a moment where no pass is; a request whose mask cannot be made ends."""
        masked = [running for running in self.queue.rows if running.mask]
        if masked and not self._in_flight:
            wait_for([running.mask for running in masked])
        for running in masked:
            try:
                running.mask.check()
            except GenerationError as error:
                running.output.end("error", str(error))
                self.queue.finish(running.job, running)

    def _drain(self) -> None:
        """Wait for the oldest pass; pieces go to their jobs. Of rows that have gone no entry is awaited: a pass that
        was enqueued before the host knew of their end leaves none. Nor of such as had come to the end of their pages
        when it began."""
        passed = self._in_flight.popleft()
        if passed.done:
            passed.done.synchronize()
        for running, room in zip(passed.part, passed.rooms):
            running.in_flight -= 1
            running.rows_in_flight -= passed.rows
            following, place = 0 if running.position < room else -1, 0
            guesses = not running.given  # else its drafts are tokens that it has drawn before
            while following >= 0 and not running.gone:
                entry = self._ring.entry(running.slot, running.generation, running.seen)
                if guesses:
                    running.job.drafted += entry.drafted if place == 0 else 0
                    running.job.accepted += place > 0
                self._take(running, entry)
                following, place = entry.following - 1, place + 1

    def _take(self, running: Running, entry: Entry) -> None:
        """One token of a running that a pass has drawn."""
        job, held, token = running.job, self.slots.held[running.slot], entry.token
        wanted = job.params.logprobs
        logprobs = None if wanted is None else self._ring.logprobs(running.slot, running.seen, wanted)
        running.seen += 1
        running.wants = entry.wanted + 1
        if token == LATE_TOKEN:
            return
        running.position += 1
        if token == NO_TOKEN:
            others = held.shared > 0  # what it found may be another one's fault: then it computes all by itself
            self.slots.discredit(running.slot, job.tokens)
            if others and job.reuse_prefix:
                job.reuse_prefix = False
                self.queue.put_off(running)
                return
        else:
            running.tokens.append(running.embedded)  # its pass has run: its K/V are there
            held.tokens = running.tokens
        running.embedded = token
        if running.given and token != NO_TOKEN:
            running.given -= 1
            return
        self._push(running, token, logprobs)
        if job.ended:
            self.answered = True
            self.queue.finish(job, running)

    def _push(self, running: Running, token: int, logprobs: TokenLogprobs | None) -> None:
        """Tell of a drawn token; where there is a grammar, also ask what may follow."""
        job, follows = running.job, running.mask
        try:
            if not follows or token == NO_TOKEN or token in job.stop_ids:
                running.output.push(token, logprobs)
                return
            running.output.push(token, logprobs, last=follows.accept(token))
            if not job.ended:
                follows.next(running.position)
        except GenerationError as error:
            running.output.end("error", str(error))

    def _preempt(self, running: Running) -> None:
        """Let a job that runs wait before all others, which are younger; what it has computed may go."""
        self.preemptions += 1
        self.queue.put_off(running)

    def _settle(self) -> None:
        """Throw away what an interrupt or an error left half done."""
        if self._unsettled:
            self.queue.recover()
            self._in_flight.clear()
            self._unsettled = False
