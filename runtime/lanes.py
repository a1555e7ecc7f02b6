"""Two waiting lines, so that long prompts neither starve the others nor are starved.

A prompt is **long** when, on arrival, more of its tokens than one step can take (``long_prompt_tokens``, by default the
token budget of a step) must be computed, that is, are not in the prefix cache. Per step:

1. decodes come first;
2. long prompts get at most ``long_share`` of the step's budget while anything else has work, all of it otherwise: this
   bounds how much a long prompt lengthens the steps of running streams. They are served before short prompts, so the
   share is also theirs for sure;
3. short prompts get the rest;
4. free places (max_num_seqs) go to the older of the two heads of line; a head that waits for blocks keeps its claim on
   them against younger requests of the other lane.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from castline.runtime.sequence import Sequence


class Lane(Enum):
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """Thresholds in tokens; ``long_share`` is a fraction of the token budget of a step."""

    long_prompt_tokens: int | None = None
    """None: max_num_batched_tokens."""
    long_share: float = 0.25

    def lane_of(self, num_uncached: int, step_budget: int) -> Lane:
        threshold = step_budget if self.long_prompt_tokens is None else self.long_prompt_tokens
        return Lane.LONG if num_uncached > threshold else Lane.SHORT

    def long_budget(self, step_budget: int) -> int:
        """Tokens of long prompts in a step that others share; at least one, so that they always advance."""
        return max(1, int(step_budget * self.long_share))


class LaneQueue:
    """Sequences that wait, in order. Every operation is O(1)."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator["Sequence"]:
        return iter(self._waiting.values())

    def first(self, count: int) -> list["Sequence"]:
        return list(islice(self._waiting.values(), count))

    def append(self, seq: "Sequence") -> None:
        self._waiting[seq.seq_id] = seq

    def append_front(self, seq: "Sequence") -> None:
        self._waiting[seq.seq_id] = seq
        self._waiting.move_to_end(seq.seq_id, last=False)

    def discard(self, seq: "Sequence") -> None:
        self._waiting.pop(seq.seq_id, None)
