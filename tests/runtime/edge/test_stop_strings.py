"""Stop strings against a search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.runtime.stop_strings import StopStrings

Pieces = list[tuple[str, bool]]
"""(text, whether a stop string may end here)."""


def reference(pieces: Pieces, stops: list[str]) -> tuple[str, str | None, int | None]:
    """(text shown, stop string, piece that completed it): the earliest start, then the shortest, in the whole text."""
    text = "".join(piece for piece, _ in pieces)
    owner = [place for place, (piece, _) in enumerate(pieces) for _ in piece]
    found = [
        (start, len(stop), stop)
        for stop in stops
        for start in range(len(text) - len(stop) + 1)
        if text.startswith(stop, start) and pieces[owner[start + len(stop) - 1]][1]
    ]
    if not found:
        return text, None, None
    start, length, stop = min(found)
    return text[:start], stop, owner[start + length - 1]


def run(pieces: Pieces, stops: list[str]) -> tuple[str, str | None, int | None, list[str]]:
    """The same through StopStrings, and what each piece let out."""
    watcher, shown = StopStrings(stops), []
    for text, may_stop in pieces:
        shown.append(watcher.push(text, may_stop=may_stop))
        if watcher.match is not None:
            break
    else:
        shown.append(watcher.finish())
    match = watcher.match
    return "".join(shown), match and match.stop, match and match.piece, shown


few_letters = st.text(alphabet="aab", max_size=6)
stop_lists = st.lists(st.text(alphabet="aab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


@settings(deadline=None, max_examples=800)
@given(pieces=st.lists(st.tuples(few_letters, st.just(True)), max_size=12), stops=stop_lists)
def test_any_split_gives_what_the_whole_text_gives(pieces: Pieces, stops: list[str]) -> None:
    """C23: nothing of the stop string gets out, near misses get out whole, the earliest start wins; overlaps and
    self-overlaps included, for a small alphabet makes many."""
    assert run(pieces, stops)[:3] == reference(pieces, stops)


@settings(deadline=None, max_examples=800)
@given(
    early=st.lists(st.text(alphabet="ab", max_size=4), max_size=3),
    late=st.lists(st.text(alphabet="ab", max_size=4), max_size=3),
    stops=st.lists(st.text(alphabet="ab", min_size=2, max_size=4), min_size=1, max_size=2, unique=True),
)
def test_matches_count_only_where_the_text_may_end(early: list[str], late: list[str], stops: list[str]) -> None:
    """min_tokens: an early match is text like any other, and may overlap one that counts."""
    pieces = [(text, False) for text in early] + [(text, True) for text in late]
    assert run(pieces, stops)[:3] == reference(pieces, stops)


@settings(deadline=None, max_examples=500)
@given(pieces=st.lists(st.tuples(few_letters, st.just(True)), max_size=12), stops=stop_lists)
def test_only_what_may_become_a_stop_string_is_held(pieces: Pieces, stops: list[str]) -> None:
    """A stream that is held back longer than needed stutters: all but the beginning of a stop string must be out."""
    watcher, text, shown = StopStrings(stops), "", ""
    for piece, _ in pieces:
        text += piece
        shown += watcher.push(piece)
        if watcher.match is not None:
            return
        held = text[len(shown) :]
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stop"),
    [
        (["a<", "|e", "nd|>", "b"], ["<|end|>"], ["a", "", ""], "<|end|>"),
        (["a<", "|e", "nx"], ["<|end|>"], ["a", "", "<|enx", ""], None),
        (["xabc", "d"], ["bc", "abcd"], ["x", ""], "abcd"),
        (["xabc", "e"], ["bc", "abcd"], ["x", "a"], "bc"),
        (["xabc"], ["bc", "abcd"], ["x", "a"], "bc"),
        (["abc"], ["abc", "ab"], [""], "ab"),
        (["ab", "c"], ["abc", "ab"], [""], "ab"),
        (["STOP"], ["STOP"], [""], "STOP"),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", ""], "aab"),
        (["text\n\nmore"], ["\n\n"], ["text"], "\n\n"),
        (["anything"], [], ["anything", ""], None),
    ],
)
def test_what_each_piece_lets_out(pieces: list[str], stops: list[str], shown: list[str], stop: str | None) -> None:
    got_text, got_stop, _, got_shown = run([(piece, True) for piece in pieces], stops)
    assert (got_shown, got_stop) == (shown, stop)
    assert got_text == "".join(shown)


def test_a_match_that_does_not_count_may_begin_one_that_does() -> None:
    """Two letters, then one: "aa" ends again with the third."""
    assert run([("aa", False), ("a", True)], ["aa"]) == ("a", "aa", 1, ["a", ""])


def test_the_completing_piece_is_known_before_the_decision() -> None:
    """While an earlier start may still win, the tokens behind the match are not the caller's yet."""
    watcher = StopStrings(["bc", "abcdefg"])
    assert watcher.push("ab") == ""
    assert watcher.end_piece is None
    watcher.push("c")
    assert (watcher.end_piece, watcher.match) == (1, None)
    watcher.push("d")
    assert watcher.end_piece == 1
    assert watcher.push("x") == "a"
    assert watcher.match is not None
    assert (watcher.match.stop, watcher.match.piece) == ("bc", 1)


def test_nothing_is_kept_of_a_long_text() -> None:
    """Memory must not grow with the text where nothing is held back."""
    watcher = StopStrings(["\n\n"])
    for _ in range(1000):
        assert watcher.push("word ") == "word "
    assert watcher._held == ""
