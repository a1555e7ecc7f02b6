"""The plan of one step: plain data from the scheduler to the batch builder, none of which ever changes."""

from collections.abc import Sequence

import msgspec


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):  # made by the hundred in a step: four times as fast
    """The part one sequence has in a step: tokens ``start .. start + len(token_ids)`` are computed."""

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    """Tokens of the sequence computed before this step."""
    block_ids: tuple[int, ...]
    """Block table: enough for start + len(token_ids) tokens. The same object as long as a sequence's stays the same."""
    samples: bool
    """The step reaches the sequence's last token, so a next token is to be sampled from its last row."""
    all_logits: bool = False
    """Logits of every row are wanted (prompt logprobs)."""
    num_drafts: int = 0
    """The last tokens of token_ids that are guesses. Logits of the row before them and of each of theirs are wanted,
    and only the guesses that the model would have chosen itself are kept."""


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    scheduled: Sequence[ScheduledSequence]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks copied, over all layers, before the step: copy on write."""
    preempted: tuple[int, ...] = ()
    """seq_ids whose blocks were taken back."""

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.scheduled)
