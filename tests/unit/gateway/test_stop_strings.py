"""Stop strings, character by character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.stop_strings import StopMatch, StopMatcher, StopStrings


def held_after(stops: list[str], text: str) -> int:
    matcher = StopMatcher(StopStrings(stops))
    assert matcher.feed(text) is None
    return matcher.num_held_chars


def test_stop_over_several_pieces_is_found_with_its_last_one() -> None:
    matcher = StopMatcher(StopStrings([" 4 5 6 7"]))
    assert [matcher.feed(piece) for piece in (" 3", " 4", " 5", " 6")] == [None] * 4
    assert matcher.num_held_chars == len(" 4 5 6")
    assert matcher.feed(" 7 8") == StopMatch(" 4 5 6 7", end=2)


def test_only_what_can_still_match_is_held() -> None:
    assert held_after([" 4 5 9"], " 3 4 5") == len(" 4 5")
    assert held_after([" 4 5 9"], " 3 4 5 6") == 0
    assert held_after([" 4 5 9"], " 3 4 5 ") == len(" 4 5 ")
    assert held_after(["aab"], "aaaa") == 2
    assert held_after(["zzzzzz"], "the lazy") == 0


def test_of_stops_that_begin_alike_the_shortest_wins() -> None:
    matcher = StopMatcher(StopStrings([" 4 5 6", " 4 5", " 4"]))
    assert matcher.feed(" 3 4 5 6") == StopMatch(" 4", end=4)


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(StopStrings(["c", "abc", "bc"])).feed("xabc") == StopMatch("abc", end=4)


def test_failed_match_may_contain_the_beginning_of_the_right_one() -> None:
    assert StopMatcher(StopStrings(["aab"])).feed("aaab") == StopMatch("aab", end=4)
    assert StopMatcher(StopStrings(["abcd", "bce"])).feed("abce") == StopMatch("bce", end=4)


texts = st.text(alphabet="ab", max_size=12)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(stop_lists, st.lists(texts, max_size=4))
def test_match_is_the_same_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    text, read = "".join(pieces), ""
    expected = _first_completed(stops, text)
    matcher = StopMatcher(StopStrings(stops))
    for piece in pieces:
        match = matcher.feed(piece)
        if match is not None:
            assert (len(read) + match.end, match.stop) == expected
            return
        read += piece
        assert matcher.num_held_chars == _longest_held(stops, read)
    assert expected is None


def _first_completed(stops: list[str], text: str) -> tuple[int, str] | None:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def _longest_held(stops: list[str], text: str) -> int:
    return max(len(stop[:k]) for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]))
