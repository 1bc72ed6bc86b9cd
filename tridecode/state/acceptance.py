"""Acceptance: the expected number of tokens of a pass with drafts, estimated from recent passes of the request."""

from dataclasses import dataclass, field

from ..layout import MAX_DRAFTS

# The device requests more drafts after each pass whose drafts were right. Requests of at most one draft, of at most
# three drafts, and of more drafts have separate estimates.
FIRST = (0.2, 0.5, 0.8)  # Initial estimates of the share of passes whose first draft is right.
NEXT = 0.8  # Initial estimate of the share of drafts that are right if the previous draft is right.
KEEP = 0.9  # Weight of the old estimate when the result of a pass is added.


@dataclass
class Acceptance:
    """Acceptance rates of a request's recent drafts.

    Args:
        requested_drafts: number of drafts that the device requested in its last entry.
        first, following: current estimates that replace FIRST and NEXT, for each level of `requested_drafts`.
    """

    requested_drafts: int = 0
    first: list[float] = field(default_factory=lambda: [*FIRST])
    following: list[float] = field(default_factory=lambda: [NEXT] * len(FIRST))

    def expected(self, rows: int) -> float:
        """Return the expected number of output tokens of a pass in which the request has `rows` rows."""
        level, drafts = _level(self.requested_drafts), min(self.requested_drafts, rows - 1)
        return 1 + self.first[level] * sum(self.following[level] ** i for i in range(drafts))

    def learn(self, decided: int, verified: int, accepted: int, requested_drafts: int) -> None:
        """Update the estimates with the result of a pass.

        A pass of one row also checks a draft, without extra cost: `requested_drafts` grows if the draft was right.

        Args:
            decided: `requested_drafts` when the pass was enqueued, before the result of its predecessor was known.
            verified, accepted: number of drafts that the pass verified and accepted.
            requested_drafts: number of drafts that the entry of the pass requests for later passes.
        """
        if decided > 0:
            level = _level(decided)
            right = (
                accepted > 0 if verified else requested_drafts > self.requested_drafts or requested_drafts == MAX_DRAFTS
            )
            self.first[level] += (1 - KEEP) * (right - self.first[level])
            for draft in range(1, min(accepted + 1, verified)):
                self.following[level] += (1 - KEEP) * ((draft < accepted) - self.following[level])
        self.requested_drafts = requested_drafts


def _level(requested_drafts: int) -> int:
    """Return the index of the estimates for `requested_drafts` drafts."""
    return 0 if requested_drafts <= 1 else 1 if requested_drafts <= 3 else 2
