"""PrefixCache: matching, eviction order, and consistent counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridecode.state import prefix
from tridecode.state.pages import PagePool
from tridecode.state.prefix import REUSE_BONUS, PrefixCache

PAGE = 4


class Cache:
    """A pool of pages with a cache, used by requests as the scheduler does."""

    def __init__(self, pages=16):
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, PAGE)

    def compute(self, ids, salt=""):
        """Simulate a request with the tokens `ids`, and add its pages to the cache. Return its match before that."""
        match = self.find(ids, salt)
        shared = [node.page for node in match.nodes]
        self.pool.share(shared)
        self.cache.use(match.end)
        own = -(-len(ids) // PAGE) - len(shared)
        if own > self.pool.free:
            self.cache.evict(own - self.pool.free)
        pages = shared + self.pool.take(own)
        self.cache.insert(ids, pages, salt)
        self.cache.use(None, match.end)
        self.pool.release(pages)
        return match

    def find(self, ids, salt=""):
        match = self.cache.match(ids, salt)
        self.cache.touch(match)
        return match

    def check(self, references=(), used=()):
        self.cache.assert_consistent(used)
        self.pool.assert_consistent([self.cache.pages(), *references])


def matched_tokens(match):
    return match.tokens(PAGE)


def test_match_returns_whole_pages_and_a_part_of_the_next():
    cache = Cache()
    cache.compute(range(10))
    for ids, tokens in (
        (range(10), 10), (range(30), 10), (range(9), 9), (range(3), 3), ([0, 1, 2, 3, 9, 9], 4), ([5], 0), ([], 0),
        ([0, 1, 2, 3, 4, 5, 99, 7, 8], 6),
    ):  # fmt: skip
        assert matched_tokens(cache.cache.match(list(ids))) == tokens, ids


def test_longer_page_replaces_its_own_prefix():
    cache = Cache()
    cache.compute(range(6))
    cache.compute(range(7))
    assert matched_tokens(cache.cache.match(list(range(7)))) == 7 and len(cache.cache.pages()) == 2
    cache.compute([*range(6), 50])
    assert len(cache.cache.pages()) == 3, "the tree does not hold both continuations"
    cache.check()


def test_match_is_limited_to_the_same_salt():
    cache = Cache()
    cache.compute(range(8), salt="a")
    assert (
        matched_tokens(cache.cache.match(list(range(8)), "b")) == 0
        and matched_tokens(cache.cache.match(list(range(8)), "a")) == 8
    )


def test_salt_without_pages_is_removed():
    cache = Cache()
    for i in range(50):
        cache.compute(range(8), salt=str(i))
        cache.cache.evict(2)
    assert len(cache.cache._roots) == 1 and not cache.cache.pages()


def test_evict_removes_least_recently_used_leaves_first():
    cache = Cache()
    cache.compute(range(8))
    cache.compute([*range(4), 20, 21, 22, 23])
    cache.find(list(range(8)))
    assert cache.cache.evict(1) == 1 and matched_tokens(cache.cache.match([*range(4), 20, 21])) == 4
    assert cache.cache.evict(1) == 1 and matched_tokens(cache.cache.match(list(range(8)))) == 4
    assert cache.cache.evict(5) == 1 and cache.pool.free == 16
    cache.check()


def test_used_node_and_its_ancestors_are_not_evicted():
    cache = Cache()
    cache.compute(range(12))
    cache.compute([30, 31, 32, 33])
    match = cache.cache.match(list(range(8)))
    used = [node.page for node in match.nodes]
    cache.cache.use(match.end)
    cache.pool.share(used)
    assert cache.cache.evictable() == 2 and cache.cache.evict(9) == 2
    assert matched_tokens(cache.cache.match(list(range(12)))) == 8
    cache.check([used], [match.end])
    cache.pool.release(used)
    cache.cache.use(None, match.end)
    assert cache.cache.evictable() == 2
    cache.cache.clear()
    assert cache.pool.free == 16


def test_forget_removes_the_match_and_its_descendants():
    cache = Cache()
    cache.compute(range(12))
    cache.compute([*range(8), 70, 71])
    cache.compute([30, 31, 32, 33])
    cache.cache.forget(list(range(12)))
    assert matched_tokens(cache.cache.match(list(range(12)))) == 0 and cache.pool.free == 15
    cache.check()
    cache.cache.forget([30, 31, 5, 6])
    assert matched_tokens(cache.cache.match([30, 31])) == 0, "forget kept the page that matches in part"


def test_recover_after_an_interrupt_restores_counts(monkeypatch):
    cache = Cache()
    for method in ("share", "release"):
        cache.compute(range(8))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cache.pool, method, lambda pages: (_ for _ in ()).throw(KeyboardInterrupt))
            pages = cache.pool.take(3)
            cache.cache.insert([*range(6), 9, 9, 9], pages) if method == "share" else cache.cache.evict(1)
        cache.cache.recover()
        cache.pool.recount([cache.cache.pages()])
        cache.check()


def test_reused_pages_outlive_newer_pages():
    """A conversation of three pages, and requests that are sent once."""
    cache = Cache(pages=6)
    cache.compute(range(8))
    cache.compute(range(12))
    for i in range(20):
        cache.compute([100 + i] * 8)
        assert matched_tokens(cache.cache.match(list(range(12)))) >= 8, "the cache evicted pages that had been reused"
    for i in range(REUSE_BONUS):
        cache.compute([200 + i] * 8)
    assert matched_tokens(cache.cache.match(list(range(12)))) == 0, (
        "the cache kept a conversation that was not used for a long time"
    )
    cache.check()


def test_eviction_cost_does_not_grow_with_the_number_of_pages():
    """Count the heap entries that the cache reads: at most two for each evicted page."""
    cache = Cache(pages=8000)
    for i in range(1000):
        cache.compute([i] * 32)
    seen, current = [], cache.cache._is_current
    cache.cache._is_current = lambda entry: seen.append(entry) or current(entry)
    assert cache.cache.evictable() == 8000 and cache.cache.evict(4000) == 4000
    assert len(seen) < 8000
    for _ in range(10_000):
        cache.find([999] * 32)
    assert len(cache.cache._evictable) < 10_000, "the heap kept outdated entries"
    cache.check()


def test_match_compares_few_of_many_similar_pages(monkeypatch):
    """Conversations with the same system prompt, which ends within a page."""
    cache = Cache(pages=1001)
    for i in range(1000):
        cache.compute([1, 2, 3, i])
    compared, common = [], prefix._common
    monkeypatch.setattr(prefix, "_common", lambda *both: compared.append(both) or common(*both))
    assert matched_tokens(cache.cache.match([1, 2, 3, 1000])) == 3 and matched_tokens(cache.cache.match([1, 2, 9])) == 2
    assert matched_tokens(cache.cache.match([1, 2, 3])) == 3 and matched_tokens(cache.cache.match([])) == 0
    assert len(compared) < 5


def test_insert_after_a_known_node_skips_its_pages():
    cache = Cache()
    ids, pages = list(range(22)), cache.pool.take(6)
    known = cache.cache.insert(ids[:16], pages[:4])
    cache.cache.insert([77] * 16 + ids[16:], pages, known_node=known)
    assert matched_tokens(cache.cache.match(ids)) == 22, (
        "insert compared again the tokens that precede the node it was given"
    )
    cache.cache.forget(ids)
    cache.cache.insert(ids, pages, known_node=known)
    assert matched_tokens(cache.cache.match(ids)) == 22, "insert did not insert removed nodes again"
    cache.check([pages])


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(IDS, st.sampled_from(["", "x"])), max_size=30))
def test_any_order_of_requests_keeps_the_cache_consistent(requests):
    """Random requests on few tokens and few pages: each match was computed before with the same salt."""
    cache, known = Cache(pages=8), []
    for ids, salt in requests:
        match = cache.compute(ids, salt)
        cache.check()
        best = max((common(ids, other) for other, tenant in known if tenant == salt), default=0)
        assert matched_tokens(match) <= best
        again = cache.cache.match(ids, salt)
        assert matched_tokens(again) == len(ids), "the prompt that was just computed does not match completely"
        known.append((ids, salt))
    cache.cache.clear()
    assert cache.pool.free == 8


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(IDS, st.integers(0, 3), st.sampled_from(["", "", "evict", "forget"])), max_size=20))
def test_insert_with_and_without_known_node_are_equal(requests):
    """Requests publish whole pages while others run, and the rest when they end.

    One cache inserts after the node that the request uses. The other one inserts from the root, with a separate use
    and release for each step.
    """
    caches, running = (Cache(pages=12), Cache(pages=12)), []
    for ids, keep, other in requests:
        begun = []
        for cache in caches:
            tree, whole = cache.cache, len(ids) // PAGE
            pages = cache.pool.take(min(-(-len(ids) // PAGE), cache.pool.free))
            ids = ids[: len(pages) * PAGE]
            known = tree.insert(ids[: whole * PAGE], pages[:whole])
            tree.use(known)
            if other:
                getattr(tree, other)(ids if other == "forget" else 1)
            begun.append((tree, ids, pages, known))
        running.append(begun)
        while len(running) > keep:
            for short, cache, (tree, ids, pages, known) in zip((True, False), caches, running.pop(0)):
                last = tree.insert(ids, pages, known_node=known if short else None)
                if short:
                    tree.use(last, known)
                else:
                    tree.use(last)
                    tree.use(None, known)
                tree.use(None, last)
                cache.pool.release(pages)
        for place, cache in enumerate(caches):
            cache.check([begun[place][2] for begun in running], [begun[place][3] for begun in running])
        one, other = ([(n.tokens, n.page, n.depth, n.priority, n.users) for n in c.cache._all_nodes()] for c in caches)
        assert one == other
        assert caches[0].cache.evictable() == caches[1].cache.evictable()


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
