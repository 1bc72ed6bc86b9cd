"""Acceptance: how many tokens a pass that verifies drafts of a request is expected to yield, by its recent passes."""

from dataclasses import dataclass, field

from ..layout import MAX_DRAFTS

# A request wants more drafts after each pass whose drafts were right. Estimates are kept for requests that want up to
# one draft, up to three, and more.
FIRST = (0.2, 0.5, 0.8)  # the share of passes whose first draft is right, before any is known
NEXT = 0.8  # the share of drafts that are right if the draft before is right
KEEP = 0.9  # weight of an estimate, against one more pass


@dataclass
class Acceptance:
    """Recent drafts of a request.

    Args:
        wanted: drafts that the device wants to verify, by the last entry.
        first, following: current estimates in place of FIRST and NEXT.
    """

    wanted: int = 0
    first: list[float] = field(default_factory=lambda: [*FIRST])
    following: list[float] = field(default_factory=lambda: [NEXT] * len(FIRST))

    def expected(self, rows: int) -> float:
        """Return the expected number of tokens of a pass that has `rows` rows for the request."""
        level, drafts = _level(self.wanted), min(self.wanted, rows - 1)
        return 1 + self.first[level] * sum(self.following[level] ** i for i in range(drafts))

    def learn(self, decided: int, verified: int, accepted: int, wanted: int) -> None:
        """Add the result of a pass.

        A pass of one row has a draft too, which costs nothing: `wanted` grows if it was right.

        Args:
            decided: `wanted` when the pass was chosen, which is two passes before its result is known.
            verified, accepted: drafts of the pass.
            wanted: drafts for later passes, by the entry of the pass.
        """
        if decided > 0:
            level = _level(decided)
            right = accepted > 0 if verified else wanted > self.wanted or wanted == MAX_DRAFTS
            self.first[level] += (1 - KEEP) * (right - self.first[level])
            for draft in range(1, min(accepted + 1, verified)):
                self.following[level] += (1 - KEEP) * ((draft < accepted) - self.following[level])
        self.wanted = wanted


def _level(wanted: int) -> int:
    return 0 if wanted <= 1 else 1 if wanted <= 3 else 2
