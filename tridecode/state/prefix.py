"""PrefixCache: which pages hold the K/V of which tokens, whoever computed them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ..layout import packed
from .pages import PagePool

TOKEN = 4  # bytes of one
HEAD_START = 64  # requests by which a page that was found again outlives one that was not


@dataclass(eq=False)
class Node:
    """A page of K/V that can be found: of `tokens`, int32 and at most a page of them, behind those of its parents.

    depth: pages up to and with it, 0 of a root, which has none. wanted: when it was last, by the cache's own clock, and
    a HEAD_START more if it was found then. users: requests that use it, or what stands behind it. entry: its number
    among those to go. gone: it is found no more.
    """

    page: int
    tokens: bytes
    parent: "Node | None"
    depth: int = 0
    wanted: int = 0
    users: int = 0
    entry: int = 0
    gone: bool = False
    children: dict[bytes, "Node"] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Of its tokens."""
        return len(self.tokens) // TOKEN


@dataclass(frozen=True)
class Match:
    """What the cache has of a prompt's beginning: whole pages, and then `common` tokens of a page that goes on in
    another way, or ends there."""

    nodes: tuple[Node, ...]
    tail: Node | None
    common: int

    @property
    def end(self) -> Node | None:
        """The last of all."""
        return self.tail or (self.nodes[-1] if self.nodes else None)

    @property
    def goes_on(self) -> bool:
        """Where nothing else has yet: a conversation's next turn does."""
        end = self.end
        return end is not None and not end.children and (end is not self.tail or self.common == end.count)

    @property
    def whole(self) -> "Match":
        """Without what is there of a page in part."""
        return Match(self.nodes, None, 0)

    def tokens(self, page: int) -> int:
        return len(self.nodes) * page + self.common


