"""Reference counts of the pool of K/V pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridecode.state.pages import OutOfPages, PagePool


def test_take_returns_the_lowest_free_pages():
    pool = PagePool(4)
    first = pool.take(3)
    assert first == [0, 1, 2] and pool.free == 1
    pool.release([1])
    assert pool.free == 2 and pool.take(1) == [1]


def test_shared_page_is_free_after_its_last_release():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share([page])
    pool.release([page])
    pool.assert_consistent([[page]])
    assert pool.free == 1
    pool.release([page])
    assert pool.free == 2


def test_take_raises_out_of_pages_and_takes_no_page():
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(OutOfPages, match="2 pages requested, 1 of 3 are free"):
        pool.take(2)
    assert pool.free == 1, "the failed call took a page"


@pytest.mark.parametrize("use", ["share", "release"])
def test_free_page_cannot_be_shared_or_released(use):
    with pytest.raises(AssertionError, match="page 0 is free"):
        getattr(PagePool(1), use)([0])


@pytest.mark.parametrize("references", [[], [[0, 0], [1]], [[0], [1], [2]]])
def test_assert_consistent_detects_wrong_counts(references):
    pool = PagePool(3)
    pool.take(2)
    pool.assert_consistent([[0, 1]])
    with pytest.raises(AssertionError, match="page"):
        pool.assert_consistent(references)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 7)), max_size=60))
def test_any_sequence_of_operations_keeps_counts_consistent(actions):
    pool, lists = PagePool(8), []
    for action, number in actions:
        if action == "take":
            try:
                lists.append(pool.take(number))
            except OutOfPages:
                assert number > 8 - len({page for pages in lists for page in pages})
        elif lists:
            pages = lists[number % len(lists)]
            if action == "share":
                pool.share(pages)
                lists.append(list(pages))
            else:
                pool.release(pages)
                lists.pop(number % len(lists))
        pool.assert_consistent(lists)
