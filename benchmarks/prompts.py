"""Prompts of an exact length, as token ids: every system gets the same tokens, and none spends time on tokenising."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from castline.server.bench.prompts import WORDS


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of common words that are one token each in the model's tokenizer."""

    word_ids: tuple[int, ...]

    @classmethod
    def read(cls, tokenizer_json: Path) -> "Vocabulary":
        """From a ``tokenizer.json``. Raises ValueError where it has no common word as one token."""
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
        encoded = (tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in WORDS)
        word_ids = tuple(ids[0] for ids in encoded if len(ids) == 1)
        if not word_ids:
            raise ValueError(f"{tokenizer_json}: no common English word is a single token")
        return cls(word_ids)

    def prompt(self, num_tokens: int, rng: Random) -> tuple[int, ...]:
        """*num_tokens* random words. Two draws share a few leading words at most, so no prefix cache has them."""
        return tuple(rng.choices(self.word_ids, k=num_tokens))
