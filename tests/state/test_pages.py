"""The pool of K/V pages: every page is free, or held as often as it was taken and shared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridecode.state.pages import OutOfPages, PagePool


def test_pages_are_taken_from_the_lowest_and_come_back():
    pool = PagePool(4)
    first = pool.take(3)
    assert first == [0, 1, 2] and pool.free == 1
    pool.give_back([1])
    assert pool.free == 2 and pool.take(1) == [1]


def test_a_shared_page_is_free_once_everybody_gave_it_back():
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.share([page])
    pool.give_back([page])
    pool.assert_consistent([[page]])
    assert pool.free == 1
    pool.give_back([page])
    assert pool.free == 2


def test_what_is_not_there_is_not_taken():
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 3 free"):
        pool.take(2)
    assert pool.free == 1, "nothing was taken"


@pytest.mark.parametrize("use", ["share", "give_back"])
def test_a_free_page_is_nobodys(use):
    with pytest.raises(AssertionError, match="page 0 is free"):
        getattr(PagePool(1), use)([0])


@pytest.mark.parametrize("held", [[], [[0, 0], [1]], [[0], [1], [2]]])
def test_a_page_that_is_lost_or_held_too_often_is_found(held):
    pool = PagePool(3)
    pool.take(2)
    pool.assert_consistent([[0, 1]])
    with pytest.raises(AssertionError, match="page"):
        pool.assert_consistent(held)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give_back"]), st.integers(0, 7)), max_size=60))
def test_no_sequence_loses_a_page(actions):
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
                pool.give_back(pages)
                lists.pop(number % len(lists))
        pool.assert_consistent(lists)
