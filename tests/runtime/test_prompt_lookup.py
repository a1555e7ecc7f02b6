"""Guesses from the text itself, against a plain scan of the text."""

import random
import sys

import pytest

from castline.runtime.prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH, PromptLookup


def scan(tokens: list[int], count: int) -> tuple[tuple[int, ...], int] | None:
    """The slow reference: of all earlier places the longest match, the latest of equals."""
    best = None
    for place in range(SHORTEST_MATCH, len(tokens)):
        match = 0
        while match < min(LONGEST_MATCH, place) and tokens[place - 1 - match] == tokens[len(tokens) - 1 - match]:
            match += 1
        if match >= SHORTEST_MATCH and (best is None or match >= best[1]):
            best = place, match
    if best is None:
        return None
    period = len(tokens) - best[0]
    return tuple(tokens[best[0] + step % period] for step in range(count)), best[1]


@pytest.mark.parametrize("alphabet", [1, 2, 5, 50])
def test_equals_a_scan_of_the_text(alphabet, monkeypatch):
    """An index that misses places, or that matches the end with itself, guesses nothing or nonsense."""
    monkeypatch.setattr("castline.runtime.prompt_lookup._MAX_PLACES", 1000)
    rng = random.Random(alphabet)
    found = 0
    for _ in range(100):
        lookup = PromptLookup()
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, 12))]
        for _ in range(20):
            guess = lookup.guess(tokens, 5)
            assert (guess and (guess.token_ids, guess.match)) == scan(tokens, 5)
            found += guess is not None
            tokens += [rng.randrange(alphabet) for _ in range(rng.choice([1, 1, 3]))]
    assert found > 10


def test_a_loop_is_guessed_to_go_on():
    """The text ends in the middle of what the guess reads: it must not read past the end, nor stop short."""
    guess = PromptLookup().guess([9, 1, 2, 3, 1, 2], 7)
    assert guess is not None
    assert guess.token_ids == (3, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4, 5, 6], [1, 2, 3, 2, 1]])
def test_no_match_no_guess(tokens):
    """A single token that came before says too little; the end of the text is no match of itself."""
    assert PromptLookup().guess(tokens, 4) is None


def test_the_longest_match_wins_over_a_later_short_one():
    """A name that is spoken of in two places goes on as it did after the same words."""
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 1, 2, 3, 4]
    guess = PromptLookup().guess(tokens, 1)
    assert guess is not None
    assert (guess.token_ids, guess.match) == ((50,), 4)


def test_a_long_prompt_is_indexed_a_piece_at_a_time():
    """Indexing 8,000 tokens in one step would stall every stream by some milliseconds."""
    lookup = PromptLookup()
    tokens = [7, 8, 9, *range(10, 3000), 7, 8]
    steps = 0
    guess = lookup.guess(tokens, 1)
    assert guess is not None
    assert guess.token_ids == (9,), "what has been indexed is used at once"
    while lookup._num_indexed < len(tokens):
        before = lookup._num_indexed
        lookup.guess(tokens, 1)
        assert lookup._num_indexed - before <= 512
        steps += 1
    assert steps == 5


def test_the_cost_of_a_guess_does_not_grow_with_the_text():
    """A pair that came ten thousand times must not be compared ten thousand times."""
    lookup = PromptLookup()
    tokens = [token for number in range(5000) for token in (1, 2, 10 + number)] + [1, 2]
    while lookup._num_indexed < len(tokens):
        lookup.guess(tokens, 1)

    class Counting(list):
        num_reads = 0

        def __getitem__(self, key):
            Counting.num_reads += 1
            return super().__getitem__(key)

    assert lookup.guess(Counting(tokens), 3) is not None
    assert Counting.num_reads < 60


def test_memory_is_a_few_bytes_a_token():
    """The index must stay small beside the KV of the same tokens, which is kilobytes each."""
    lookup = PromptLookup()
    tokens = list(range(20_000))
    while lookup._num_indexed < len(tokens):
        lookup.guess(tokens, 1)
    entries = sum(sys.getsizeof(key) + sys.getsizeof(place) for key, place in lookup._last.items())
    size = sys.getsizeof(lookup._last) + sys.getsizeof(lookup._previous) + entries
    assert size / len(tokens) < 160
