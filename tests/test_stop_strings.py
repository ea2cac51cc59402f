import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_jax.stop_strings import StopStrings


def run(stops, pieces, **options):
    """Push all pieces; return what came out of each, the rest, and the match."""
    matcher = StopStrings(stops, **options)
    out = [matcher.push(piece) for piece in pieces]
    return out, matcher.finish(), matcher.matched


def test_match_across_pieces():
    assert run(["END"], ["one E", "N", "D two", "more"]) == (["one ", "", "", ""], "", "END")


def test_match_is_given_out_on_request():
    out = run(["END"], ["one E", "ND two"], include_in_output=True)
    assert out == (["one ", "END"], "", "END")


def test_only_a_possible_beginning_is_held_back():
    assert run(["aab"], ["xa", "a", "a", "c"]) == (["x", "", "a", "aac"], "", None)
    assert run(["\n\n"], ["line\n", "next\n"]) == (["line", "\nnext"], "\n", None)


def test_first_complete_stop_wins():
    assert run(["bcd", "bc"], ["abcd"]) == (["a"], "", "bc")
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "", "bc")


def test_longest_wins_among_those_complete_together():
    assert run(["c", "abc", "bc"], ["xabc"]) == (["x"], "", "abc")


def test_no_stops_pass_everything():
    assert run([], ["a", "b"]) == (["a", "b"], "", None)


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["a", ""])


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
    include=st.booleans(),
)
def test_streaming_equals_searching_the_whole_text(stops, pieces, include):
    whole = "".join(pieces)
    ends = [(whole.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    expected, match = whole, None
    if ends:
        end, _, match = min(ends)
        expected = whole[:end] if include else whole[: end - len(match)]
    out, rest, matched = run(stops, pieces, include_in_output=include)
    assert ("".join(out) + rest, matched) == (expected, match)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    text=st.text("abc", max_size=12),
)
def test_held_back_text_is_as_short_as_can_be(stops, text):
    matcher = StopStrings(stops)
    given_out = ""
    for position, character in enumerate(text, start=1):
        given_out += matcher.push(character)
        if matcher.matched is not None:
            return
        seen = text[:position]
        longest = max(
            length
            for length in range(len(seen) + 1)
            if any(stop.startswith(seen[len(seen) - length :]) for stop in stops)
        )
        assert given_out == seen[: len(seen) - longest]
