"""Tests of stop strings."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tridecode.text.stop_strings import StopStrings

LETTERS = st.text("ab-é", max_size=30)  # With few letters, partial and overlapping stop strings are frequent.
STOPS = st.lists(st.text("ab-é", min_size=1, max_size=4), max_size=3)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:])]


@settings(deadline=None, max_examples=500)
@example(text="aab", stops=["ab", "aab"], cuts=[1, 2])
@example(text="abab-", stops=["abab-", "ba"], cuts=[3])
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_stream_ends_at_first_complete_stop_string(text, stops, cuts):
    ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    longest = max(map(len, stops), default=1)
    for pieces in (pieces_of(text, cuts), list(text)):
        filter, shown, pushed = StopStrings(stops), "", ""
        for piece in pieces:
            shown, pushed = shown + filter.push(piece), pushed + piece
            assert expected.startswith(shown), "a part of a stop string was shown"
            assert filter.hit or len(pushed) - len(shown) < longest, "the filter held back more text than needed"
        assert filter.hit == (min(ends)[2] if ends else None)
        assert shown + filter.flush() == expected
