"""PrefixCache: what is found of a prompt, what goes first when pages run short, and that no page is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridecode.state import prefix
from tridecode.state.pages import PagePool
from tridecode.state.prefix import HEAD_START, PrefixCache

PAGE = 4


class Cache:
    """A pool of pages, a cache over it, and the requests that use both, as a scheduler would."""

    def __init__(self, pages=16):
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, PAGE)

    def compute(self, ids, salt=""):
        """A request with these tokens: what it uses of the cache; its pages are then the cache's."""
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
        self.pool.give_back(pages)
        return match

    def find(self, ids, salt=""):
        match = self.cache.match(ids, salt)
        self.cache.find(match)
        return match

    def check(self, held=(), used=()):
        self.cache.assert_consistent(used)
        self.pool.assert_consistent([self.cache.pages(), *held])


def found(match):
    return match.tokens(PAGE)


def test_whole_pages_and_the_beginning_of_one_are_found():
    cache = Cache()
    cache.compute(range(10))
    for ids, tokens in (
        (range(10), 10), (range(30), 10), (range(9), 9), (range(3), 3), ([0, 1, 2, 3, 9, 9], 4), ([5], 0), ([], 0),
        ([0, 1, 2, 3, 4, 5, 99, 7, 8], 6),
    ):  # fmt: skip
        assert found(cache.cache.match(list(ids))) == tokens, ids


def test_what_goes_on_takes_the_place_of_what_ended_there():
    cache = Cache()
    cache.compute(range(6))
    cache.compute(range(7))
    assert found(cache.cache.match(list(range(7)))) == 7 and len(cache.cache.pages()) == 2
    cache.compute([*range(6), 50])
    assert len(cache.cache.pages()) == 3, "two ways to go on"
    cache.check()


def test_tenants_do_not_see_each_other():
    cache = Cache()
    cache.compute(range(8), salt="a")
    assert found(cache.cache.match(list(range(8)), "b")) == 0 and found(cache.cache.match(list(range(8)), "a")) == 8


def test_nothing_is_kept_of_a_tenant_whose_pages_are_gone():
    cache = Cache()
    for i in range(50):
        cache.compute(range(8), salt=str(i))
        cache.cache.evict(2)
    assert len(cache.cache._roots) == 1 and not cache.cache.pages()


def test_ends_go_before_beginnings_and_the_longest_unused_first():
    cache = Cache()
    cache.compute(range(8))
    cache.compute([*range(4), 20, 21, 22, 23])
    cache.find(list(range(8)))
    assert cache.cache.evict(1) == 1 and found(cache.cache.match([*range(4), 20, 21])) == 4
    assert cache.cache.evict(1) == 1 and found(cache.cache.match(list(range(8)))) == 4
    assert cache.cache.evict(5) == 1 and cache.pool.free == 16
    cache.check()


def test_what_is_in_use_stays_with_all_before_it():
    cache = Cache()
    cache.compute(range(12))
    cache.compute([30, 31, 32, 33])
    match = cache.cache.match(list(range(8)))
    used = [node.page for node in match.nodes]
    cache.cache.use(match.end)
    cache.pool.share(used)
    assert cache.cache.evictable() == 2 and cache.cache.evict(9) == 2
    assert found(cache.cache.match(list(range(12)))) == 8
    cache.check([used], [match.end])
    cache.pool.give_back(used)
    cache.cache.use(None, match.end)
    assert cache.cache.evictable() == 2
    cache.cache.clear()
    assert cache.pool.free == 16


def test_what_must_not_be_found_again_goes_with_all_behind_it():
    cache = Cache()
    cache.compute(range(12))
    cache.compute([*range(8), 70, 71])
    cache.compute([30, 31, 32, 33])
    cache.cache.forget(list(range(12)))
    assert found(cache.cache.match(list(range(12)))) == 0 and cache.pool.free == 15
    cache.check()
    cache.cache.forget([30, 31, 5, 6])
    assert found(cache.cache.match([30, 31])) == 0, "the page whose beginning was found"


def test_an_interrupt_loses_no_page(monkeypatch):
    cache = Cache()
    for method in ("share", "give_back"):
        cache.compute(range(8))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cache.pool, method, lambda pages: (_ for _ in ()).throw(KeyboardInterrupt))
            pages = cache.pool.take(3)
            cache.cache.insert([*range(6), 9, 9, 9], pages) if method == "share" else cache.cache.evict(1)
        cache.cache.recover()
        cache.pool.recount([cache.cache.pages()])
        cache.check()


