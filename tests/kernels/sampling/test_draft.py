"""Drafts out of the text itself: the kernel against its reference, on texts made to mislead it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from util import CUDA, DEVICE, meta_rows

from tridecode import layout
from tridecode.kernels.sampling.draft import BLOCK, draft, draft_ref

POISON = 77


def run(texts, wanted=7, most=7, splits=4, limit=None, room=None, status=None, known=0, flags=0, ngram=layout.NGRAM):
    """(drafts of the kernel, of the reference, the tokens that both left) for a row for each text, rows and slots in
    opposite order."""
    rows, capacity = len(texts), max(map(len, texts)) + 16
    meta = meta_rows(*(len(text) - 1 for text in texts))
    meta[:, layout.SLOT] = meta[:, layout.SLOT].flip(0)
    meta[:, layout.LIMIT] = limit or capacity + 1
    meta[:, layout.ROOM] = room or capacity
    meta[:, layout.TRUST], meta[:, layout.DRAFTS] = wanted, POISON
    meta[:, layout.N_KNOWN], meta[:, layout.FLAGS] = known, flags
    if status is not None:
        meta[0, layout.STATUS] = status
    tokens = torch.full((rows, capacity + 1), POISON, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[rows - 1 - row, : len(text)] = torch.tensor(text)
    found, expected, meta_ref = tokens.to(DEVICE), tokens.to(DEVICE), meta.clone()
    keys = torch.full((rows, splits), -(2**62), dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    draft(meta, found, keys, counter, most, ngram)
    draft_ref(meta_ref, expected, keys, counter, most, ngram)
    assert not counter.any(), "the next launch would miscount"
    assert torch.equal(meta, meta_ref) and torch.equal(found, expected)
    counts = meta[:, layout.DRAFTS]
    return counts.tolist(), [found[rows - 1 - row, len(text) :].tolist() for row, text in enumerate(texts)]


def test_what_followed_the_same_words_before():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    counts, (following,) = run([text], wanted=3)
    assert counts == [3] and following[:4] == [5, 6, 7, POISON]


def test_the_longest_agreement_wins_and_then_the_latest():
    counts, (following,) = run([[1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 3, 4, 70, 1, 2, 3, 4]], wanted=1)
    assert following[0] == 50, "four tokens agree"
    counts, (following,) = run([[8, 3, 4, 60, 9, 3, 4, 70, 1, 3, 4]], wanted=1)
    assert following[0] == 70, "two agree at either place"


def test_as_many_must_agree_as_were_asked_for():
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 4, 70, 1, 2, 3, 4]
    found = {ngram: run([text], wanted=1, ngram=ngram)[1][0][0] for ngram in ((4, 2), (3, 3), (2, 2), (1, 1), (2, 1))}
    assert found == {(4, 2): 50, (3, 3): 50, (2, 2): 60, (1, 1): 70, (2, 1): 60}
    assert run([text], ngram=(8, 5))[0] == [0] and run([[3, 3]], ngram=(1, 1))[0] == [7]


def test_text_that_repeats_itself_goes_on_so():
    counts, (following,) = run([[5, 6, 5, 6, 5, 6]], wanted=5)
    assert counts == [5] and following[:5] == [5, 6, 5, 6, 5]
    counts, (following,) = run([[9, 9, 9]], wanted=4)
    assert following[:4] == [9, 9, 9, 9]


@pytest.mark.parametrize("text", [[3], [3, 3], [1, 2, 3, 4], [2, 1, 1]], ids=str)
def test_nothing_is_drafted_where_nothing_repeats(text):
    counts, (following,) = run([text])
    assert counts == [0] and set(following) == {POISON}


def test_drafts_end_where_pages_do_and_where_the_text_must():
    text = [1, 2, 3, 1, 2]  # position 4
    assert run([text], room=7)[0] == [2], "positions 5 and 6 have pages"
    assert run([text], limit=7)[0] == [1], "a draft at 5, and behind it one drawn token at 6"
    assert run([text], limit=6)[0] == [0] and run([text], room=5)[0] == [0]


def test_as_many_as_are_trusted_but_one_is_always_guessed():
    text = [1, 2, 3, 1, 2]
    assert run([text], wanted=9, most=3)[0] == [3] and run([text], wanted=2)[0] == [2]
    assert run([text], wanted=0)[0] == [1]


def test_given_tokens_are_drafts_as_they_stand():
    text = [1, 2, 3, 1, 2]  # position 4
    counts, (following,) = run([text], known=8)
    assert counts == [3] and set(following) == {POISON}
    assert run([text], known=8, most=2)[0] == [2] and run([text], known=5)[0] == [7]
    assert run([[5]], known=4)[0] == [3], "nothing need repeat"


def test_none_where_there_is_a_mask():
    text = [1, 2, 3, 1, 2]
    assert run([text], flags=layout.FLAG_MASK)[0] == [0] and run([text], flags=layout.FLAG_PENALTIES)[0] == [7]


def test_a_row_that_does_not_run_has_none():
    counts, following = run([[1, 2, 1, 2], [1, 2, 1, 2]], status=layout.STOP)
    assert counts == [POISON, 7] and set(following[0]) == {POISON}


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK - 1, *((32_000,) if CUDA else ())])
def test_long_texts(length):
    """Agreement across the ends of blocks and of the programs' shares."""
    for place in (3, BLOCK - 1, BLOCK, BLOCK + 1, length - 6):
        if place > length - 6:
            continue
        text = list(range(100, 100 + length))
        text[place - 3 : place + 2] = [1, 2, 3, 4, 55]
        text[-4:] = [1, 2, 3, 4]
        counts, (following,) = run([text], wanted=1)
        assert counts == [1] and following[0] == 55


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from([1, 4]), st.sampled_from([(4, 2), (3, 1), (5, 5)]))
def test_any_text(texts, splits, ngram):
    run(texts, splits=splits, ngram=ngram)
