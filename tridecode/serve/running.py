"""What a scheduler knows of the jobs that have a slot, and of the passes in flight."""

from array import array
from dataclasses import dataclass

import torch

from .masks import Following
from .output import Output
from .request import Job

AHEAD = 16  # positions: with fewer left of its pages a row gets more


@dataclass(eq=False)
class Running:
    """A job that has its slot, and once its prompt is read its row.

    read: positions of the prompt whose K/V are there; position: of its first pass that was not seen; end: the one at
    which it has no more; room: the one at which its pages end. tokens: those whose passes were seen; embedded: the next
    one's. A pass in flight takes it on by one position, with drafts by up to as many as it has rows there, and with a
    mask that is late not at all.
    """

    job: Job
    output: Output
    slot: int
    read: int
    tokens: array
    embedded: int
    position: int
    end: int
    row: int | None = None
    room: int = 0
    generation: int = 0
    seen: int = 0  # passes whose entries were read
    in_flight: int = 0  # and those that were not yet
    rows_in_flight: int = 0  # its rows in these
    wants: int = 1  # rows that it could use in a pass, as the last entry said
    mask: Following | None = None  # of a job with a grammar
    given: int = 0  # passes to come whose tokens were drawn before it was preempted: they are the same
    gone: bool = False  # ended, cancelled or preempted: nothing of it is awaited

    @property
    def left(self) -> int:
        """Positions of the prompt to be read; the last one's token is what the first pass embeds."""
        return self.position + 1 - self.read

    @property
    def runs(self) -> bool:
        """May take part in the next pass. One with a mask does for longer than it has to: a pass in flight for which
        its mask is late takes it no further, and a pass that did not count it would still run its row."""
        surely = 0 if self.mask else self.in_flight
        return self.position + surely < min(self.end, self.room)

    @property
    def lacks_mask(self) -> bool:
        """A pass that is enqueued now can do nothing for it, unless its mask comes meanwhile."""
        return self.mask is not None and not self.in_flight and self.mask.late

    @property
    def needs_pages(self) -> bool:
        reached = self.position + self.rows_in_flight
        return self.row is not None and self.room < self.end and reached > self.room - AHEAD


@dataclass(frozen=True, eq=False)
class Pass:
    """One that was enqueued: the running that take part in it, the positions at which their pages ended then, and the
    rows that each has; done: where none takes part, when it has ended on a GPU."""

    part: list[Running]
    rooms: list[int]
    rows: int
    done: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Load:
    """jobs: those that run or wait, of which `waiting` have no slot; rows: of the next pass; preemptions: so far."""

    jobs: int
    waiting: int
    rows: int
    pages: int
    free_pages: int
    preemptions: int
