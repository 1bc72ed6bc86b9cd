"""PagePool: which pages of the K/V pool are free, and how many hold each of the others."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import TridecodeError, counted


class OutOfPages(TridecodeError):
    """More pages are needed than are free."""


class PagePool:
    """Pages 0 to pages - 1, all free at first. The host's book-keeping only: nothing is written to a device.

    changes: counts what may let somebody in who found too few: as long as it stays there are no more pages for him.
    """

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))  # the lowest is taken first
        self._holders = [0] * pages
        self.changes = 0

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each held once from now on. Raises OutOfPages, and takes none then."""
        if count > len(self._free):
            raise OutOfPages(f"{counted(count, 'page')} wanted, {len(self._free)} of {len(self._holders)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold each of these pages, which somebody holds already, once more."""
        self.changes += 1
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free: nobody can share it"
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Hold each of these pages once less; what nobody holds any more is free."""
        self.changes += 1
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def recount(self, held: Iterable[Sequence[int]]) -> None:
        """Believe the lists `held` alone: what stands in none of them is free."""
        self.changes += 1
        counts = Counter(page for pages in held for page in pages)
        self._holders = [counts[page] for page in range(len(self._holders))]
        self._free = [page for page in reversed(range(len(self._holders))) if not counts[page]]

    def assert_consistent(self, held: Iterable[Sequence[int]]) -> None:
        """Every page is free once, or held as often as it stands in the lists `held`."""
        counts = Counter(page for pages in held for page in pages)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        for page, holders in enumerate(self._holders):
            assert counts[page] == holders, f"page {page} is held {counts[page]} times, counted {holders}"
            assert (page in free) == (holders == 0), f"page {page} has {holders} holders"