class PrefixCache:
    """A tree of pages, each found by the tokens before and in it. It holds each of its pages once; whoever uses one
    says so by `use`, until he uses another one or None, which keeps it and all before it from being evicted.

    page: positions in one. What goes first was not wanted for the longest time, counted in requests; what was found
    again has a HEAD_START, with what goes on behind it: so the questions beside a conversation, for its title or tags,
    do not push it out.

    Nodes enter and leave the tree in one step each, before their pages are shared and after which they are given back:
    whatever is interrupted, `recover` and PagePool.recount with `pages` make the counts right.
    """

    def __init__(self, pool: PagePool, page: int):
        self._pool, self._page = pool, page
        self._roots: dict[str, Node] = {}  # by salt
        self._clock = self._entries = 0
        self._nodes = self._idle = 0  # nodes in the tree, and of these those without users
        self._ends: list[tuple[int, int, Node]] = []  # a heap of those to go; some are outdated

    def match(self, ids: Sequence[int], salt: str = "") -> Match:
        """The most that is there of `ids`."""
        tokens, page = packed(ids).tobytes(), self._page * TOKEN
        node, found, first = self._roots.get(salt), [], 0
        while node and (child := node.children.get(tokens[first : first + page])):
            if len(child.tokens) < page:
                break
            node = child
            found.append(child)
            first += page
        tail, most, rest = None, 0, tokens[first : first + page]
        more = rest[:TOKEN]
        for child in node.children.values() if node else ():
            if len(rest) == most * TOKEN:
                break
            if child.tokens.startswith(more) and (common := _common(child.tokens, rest)) > most:
                tail, most, more = child, common, rest[: (common + 1) * TOKEN]
        return Match(tuple(found), tail, most)

    def find(self, match: Match) -> None:
        """A request goes on with what was matched: it is the latest wanted now."""
        self._clock += 1
        for node in (*match.nodes, *filter(None, [match.tail])):
            node.wanted = self._clock + HEAD_START
            self._may_go(node)

    def use(self, node: Node | None, before: Node | None = None) -> None:
        """Keep the node and all in front of it, for one who used `before` until now: what is in front of both stays as
        it is. None, where nothing was found, is no node."""
        fork = _fork(node, before)
        while node is not None and node is not fork and node.parent is not None:
            self._idle -= not (node.users or node.gone)
            node.users += 1
            node = node.parent
        while before is not None and before is not fork and before.parent is not None:
            before.users -= 1
            self._idle += not (before.users or before.gone)
            self._pool.changes += 1
            self._may_go(before)
            before = before.parent

    def insert(
        self,
        ids: Sequence[int],
        pages: Sequence[int],
        salt: str = "",
        goes_on: bool = False,
        behind: Node | None = None,
    ) -> Node:
        """Let the K/V of `ids`, which `pages` hold, be found; returns the last node. Where their tokens are there
        already in a page that somebody uses, it stays. goes_on: as their Match did. behind: the node of their first
        whole pages, as far as it is known already; they are looked for only where it has gone."""
        if salt not in self._roots:  # of others, those that nothing is left of go
            self._roots = {other: root for other, root in self._roots.items() if root.children}
        node, known = self._roots.setdefault(salt, Node(-1, b"", None)), _path(behind)
        text, size = packed(ids).tobytes(), self._page * TOKEN
        wanted = self._clock + HEAD_START * goes_on
        for place, page in enumerate(pages):
            if place < len(known):
                child: Node | None = known[place]
            else:
                tokens = text[place * size : (place + 1) * size]
                if not tokens:
                    break
                child = node.children.get(tokens)
            if child is None:
                self._drop_beginnings(node, tokens)
                child = Node(page, tokens, node, node.depth + 1)
                node.children[tokens] = child
                self._nodes += 1
                self._idle += 1
                self._pool.share([page])
            elif child.page != page and self._pool.holders(child.page) == 1:
                # Nobody uses the old one: kept, it could not go as long as what stands behind it is in use.
                unused, child.page = child.page, page
                self._pool.share([page])
                self._pool.give_back([unused])
            child.wanted = max(child.wanted, wanted)
            self._may_go(child)
            node = child
        return node

    def _drop_beginnings(self, parent: Node, tokens: bytes) -> None:
        """Pages whose tokens the new one begins with are wanted no more."""
        for child in [child for child in parent.children.values() if tokens.startswith(child.tokens)]:
            self._remove(child)

    def evict(self, pages: int) -> int:
        """Give back up to that many pages that nobody uses, the longest unwanted first, ends before beginnings; returns
        how many."""
        given = 0
        while given < pages and self._ends:
            entry = heappop(self._ends)
            if self._current(entry):
                self._remove(entry[2])
                given += 1
        return given

    def evictable(self) -> int:
        """Pages that `evict` could give back."""
        return self._idle

    def _may_go(self, node: Node) -> None:
        """Put it among those to go, if nobody uses it and nothing stands behind it."""
        if not (node.children or node.users or node.gone):
            self._entries += 1
            node.entry = self._entries
            heappush(self._ends, (node.wanted, node.entry, node))
            if len(self._ends) > 2 * self._nodes + 64:  # most are outdated
                self._ends = list(filter(self._current, self._ends))
                heapify(self._ends)

    @staticmethod
    def _current(entry: tuple[int, int, Node]) -> bool:
        """Whether nothing has come between: no use, nothing behind it, no later entry."""
        _, number, node = entry
        return node.entry == number and not (node.children or node.users or node.gone)

    def hand_over(self, node: Node, with_more: bool = False) -> bool:
        """Let the page go to its user, who holds it beside the cache, if he is alone and nothing stands behind it, or
        with_more: with what does. They are found no more."""
        if node.users != 1 or self._pool.holders(node.page) != 2 or node.children and not with_more:
            return False
        for each in list(self._below(node)):
            self._remove(each)
        return True

    def forget(self, ids: Sequence[int], salt: str = "") -> None:
        """Let what `match` finds of `ids`, and all behind it, not be found again."""
        match = self.match(ids, salt)
        if first := match.nodes[0] if match.nodes else match.tail:
            for node in list(self._below(first)):
                self._remove(node)

    def recover(self) -> None:
        """After an interrupt: nobody uses anything, and whatever is in the tree can go again."""
        nodes = list(self._all())
        for node in nodes:
            node.users, node.gone = 0, False
        self._nodes = self._idle = len(nodes)
        self._ends = []
        for node in nodes:
            self._may_go(node)

    def clear(self) -> None:
        for root in list(self._roots.values()):
            for node in [node for node in self._below(root) if node is not root]:
                self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root is never removed"
        del parent.children[node.tokens]
        node.gone = True
        self._nodes -= 1
        self._idle -= not node.users
        self._pool.give_back([node.page])
        if parent.parent:
            self._may_go(parent)

    def _all(self) -> Iterator[Node]:
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
        return [node.page for node in self._all()]

    def assert_consistent(self, used: Iterable[Node | None] = ()) -> None:
        """Every node stands where its tokens say, only ends are less than a page, no page is there twice, and whoever
        uses one, of whom `used` are all, is counted in it and those before it; what can go is among those to go."""
        nodes, users = list(self._all()), Counter[int]()
        for node in used:
            while node is not None and node.parent is not None:
                users[id(node)] += 1
                node = node.parent
        waiting = {id(entry[2]) for entry in self._ends if self._current(entry)}
        assert len({node.page for node in nodes}) == len(nodes), "a page is in the tree twice"
        for node in nodes:
            assert node.parent and node.parent.children[node.tokens] is node and not node.gone
            assert 0 < node.count <= self._page
            assert node.count == self._page or not node.children, "tokens follow those of half a page"
            assert node.users == users[id(node)], f"page {node.page} has {users[id(node)]} users, counted {node.users}"
            assert node.users or node.children or id(node) in waiting, f"page {node.page} would never go"
        assert self._nodes == len(nodes) and self._idle == sum(not node.users for node in nodes)


def _fork(one: Node | None, other: Node | None) -> Node | None:
    """The last node that is, or is in front of, both; None where nothing is."""
    while one is not other:
        if one is None or other is None:
            return None
        if one.depth >= other.depth:
            one = one.parent
        else:
            other = other.parent
    return one


def _path(node: Node | None) -> list[Node]:
    """The pages up to and with this one, none if it has gone."""
    path = []
    while node is not None and node.parent is not None and not node.gone:
        path.append(node)
        node = node.parent
    return path[::-1]


def _common(one: bytes, other: bytes) -> int:
    """Leading tokens that both have."""
    pairs = zip(memoryview(one).cast("i"), memoryview(other).cast("i"))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) // TOKEN)
