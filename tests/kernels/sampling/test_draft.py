"""Drafts from earlier text: the kernel against its reference, on texts with near misses."""

import pytest
import torch
from check import check_op
from hypothesis import given, settings
from hypothesis import strategies as st
from util import CUDA, DEVICE, meta_rows

from tridecode import layout
from tridecode.kernels.sampling.draft import BLOCK, DRAFT

UNTOUCHED = 77
TEXT = [1, 2, 3, 1, 2]  # The position of the last token is 4.


def draft(
    *texts, trust=7, max_drafts=7, splits=4, limit=None, allocated=None, status=layout.RUN, known=0, flags=0, ngram=None
):
    """Check a launch with a row for each text; return the number of drafts and the tokens after the text, by row.

    The slots are in the opposite order of the rows. status: of the first row.
    """
    rows, capacity = len(texts), max(map(len, texts)) + 16
    meta = meta_rows(*(len(text) - 1 for text in texts))
    meta[:, layout.SLOT] = meta[:, layout.SLOT].flip(0)
    meta[:, layout.LIMIT] = limit or capacity + 1
    meta[:, layout.ALLOCATED] = allocated or capacity
    meta[:, layout.DRAFT_LIMIT], meta[:, layout.DRAFTS] = trust, UNTOUCHED
    meta[:, layout.N_KNOWN], meta[:, layout.FLAGS] = known, flags
    meta[0, layout.STATUS] = status
    tokens = torch.full((rows, capacity + 1), UNTOUCHED, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[rows - 1 - row, : len(text)] = torch.tensor(text)
    keys = torch.zeros(rows, splits, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    args = meta, tokens.to(DEVICE), keys, counter, max_drafts, ngram or layout.NGRAM
    launched, _ = check_op(DRAFT, args, outputs=(), accumulates=("meta", "tokens"), scratch=("keys",))
    after = [launched["tokens"][rows - 1 - row, len(text) :].tolist() for row, text in enumerate(texts)]
    return launched["meta"][:, layout.DRAFTS].tolist(), after


def test_draft_is_the_continuation_of_the_same_words():
    counts, (after,) = draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], trust=3)
    assert counts == [3] and after[:4] == [5, 6, 7, UNTOUCHED]


def test_longest_match_wins_and_then_the_latest():
    _, (after,) = draft([1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 3, 4, 70, 1, 2, 3, 4], trust=1)
    assert after[0] == 50, "the draft does not follow the match of four tokens"
    _, (after,) = draft([8, 3, 4, 60, 9, 3, 4, 70, 1, 3, 4], trust=1)
    assert after[0] == 70, "the draft does not follow the later of two equal matches"


def test_ngram_limits_the_length_of_a_match():
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 4, 70, 1, 2, 3, 4]
    first = {ngram: draft(text, trust=1, ngram=ngram)[1][0][0] for ngram in ((4, 2), (3, 3), (2, 2), (1, 1), (2, 1))}
    assert first == {(4, 2): 50, (3, 3): 50, (2, 2): 60, (1, 1): 70, (2, 1): 60}
    assert draft(text, ngram=(8, 5))[0] == [0] and draft([3, 3], ngram=(1, 1))[0] == [7]


@pytest.mark.parametrize("text, drafts", [([5, 6, 5, 6, 5, 6], [5, 6, 5, 6, 5]), ([9, 9, 9], [9, 9, 9, 9])], ids=str)
def test_repetition_continues_beyond_the_end_of_the_text(text, drafts):
    counts, (after,) = draft(text, trust=len(drafts))
    assert counts == [len(drafts)] and after[: len(drafts)] == drafts


@pytest.mark.parametrize("text", [[3], [3, 3], [1, 2, 3, 4], [2, 1, 1]], ids=str)
def test_text_without_repetition_has_no_drafts(text):
    counts, (after,) = draft(text)
    assert counts == [0] and set(after) == {UNTOUCHED}


def test_drafts_end_at_the_last_page_and_at_the_limit():
    assert draft(TEXT, allocated=7)[0] == [2], "a wrong number of drafts for pages up to position 6"
    assert draft(TEXT, limit=7)[0] == [1], "a wrong number of drafts for a limit of 7 positions"
    assert draft(TEXT, limit=6)[0] == [0] and draft(TEXT, allocated=5)[0] == [0]


def test_number_of_drafts_is_the_trust_but_at_least_one():
    assert draft(TEXT, trust=9, max_drafts=3)[0] == [3] and draft(TEXT, trust=2)[0] == [2]
    assert draft(TEXT, trust=0)[0] == [1]


def test_known_tokens_are_drafts():
    counts, (after,) = draft(TEXT, known=8)
    assert counts == [3] and set(after) == {UNTOUCHED}
    assert draft(TEXT, known=8, max_drafts=2)[0] == [2] and draft(TEXT, known=5)[0] == [7]
    assert draft([5], known=4)[0] == [3], "known tokens of a text without repetition did not become drafts"


def test_masked_row_has_no_drafts():
    assert draft(TEXT, flags=layout.FLAG_MASK)[0] == [0] and draft(TEXT, flags=layout.FLAG_PENALTIES)[0] == [7]


def test_idle_row_has_no_drafts():
    counts, after = draft([1, 2, 1, 2], [1, 2, 1, 2], status=layout.STOP)
    assert counts == [UNTOUCHED, 7] and set(after[0]) == {UNTOUCHED}


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 3 * BLOCK - 1, *((32_000,) if CUDA else ())])
def test_matches_across_blocks_and_programs(length):
    for place in (3, BLOCK - 1, BLOCK, BLOCK + 1, length - 6):
        if place > length - 6:
            continue
        text = list(range(100, 100 + length))
        text[place - 3 : place + 2] = [1, 2, 3, 4, 55]
        text[-4:] = [1, 2, 3, 4]
        counts, (after,) = draft(text, trust=1)
        assert counts == [1] and after[0] == 55


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from([1, 4]), st.sampled_from([(4, 2), (3, 1), (5, 5)]))
def test_draft_matches_reference(texts, splits, ngram):
    draft(*texts, splits=splits, ngram=ngram)
