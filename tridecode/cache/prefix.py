"""PrefixCache: which pages hold the K/V of which tokens, whoever computed them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .pages import PagePool


@dataclass(eq=False)
class Node:
    """A page of K/V that can be found: of `tokens`, at most a page of them, behind those of its parents.

    used: when it was last wanted, by the cache's own clock.
    """

    page: int
    tokens: tuple[int, ...]
    parent: "Node | None"
    used: int = 0
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """What the cache has of a prompt's beginning: whole pages, and then `common` tokens of a page that goes on in
    another way, or ends there."""

    nodes: tuple[Node, ...]
    tail: Node | None
    common: int

    def tokens(self, page: int) -> int:
        return len(self.nodes) * page + self.common


class PrefixCache:
    """A tree of pages, each found by the tokens before and in it. It holds each of its pages once; whoever uses one
    holds it once more, and so keeps it from being evicted.

    page: positions in one. Nodes enter and leave the tree in one step each, before their pages are shared and after
    which they are given back: whatever is interrupted, PagePool.recount with `pages` makes the counts right.
    """

    def __init__(self, pool: PagePool, page: int):
        self._pool, self._page = pool, page
        self._roots: dict[str, Node] = {}  # by salt
        self._clock = self._entries = 0
        self._ends: list[tuple[int, int, Node]] = []  # a heap of those to go, by when they were used; some are outdated

    def match(self, ids: Sequence[int], salt: str = "") -> Match:
        """The most that is there of `ids`; what it finds is now the latest used."""
        self._clock += 1
        node, found, first = self._roots.get(salt), [], 0
        while node and (child := node.children.get(tuple(ids[first : first + self._page]))):
            if len(child.tokens) < self._page:
                break
            self._touch(child)
            node = child
            found.append(child)
            first += self._page
        tail, most = None, 0
        for child in node.children.values() if node else ():
            if (common := _common(child.tokens, ids, first)) > most:
                tail, most = child, common
        if tail:
            self._touch(tail)
        return Match(tuple(found), tail, most)

    def insert(self, ids: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Let the K/V of `ids`, which `pages` hold, be found. Where their tokens are there already in a page that
        somebody uses, it stays."""
        self._clock += 1
        node = self._roots.setdefault(salt, Node(-1, (), None))
        for place, page in enumerate(pages):
            tokens = tuple(ids[place * self._page : (place + 1) * self._page])
            if not tokens:
                return
            child = node.children.get(tokens)
            if child is None:
                if any(other.tokens[: len(tokens)] == tokens for other in node.children.values()):
                    return  # a page begins with them: they are found
                self._drop_beginnings(node, tokens)
                child = Node(page, tokens, node)
                node.children[tokens] = child
                self._pool.share([page])
            elif child.page != page and self._pool.holders(child.page) == 1:
                # Nobody uses the old one: kept, it could not go as long as what stands behind it is in use.
                unused, child.page = child.page, page
                self._pool.share([page])
                self._pool.give_back([unused])
            self._touch(child)
            node = child

    def _drop_beginnings(self, parent: Node, tokens: tuple[int, ...]) -> None:
        """Pages whose tokens the new one begins with are wanted no more."""
        for child in [child for child in parent.children.values() if len(child.tokens) < len(tokens)]:
            if child.tokens == tokens[: len(child.tokens)]:
                self._remove(child)

    def evict(self, pages: int) -> int:
        """Give back up to that many pages that nobody uses, the longest unused first, ends before beginnings; returns
        how many."""
        given, in_use = 0, []
        while given < pages and self._ends:
            entry = heappop(self._ends)
            used, _, node = entry
            if node.children or node.used != used or node.parent.children.get(node.tokens) is not node:
                continue  # it has been wanted or removed since, or something goes on behind it
            if self._pool.holders(node.page) > 1:
                in_use.append(entry)
                continue
            self._remove(node)
            given += 1
        for entry in in_use:
            heappush(self._ends, entry)
        return given

    def evictable(self) -> int:
        """Pages that `evict` could give back: those behind which none is in use."""
        kept, count = set(), 0
        for node in self._nodes():  # ends first
            if node in kept or self._pool.holders(node.page) > 1:
                kept.add(node.parent)
            else:
                count += 1
        return count

    def _touch(self, node: Node) -> None:
        node.used = self._clock
        if not node.children:
            self._entries += 1
            heappush(self._ends, (node.used, self._entries, node))

    def hand_over(self, node: Node) -> bool:
        """Let the page go to the one who holds it beside the cache, if there is but one and nothing stands behind it:
        it is found no more."""
        if node.children or self._pool.holders(node.page) != 2:
            return False
        self._remove(node)
        return True

    def forget(self, ids: Sequence[int], salt: str = "") -> None:
        """Let what `match` finds of `ids`, and all behind it, not be found again."""
        match = self.match(ids, salt)
        if first := match.nodes[0] if match.nodes else match.tail:
            for node in list(self._below(first)):
                self._remove(node)

    def recover(self) -> None:
        """After an interrupt: whatever is in the tree can go again."""
        nodes = [node for node in self._nodes() if not node.children]
        self._ends = sorted((node.used, place, node) for place, node in enumerate(nodes))
        self._entries = len(nodes)

    def clear(self) -> None:
        for root in list(self._roots.values()):
            for node in [node for node in self._below(root) if node is not root]:
                self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        del parent.children[node.tokens]
        self._pool.give_back([node.page])
        if parent.parent and not parent.children:
            self._entries += 1
            heappush(self._ends, (parent.used, self._entries, parent))

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from (node for node in self._below(root) if node is not root)

    def _below(self, node: Node) -> Iterator[Node]:
        """The node and all behind it, ends first."""
        order, stack = [], [node]
        while stack:
            order.append(stack.pop())
            stack.extend(order[-1].children.values())
        return reversed(order)

    def pages(self) -> list[int]:
        """Those that it holds."""
        return [node.page for node in self._nodes()]

    def assert_consistent(self) -> None:
        """Every node stands where its tokens say, only ends are less than a page, and no page is there twice."""
        pages = self.pages()
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        for node in self._nodes():
            assert node.parent.children[node.tokens] is node and 0 < len(node.tokens) <= self._page
            assert len(node.tokens) == self._page or not node.children, "tokens follow those of half a page"


def _common(tokens: tuple[int, ...], ids: Sequence[int], first: int) -> int:
    """Leading tokens that a page and `ids` from `first` on have in common."""
    most = min(len(tokens), len(ids) - first)
    return next((i for i in range(most) if tokens[i] != ids[first + i]), max(most, 0))
