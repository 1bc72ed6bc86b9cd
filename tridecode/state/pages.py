"""PagePool: free pages and reference counts of the K/V pool."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import TridecodeError, counted


class OutOfPages(TridecodeError):
    """More pages were requested than are free."""


class PagePool:
    """Reference counts of pages 0 to pages - 1, all free at first. It is bookkeeping on the host only.

    `changes` is incremented whenever pages may have become free. A request that found too few pages can retry when it
    has changed.
    """

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))  # The page with the lowest number is taken first.
        self._holders = [0] * pages
        self.changes = 0

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return the reference count of a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Take `count` free pages, each with a reference count of 1. Raises OutOfPages, and takes no page then."""
        if count > len(self._free):
            raise OutOfPages(f"{counted(count, 'page')} requested, {len(self._free)} of {len(self._holders)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Increment the reference count of each page. None of them may be free."""
        self.changes += 1
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Decrement the reference count of each page. Pages with a count of 0 become free."""
        self.changes += 1
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be released"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def recount(self, references: Iterable[Sequence[int]]) -> None:
        """Recompute all counts from `references`, the lists of pages of all users. Other pages become free."""
        self.changes += 1
        counts = Counter(page for pages in references for page in pages)
        self._holders = [counts[page] for page in range(len(self._holders))]
        self._free = [page for page in reversed(range(len(self._holders))) if not counts[page]]

    def assert_consistent(self, references: Iterable[Sequence[int]]) -> None:
        """Check that each page is free once, or counted as often as it occurs in `references`."""
        counts = Counter(page for pages in references for page in pages)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page, holders in enumerate(self._holders):
            assert counts[page] == holders, f"page {page} has {counts[page]} references, but its count is {holders}"
            assert (page in free) == (holders == 0), f"page {page} has count {holders} and a wrong free list entry"
