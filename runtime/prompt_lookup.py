"""Guesses the next tokens of a text from what followed its last few tokens earlier: prompt lookup, also called n-gram
speculation (Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference").

The index is that of a sliding-window compressor (LZ77 as deflate does it): the last place of each pair of tokens, and
for each place the one before it with the same pair. A guess follows such a chain for a bounded number of places and
takes the longest match, so its cost depends neither on the length of the text nor on how often the pair occurs.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST_MATCH = 2
"""Tokens. A single token comes back too often to say what follows it."""
LONGEST_MATCH = 8
"""Longer matches are as good as certain: comparing more would tell nothing."""
_MAX_PLACES = 8
"""Places compared for a guess."""
_MAX_NEW_TOKENS = 512
"""Tokens indexed at a time, so that a long prompt delays no step; until it has caught up, guesses come from its
beginning."""


@dataclass(frozen=True, slots=True)
class Guess:
    token_ids: tuple[int, ...]
    match: int
    """Tokens before the guess that were equal, SHORTEST_MATCH to LONGEST_MATCH."""


class PromptLookup:
    """The index of one text, which only grows. Some 100 bytes a token, a small part of what its KV takes."""

    __slots__ = ("_last", "_num_indexed", "_previous")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """Where each pair came last: the place after it."""
        self._previous = array("i", (-1, -1))
        """By place: the place before it that follows the same pair, or -1."""
        self._num_indexed = SHORTEST_MATCH
        """Places up to here are indexed: none that nothing follows yet, for it would be the end's own match."""

    def guess(self, token_ids: Sequence[int], count: int) -> Guess | None:
        """What may come after *token_ids*, the text so far: 1 to *count* tokens, or None where nothing matches."""
        self._extend(token_ids)
        end = len(token_ids)
        if end <= SHORTEST_MATCH:
            return None
        place = self._last.get(token_ids[end - 2] << 32 | token_ids[end - 1], -1)
        best, longest, compared = -1, 0, 0
        while place >= 0 and compared < _MAX_PLACES:
            match = _match(token_ids, place, end)
            if match > longest:  # of equal matches the most recent
                best, longest = place, match
                if match == LONGEST_MATCH:
                    break
            place = self._previous[place]
            compared += 1
        return None if best < 0 else Guess(_follow(token_ids, best, count), longest)

    def _extend(self, token_ids: Sequence[int]) -> None:
        end = min(len(token_ids), self._num_indexed + _MAX_NEW_TOKENS)
        for place in range(self._num_indexed, end):
            pair = token_ids[place - 2] << 32 | token_ids[place - 1]
            self._previous.append(self._last.get(pair, -1))
            self._last[pair] = place
        self._num_indexed = max(self._num_indexed, end)


def _match(token_ids: Sequence[int], place: int, end: int) -> int:
    """Equal tokens before *place* and before *end*, of which two are known to be."""
    match = SHORTEST_MATCH
    limit = min(LONGEST_MATCH, place)
    while match < limit and token_ids[place - 1 - match] == token_ids[end - 1 - match]:
        match += 1
    return match


def _follow(token_ids: Sequence[int], place: int, count: int) -> tuple[int, ...]:
    """*count* tokens from *place*; past the end they repeat from *place*, as a text that is caught in a loop does."""
    period = len(token_ids) - place
    return tuple(token_ids[place + step % period] for step in range(count))