def test_what_was_found_again_outlives_newer_pages_that_were_not():
    """A conversation of three pages, and questions beside it that nobody asks a second time."""
    cache = Cache(pages=6)
    cache.compute(range(8))
    cache.compute(range(12))
    for i in range(20):
        cache.compute([100 + i] * 8)
        assert found(cache.cache.match(list(range(12)))) >= 8, "its two pages that were found"
    for i in range(HEAD_START):
        cache.compute([200 + i] * 8)
    assert found(cache.cache.match(list(range(12)))) == 0, "nobody has come back to it"
    cache.check()


def test_finding_and_evicting_does_not_take_longer_with_thousands_of_pages():
    """What the cache looks at, counted: a fraction of a page for each that goes."""
    cache = Cache(pages=8000)
    for i in range(1000):
        cache.compute([i] * 32)
    seen, current = [], cache.cache._current
    cache.cache._current = lambda entry: seen.append(entry) or current(entry)
    assert cache.cache.evictable() == 8000 and cache.cache.evict(4000) == 4000
    assert len(seen) < 8000
    for _ in range(10_000):
        cache.find([999] * 32)
    assert len(cache.cache._ends) < 10_000, "outdated entries go too"
    cache.check()


def test_many_pages_that_begin_alike_are_not_compared_token_by_token(monkeypatch):
    """Conversations behind one system prompt, which ends within a page."""
    cache = Cache(pages=1001)
    for i in range(1000):
        cache.compute([1, 2, 3, i])
    compared, common = [], prefix._common
    monkeypatch.setattr(prefix, "_common", lambda *both: compared.append(both) or common(*both))
    assert found(cache.cache.match([1, 2, 3, 1000])) == 3 and found(cache.cache.match([1, 2, 9])) == 2
    assert found(cache.cache.match([1, 2, 3])) == 3 and found(cache.cache.match([])) == 0
    assert len(compared) < 5


def test_of_a_text_that_goes_on_only_new_pages_are_looked_for():
    cache = Cache()
    ids, pages = list(range(22)), cache.pool.take(6)
    known = cache.cache.insert(ids[:16], pages[:4])
    cache.cache.insert([77] * 16 + ids[16:], pages, behind=known)
    assert found(cache.cache.match(ids)) == 22, "what stands in front of them is not looked at"
    cache.cache.forget(ids)
    cache.cache.insert(ids, pages, behind=known)
    assert found(cache.cache.match(ids)) == 22, "those that have gone are put there again"
    cache.check([pages])


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(IDS, st.sampled_from(["", "x"])), max_size=30))
def test_any_order_of_requests(requests):
    """With few tokens and few pages: what is found was computed before, by that tenant, and no page is lost."""
    cache, known = Cache(pages=8), []
    for ids, salt in requests:
        match = cache.compute(ids, salt)
        cache.check()
        best = max((common(ids, other) for other, tenant in known if tenant == salt), default=0)
        assert found(match) <= best
        again = cache.cache.match(ids, salt)
        assert found(again) == len(ids), "what was just computed is there"
        known.append((ids, salt))
    cache.cache.clear()
    assert cache.pool.free == 8


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(IDS, st.integers(0, 3), st.sampled_from(["", "", "evict", "forget"])), max_size=20))
def test_going_on_from_a_known_page_is_the_same_as_from_the_first(requests):
    """Requests that publish their whole pages, while others run, and at their end the rest: in one cache from the page
    that they use on, in the other one from the beginning, with a use and a leave for each move."""
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
                last = tree.insert(ids, pages, behind=known if short else None)
                if short:
                    tree.use(last, known)
                else:
                    tree.use(last)
                    tree.use(None, known)
                tree.use(None, last)
                cache.pool.give_back(pages)
        for place, cache in enumerate(caches):
            cache.check([begun[place][2] for begun in running], [begun[place][3] for begun in running])
        one, other = ([(n.tokens, n.page, n.depth, n.wanted, n.users) for n in c.cache._all()] for c in caches)
        assert one == other
        assert caches[0].cache.evictable() == caches[1].cache.evictable()


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
