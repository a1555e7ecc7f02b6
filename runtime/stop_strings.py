"""Finds stop strings in a text that arrives in pieces, and lets out only what can be part of none.

The stop string that starts first wins, whichever ends first; of two that start together, the shorter. So where a
match is complete while one that started before it may still become complete, the decision waits. Each stop string
is followed by the matcher of Knuth, Morris and Pratt, one step a character: the result is the same however the text
is cut into pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class _Matcher:
    """Follows one stop string through a text: `matched` characters of it end at the current position."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallback_table(stop)

    def feed(self, char: str) -> bool:
        """True where the stop string is complete with this character."""
        while self.matched and char != self.stop[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        if char == self.stop[self.matched]:
            self.matched += 1
        return self.matched == len(self.stop)

    def fall_back(self) -> None:
        """After a complete match that does not count: go on with the longest one that overlaps it."""
        self.matched = self._fallback[self.matched - 1]


def _fallback_table(stop: str) -> list[int]:
    """For each prefix of *stop*: the length of its longest proper prefix that is also its suffix."""
    table, length = [0], 0
    for char in stop[1:]:
        while length and char != stop[length]:
            length = table[length - 1]
        length += char == stop[length]
        table.append(length)
    return table


@dataclass(frozen=True, slots=True)
class Match:
    """A complete stop string."""

    start: int
    """Characters of the text before it."""
    stop: str
    piece: int
    """Which call of `push` completed it, counted from 0."""


class StopStrings:
    """One text. `push` its pieces, then `finish`; the texts returned, joined, are the text before the stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Stop strings are not empty."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._held_start = 0
        """Characters let out, which is where the held text starts."""
        self._length = 0
        """Characters matched against."""
        self._piece = -1
        self._best: Match | None = None
        self.match: Match | None = None
        """The winner, once decided; nothing may be pushed after."""

    @property
    def end_piece(self) -> int | None:
        """The piece that completed the best match so far; a better one can only be completed by a later piece."""
        return None if self._best is None else self._best.piece

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next piece and returns the text that is safe to show. A match that ends here counts if
        *may_stop*.
        """
        assert self.match is None, "the text has ended"
        self._piece += 1
        if not self._held and self._first_chars.isdisjoint(text):
            self._length += len(text)
            self._held_start = self._length
            return text
        self._held += text
        for char in text:
            self._advance(char, may_stop)
            if self._best is not None and self._earliest_partial() >= self._best.start:
                return self._decide(self._best)
        return self._release(self._earliest_partial())

    def finish(self) -> str:
        """No text follows: a complete match wins, a partial one is let out whole."""
        if self.match is not None:
            return ""
        return self._release(self._length) if self._best is None else self._decide(self._best)

    def _advance(self, char: str, may_stop: bool) -> None:
        self._length += 1
        for matcher in self._matchers:
            if matcher.feed(char):
                found = Match(self._length - len(matcher.stop), matcher.stop, self._piece)
                matcher.fall_back()
                if may_stop and (self._best is None or found.start < self._best.start):
                    self._best = found

    def _earliest_partial(self) -> int:
        """Where the first stop string that may still become complete starts; the end of the text if there is none."""
        return self._length - max((matcher.matched for matcher in self._matchers), default=0)

    def _decide(self, match: Match) -> str:
        self.match = match
        return self._release(match.start)

    def _release(self, end: int) -> str:
        """Held text up to character *end* of the text."""
        count = end - self._held_start
        released, self._held, self._held_start = self._held[:count], self._held[count:], end
        return released
