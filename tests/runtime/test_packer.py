"""Batches that are written over the last step's, against the general way, which begins anew."""

import random

from castline.runtime.batch import StepBatch, pack
from castline.runtime.packer import StepPacker
from castline.runtime.plan import ScheduledSequence, StepPlan

BS = 4


class Sequences:
    """Some that decode, and what may happen to them between two steps."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.starts: dict[int, int] = {}
        self.tables: dict[int, tuple[int, ...]] = {}
        for seq_id in range(rng.randint(1, 5)):
            self.join(seq_id)

    def blocks(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(1, 500), count))

    def join(self, seq_id: int) -> None:
        self.starts[seq_id] = self.rng.randint(0, 13)
        self.tables[seq_id] = self.blocks(self.starts[seq_id] // BS + 1)

    def change(self) -> None:
        """One of them: a join, a leave, a block ahead of need or given back, another table, a step retried."""
        rng, seq_id = self.rng, self.rng.choice(list(self.starts))
        needed = self.starts[seq_id] // BS + 1
        match rng.randint(0, 5):
            case 0:
                self.join(max(self.starts) + 1)
            case 1 if len(self.starts) > 1:
                del self.starts[seq_id], self.tables[seq_id]
            case 2:
                self.tables[seq_id] += self.blocks(1)
            case 3:
                self.tables[seq_id] = self.tables[seq_id][:needed]
            case 4:
                self.tables[seq_id] = self.blocks(len(self.tables[seq_id]))
            case 5:
                self.starts[seq_id] = rng.randint(0, self.starts[seq_id])

    def plan(self, *, chunk: bool) -> StepPlan:
        """The next token of each; with *chunk*, a piece of a prompt as well."""
        parts = []
        for seq_id, start in self.starts.items():
            if start >= len(self.tables[seq_id]) * BS:
                self.tables[seq_id] += self.blocks(1)
            token = (self.rng.randint(0, 1000),)
            parts.append(ScheduledSequence(seq_id, token, start, self.tables[seq_id], samples=True))
            self.starts[seq_id] += 1
        if chunk:
            samples, every = self.rng.choice([(True, True), (False, False), (True, False)])
            parts.append(ScheduledSequence(99, (1, 2, 3), 2, (7, 8), samples, every))
        return StepPlan(tuple(parts))


def assert_same(fast: StepBatch, slow: StepBatch) -> None:
    assert fast.sample_seq_ids == slow.sample_seq_ids
    assert (fast.draft_rows, fast.prompt_rows) == (slow.draft_rows, slow.prompt_rows)
    for name, array in slow.tensors.feeds().items():
        mine = fast.tensors.feeds()[name]
        assert (mine.dtype, mine.shape, mine.tolist()) == (array.dtype, array.shape, array.tolist()), name
        assert mine.flags.c_contiguous, name


def test_a_run_of_steps_equals_the_general_way():
    """What is left of the step before must not be read as this step's: a block that was replaced, a shorter table."""
    rng = random.Random(7)
    for _ in range(60):
        sequences, packer = Sequences(rng), StepPacker(BS)
        for _ in range(30):
            if rng.random() < 0.4:
                sequences.change()
            plan = sequences.plan(chunk=rng.random() < 0.1)
            assert_same(packer.pack(plan), pack(plan, BS))


def test_sequences_that_decode_keep_their_arrays():
    """New arrays each step would be bound anew each step, and the sampler's checks made again."""
    sequences, packer = Sequences(random.Random(1)), StepPacker(BS)
    sequences.starts = dict.fromkeys(sequences.starts, 8)
    sequences.tables = {seq_id: sequences.blocks(3) for seq_id in sequences.starts}
    first = packer.pack(sequences.plan(chunk=False))
    assert packer.pack(sequences.plan(chunk=False)) is first
    sequences.tables[0] = sequences.blocks(3)
    assert packer.pack(sequences.plan(chunk=False)) is first
    assert first.tensors.block_table[0].tolist() == list(sequences.tables[0])


def test_one_token_that_is_no_plain_decode_goes_the_general_way():
    """The last token of a prompt whose every row is wanted, or a step that only computes, has other rows of logits."""
    packer = StepPacker(BS)
    for samples, every in ((True, True), (False, False), (False, True)):
        plan = StepPlan((ScheduledSequence(0, (5,), 3, (9,), samples, every),))
        assert_same(packer.pack(plan), pack(plan, BS))
