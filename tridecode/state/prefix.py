"""PrefixCache: a tree of K/V pages and of snapshots of recurrent state, indexed by the tokens before them."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from ..layout import packed
from .pages import PagePool
from .snapshots import Snapshot, SnapshotPool

TOKEN = 4  # bytes of a token id
REUSE_BONUS = 64  # a reused page is evicted as if its last use were this many requests more recent


@dataclass(eq=False)
class Node:
    """A page of K/V in the prefix tree.

    Args:
        page: number of the page; -1 for a root.
        tokens: its tokens as int32 bytes, at most a page of them. They follow the tokens of its ancestors.
        parent: the node of the preceding page.
        depth: number of pages from the root to this node, inclusive; 0 for a root.
        priority: the clock of the cache when the node was last used, plus REUSE_BONUS if it was reused. Nodes of the
            lowest priority are evicted first.
        users: number of requests that use the node or a descendant.
        entry: number of its latest entry in the heap of evictable nodes.
        removed: whether the node has left the tree.
        children: nodes of the following pages, by their tokens.
        snapshots: snapshots at positions of the page, by the number of tokens before the position. The end of the page
            is one of them, its beginning is not.
    """

    page: int
    tokens: bytes
    parent: "Node | None"
    depth: int = 0
    priority: int = 0
    users: int = 0
    entry: int = 0
    removed: bool = False
    children: dict[bytes, "Node"] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of its tokens."""
        return len(self.tokens) // TOKEN


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of a prompt.

    Args:
        nodes: nodes whose whole pages match.
        tail: a node whose page matches in part, or None.
        common: number of leading tokens of `tail` that match.
        snapshot: a snapshot at the end of the match, if the cache has snapshots. None: the match is empty.
        pages: the longest prefix that has pages, if the cache has snapshots.
    """

    nodes: tuple[Node, ...]
    tail: Node | None
    common: int
    snapshot: Snapshot | None = None
    pages: "Match | None" = None

    @property
    def end(self) -> Node | None:
        """The last node of the match, or None if nothing matches."""
        return self.tail or (self.nodes[-1] if self.nodes else None)

    @property
    def extends_leaf(self) -> bool:
        """Whether the match covers a leaf of the tree completely, as the next turn of a conversation does."""
        end = self.end
        return end is not None and not end.children and (end is not self.tail or self.common == end.count)

    @property
    def whole_pages(self) -> "Match":
        """The match without the partly matching page."""
        return replace(self, tail=None, common=0)

    def tokens(self, page: int) -> int:
        """Return the number of matching tokens, for pages of `page` positions."""
        return len(self.nodes) * page + self.common


class PrefixCache:
    """A tree of K/V pages. A page is identified by its tokens and all tokens before it.

    The tree holds one reference to each of its pages. A request registers the last node that it uses by `use`. A node
    with users, and its ancestors, cannot be evicted.

    Eviction removes leaves of the lowest priority first, that is, those unused for the largest number of requests. A
    node that was reused gets a REUSE_BONUS, and so do the nodes that a request adds after it. Therefore requests for a
    conversation's title or tags, which are sent once, do not evict the conversation.

    A node enters or leaves the tree in one operation. Its page is shared after it enters, and released after it leaves.
    Therefore `recover` and PagePool.recount with `pages` restore all counts after an interrupt.

    Args:
        pool: the reference counts of the pages.
        page: positions in a page.
        snapshots: the records of snapshots, for models with recurrent state. Then a match ends at a snapshot.
    """

    def __init__(self, pool: PagePool, page: int, snapshots: SnapshotPool | None = None):
        self._pool, self._page, self._snapshots = pool, page, snapshots
        self._roots: dict[Hashable, Node] = {}  # by salt
        self._clock = self._entries = 0  # the clock counts requests
        self._nodes = self._idle = 0  # number of nodes in the tree, and of nodes without users
        self._evictable: list[tuple[int, int, Node]] = []  # a heap (priority, entry, leaf); some entries are outdated

    def match(self, ids: Sequence[int], salt: Hashable = "") -> Match:
        """Return the longest cached prefix of `ids` among requests with the same salt.

        For models with recurrent state, the prefix ends at a snapshot.
        """
        match = self._match_pages(ids, salt)
        return match if self._snapshots is None else self._up_to_snapshot(match, ids, salt)

    def _up_to_snapshot(self, match: Match, ids: Sequence[int], salt: Hashable) -> Match:
        """Return the longest prefix of `match`, a match of pages, that ends at a snapshot.

        The page that contains the end of the match may have siblings that match less, but have a snapshot.
        """
        first = len(match.nodes) * self._page
        rest = packed(ids).tobytes()[first * TOKEN : (first + self._page) * TOKEN]
        parent = match.nodes[-1] if match.nodes else self._roots.get(salt)
        ends = [
            (at, child)
            for child in (parent.children.values() if parent else ())
            if child.snapshots and (limit := first + _common(child.tokens, rest))
            for at in child.snapshots
            if at <= limit
        ]
        if not ends:
            ends = next(([(at, node) for at in node.snapshots] for node in reversed(match.nodes) if node.snapshots), [])
        if not ends:
            return Match((), None, 0, None, match)
        at, node = max(ends, key=lambda end: end[0])
        whole, common = divmod(at, self._page)
        return Match(match.nodes[:whole], node if common else None, common, node.snapshots[at], match)

    def _match_pages(self, ids: Sequence[int], salt: Hashable) -> Match:
        """Return the longest prefix of `ids` that has pages."""
        tokens, page = packed(ids).tobytes(), self._page * TOKEN
        node, nodes, first = self._roots.get(salt), [], 0
        while node and (child := node.children.get(tokens[first : first + page])):
            if len(child.tokens) < page:
                break
            node = child
            nodes.append(child)
            first += page
        tail, matched, rest = None, 0, tokens[first : first + page]
        longer = rest[:TOKEN]  # a child must begin with this to match more tokens than `tail` does
        for child in node.children.values() if node else ():
            if len(rest) == matched * TOKEN:
                break
            if child.tokens.startswith(longer) and (common := _common(child.tokens, rest)) > matched:
                tail, matched, longer = child, common, rest[: (common + 1) * TOKEN]
        return Match(tuple(nodes), tail, matched)

    def touch(self, match: Match) -> None:
        """Raise the priority of the matching nodes, because a request reuses them."""
        self._clock += 1
        for node in (*match.nodes, *filter(None, [match.tail])):
            node.priority = self._clock + REUSE_BONUS
            self._track_evictable(node)
        if self._snapshots and match.snapshot:
            self._snapshots.hits += 1
            if match.snapshot.node is not None:
                self._snapshots.use(match.snapshot)

    def use(self, node: Node | None, before: Node | None = None) -> None:
        """Move one user from node `before` to `node`, either of which may be None.

        The user protects its node and all ancestors of it from eviction. The counts of common ancestors do not change.
        """
        fork = _common_ancestor(node, before)
        while node is not None and node is not fork and node.parent is not None:
            self._idle -= not (node.users or node.removed)
            node.users += 1
            node = node.parent
        while before is not None and before is not fork and before.parent is not None:
            before.users -= 1
            self._idle += not (before.users or before.removed)
            self._pool.changes += 1
            self._track_evictable(before)
            before = before.parent

    def insert(
        self,
        ids: Sequence[int],
        pages: Sequence[int],
        salt: Hashable = "",
        extends_leaf: bool = False,
        known_node: Node | None = None,
        snapshots: Sequence[Snapshot] = (),
    ) -> Node:
        """Add the K/V of `ids`, which are in `pages`, to the tree; return the last node.

        If the tree already has a page with the same tokens that a request uses, that page stays.

        Args:
            extends_leaf: Match.extends_leaf of the match that the request began with.
            known_node: a node that the first pages of `ids` belong to. These pages are not searched again, unless the
                node was removed.
            snapshots: snapshots at positions up to the end of `ids`, which the tree owns from now on.
        """
        if salt not in self._roots:  # drop the empty roots of other salts
            self._roots = {other: root for other, root in self._roots.items() if root.children}
        node, known = self._roots.setdefault(salt, Node(-1, b"", None)), _path(known_node)
        text, size = packed(ids).tobytes(), self._page * TOKEN
        priority = self._clock + REUSE_BONUS * extends_leaf
        for place, page in enumerate(pages):
            if place < len(known):
                child: Node | None = known[place]
            else:
                tokens = text[place * size : (place + 1) * size]
                if not tokens:
                    break
                child = node.children.get(tokens)
            if child is None:
                older = self._remove_shorter_pages(node, tokens)
                child = Node(page, tokens, node, node.depth + 1)
                node.children[tokens] = child
                for snapshot in older:
                    self._attach(child, snapshot)
                self._nodes += 1
                self._idle += 1
                self._pool.share([page])
            elif child.page != page and self._pool.holders(child.page) == 1:
                # Replace the unused old page. Otherwise it could not be evicted while its descendants are in use.
                unused, child.page = child.page, page
                self._pool.share([page])
                self._pool.release([unused])
            child.priority = max(child.priority, priority)
            self._track_evictable(child)
            node = child
        for snapshot in snapshots:
            owner = node
            while owner.parent and snapshot.position <= (owner.depth - 1) * self._page:
                owner = owner.parent
            self._attach(owner, snapshot)
        return node

    def _attach(self, node: Node, snapshot: Snapshot) -> None:
        """Give a snapshot to the node of its page, or free its record if the node has one at this position."""
        assert self._snapshots is not None
        other = node.snapshots.setdefault(snapshot.position, snapshot)
        other.node = node
        self._snapshots.use(other)
        if other.record != snapshot.record:
            self._snapshots.free(snapshot.record)

    def take_snapshots(self, node: Node, end: int = 0) -> list[Snapshot]:
        """Remove the snapshots from a node. Free their records, but return those at positions up to `end`."""
        taken, node.snapshots = list(node.snapshots.values()), {}
        for snapshot in taken:
            assert self._snapshots is not None
            self._snapshots.drop(snapshot)
            snapshot.node = None
            if snapshot.position > end:
                self._snapshots.free(snapshot.record)
        return [snapshot for snapshot in taken if snapshot.position <= end]

    def drop_snapshot(self) -> bool:
        """Free the record of the least recently used snapshot in the tree. Return False if the tree has no snapshot."""
        if self._snapshots is None or (oldest := self._snapshots.oldest) is None:
            return False
        assert oldest.node is not None
        del oldest.node.snapshots[oldest.position]
        self._snapshots.drop(oldest)
        self._snapshots.free(oldest.record)
        return True

    def _remove_shorter_pages(self, parent: Node, tokens: bytes) -> list[Snapshot]:
        """Remove children whose tokens are a prefix of `tokens`, because a new page replaces them.

        Returns their snapshots.
        """
        snapshots = []
        for child in [child for child in parent.children.values() if tokens.startswith(child.tokens)]:
            snapshots += self.take_snapshots(child, child.depth * self._page)
            self._remove(child)
        return snapshots

    def evict(self, pages: int) -> int:
        """Release up to `pages` unused pages, leaves of the lowest priority first; return their number."""
        evicted = 0
        while evicted < pages and self._evictable:
            entry = heappop(self._evictable)
            if self._is_current(entry):
                self._remove(entry[2])
                evicted += 1
        return evicted

    def evictable(self) -> int:
        """Return the number of pages that `evict` could release."""
        return self._idle

    def _track_evictable(self, node: Node) -> None:
        """Add the node to the heap of evictable nodes, if it is a leaf without users."""
        if not (node.children or node.users or node.removed):
            self._entries += 1
            node.entry = self._entries
            heappush(self._evictable, (node.priority, node.entry, node))
            if len(self._evictable) > 2 * self._nodes + 64:  # most entries are outdated
                self._evictable = list(filter(self._is_current, self._evictable))
                heapify(self._evictable)

    @staticmethod
    def _is_current(entry: tuple[int, int, Node]) -> bool:
        """Return whether a heap entry is valid: it is the last entry of its node, and the node is an unused leaf."""
        _, number, node = entry
        return node.entry == number and not (node.children or node.users or node.removed)

    def release_to_user(self, node: Node, with_descendants: bool = False, end: int = 0) -> list[Snapshot] | None:
        """Remove the node from the tree, so that its only user owns the page; return None if that is impossible.

        It is possible if the user and the tree hold the only references to the page, and if the node is a leaf. With
        `with_descendants` it may have descendants, which are removed too.

        Returns the snapshots of the node at positions up to `end`, which the user owns now.
        """
        if node.users != 1 or self._pool.holders(node.page) != 2 or node.children and not with_descendants:
            return None
        snapshots = self.take_snapshots(node, end)
        for member in list(self._subtree(node)):
            self._remove(member)
        return snapshots

    def forget(self, ids: Sequence[int], salt: Hashable = "") -> None:
        """Remove the nodes whose pages have the first tokens of `ids`, and all their descendants."""
        match = self._match_pages(ids, salt)
        if first := match.nodes[0] if match.nodes else match.tail:
            for node in list(self._subtree(first)):
                self._remove(node)

    def recover(self) -> None:
        """Reset all counts after an interrupt: no node has users, so every node of the tree is evictable."""
        nodes = list(self._all_nodes())
        for node in nodes:
            node.users, node.removed = 0, False
            for snapshot in node.snapshots.values():
                snapshot.node = node
        self._nodes = self._idle = len(nodes)
        self._evictable = []
        for node in nodes:
            self._track_evictable(node)

    def clear(self) -> None:
        """Remove all nodes."""
        for root in list(self._roots.values()):
            for node in [node for node in self._subtree(root) if node is not root]:
                self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a root is never removed"
        del parent.children[node.tokens]
        node.removed = True
        self._nodes -= 1
        self._idle -= not node.users
        self.take_snapshots(node)
        self._pool.release([node.page])
        if parent.parent:
            self._track_evictable(parent)

    def _all_nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from (node for node in self._subtree(root) if node is not root)

    def _subtree(self, node: Node) -> Iterator[Node]:
        """Return the node and all its descendants, children before parents."""
        order, stack = [], [node]
        while stack:
            order.append(stack.pop())
            stack.extend(order[-1].children.values())
        return reversed(order)

    def pages(self) -> list[int]:
        """Return all pages in the tree."""
        return [node.page for node in self._all_nodes()]

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots in the tree."""
        return [snapshot for node in self._all_nodes() for snapshot in node.snapshots.values()]

    def assert_consistent(self, used: Iterable[Node | None] = ()) -> None:
        """Check the structure and the counts of the tree.

        Each node is stored under its tokens, only leaves have less than a page of tokens, no page occurs twice, each
        user in `used` is counted in its node and all ancestors, and each unused leaf is in the heap.

        Args:
            used: for each user, the last node that it uses.
        """
        nodes, users = list(self._all_nodes()), Counter[int]()
        for node in used:
            while node is not None and node.parent is not None:
                users[id(node)] += 1
                node = node.parent
        waiting = {id(entry[2]) for entry in self._evictable if self._is_current(entry)}
        assert len({node.page for node in nodes}) == len(nodes), "a page is in the tree twice"
        for node in nodes:
            assert node.parent and node.parent.children[node.tokens] is node and not node.removed
            assert 0 < node.count <= self._page
            assert node.count == self._page or not node.children, "a page that is not full has children"
            assert node.users == users[id(node)], f"page {node.page} has {users[id(node)]} users, counted {node.users}"
            assert node.users or node.children or id(node) in waiting, f"page {node.page} would never be evicted"
            for at, snapshot in node.snapshots.items():
                assert snapshot.position == at and snapshot.node is node
                assert 0 < at - (node.depth - 1) * self._page <= node.count, "a snapshot is in the wrong node"
        assert self._nodes == len(nodes) and self._idle == sum(not node.users for node in nodes)


def _common_ancestor(one: Node | None, other: Node | None) -> Node | None:
    """Return the deepest common ancestor of both nodes (a node counts as its own ancestor), or None."""
    while one is not other:
        if one is None or other is None:
            return None
        if one.depth >= other.depth:
            one = one.parent
        else:
            other = other.parent
    return one


def _path(node: Node | None) -> list[Node]:
    """Return the nodes from the root's child to this node; an empty list if the node was removed."""
    path = []
    while node is not None and node.parent is not None and not node.removed:
        path.append(node)
        node = node.parent
    return path[::-1]


def _common(one: bytes, other: bytes) -> int:
    """Return the number of leading tokens that are equal in both."""
    pairs = zip(memoryview(one).cast("i"), memoryview(other).cast("i"))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) // TOKEN)
