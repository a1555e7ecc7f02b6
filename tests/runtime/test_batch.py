"""Plans as arrays, against the plainest way to write the same thing."""

import random

from castline.runtime.batch import build_batch, pack
from castline.runtime.plan import ScheduledSequence, StepPlan

BS = 4


def random_plan(rng: random.Random) -> StepPlan:
    parts = []
    for seq_id in range(rng.randint(1, 6)):
        start, count = rng.randint(0, 20), rng.choice([1, 1, rng.randint(1, 9)])
        blocks = -(-(start + count) // BS) + rng.randint(0, 2)
        samples = rng.random() < 0.6
        parts.append(
            ScheduledSequence(
                seq_id=100 + seq_id,
                token_ids=tuple(rng.randint(0, 1000) for _ in range(count)),
                start=start,
                block_ids=tuple(rng.sample(range(1, 500), blocks)),
                samples=samples,
                all_logits=rng.random() < 0.3,
                num_drafts=rng.choice([0, count - 1, rng.randint(0, count - 1)]) if samples else 0,
            )
        )
    return StepPlan(tuple(parts))


def test_equals_a_token_by_token_construction():
    """Vectorised index arithmetic goes wrong at the borders: empty starts, block borders, ragged tables."""
    rng = random.Random(3)
    for _ in range(300):
        plan = random_plan(rng)
        step = build_batch(plan, BS).tensors
        ids, positions, slots, cu, kv_lens = [], [], [], [0], []
        for part in plan.scheduled:
            for offset, token in enumerate(part.token_ids):
                position = part.start + offset
                ids.append(token)
                positions.append(position)
                slots.append(part.block_ids[position // BS] * BS + position % BS)
            cu.append(len(ids))
            kv_lens.append(part.start + len(part.token_ids))
        assert step.input_ids.tolist() == ids
        assert step.positions.tolist() == positions
        assert step.slot_mapping.tolist() == slots
        assert step.cu_query_lens.tolist() == cu
        assert step.kv_lens.tolist() == kv_lens
        for row, part in zip(step.block_table, plan.scheduled, strict=True):
            assert row[: len(part.block_ids)].tolist() == list(part.block_ids)


def test_decodes_equal_the_general_way():
    """The packing of plain decodes is written a second time, for speed."""
    rng = random.Random(5)
    for count in (1, 2, 7, 64):
        parts = []
        for seq_id in range(count):
            start = rng.randint(0, 40)
            blocks = tuple(rng.sample(range(1, 500), start // BS + 1 + rng.choice([0, 0, 2])))
            parts.append(ScheduledSequence(seq_id, (rng.randint(0, 1000),), start, blocks, samples=True))
        plan = StepPlan(tuple(parts))
        fast, slow = build_batch(plan, BS), pack(plan, BS)
        assert (fast.sample_seq_ids, fast.draft_rows, fast.prompt_rows) == (slow.sample_seq_ids, (), ())
        for name, array in slow.tensors.feeds().items():
            mine = fast.tensors.feeds()[name]
            assert (mine.dtype, mine.shape, mine.tolist()) == (array.dtype, array.shape, array.tolist()), name


def test_dtypes_are_those_of_the_step_contract():
    """An engine refuses, or worse reinterprets, an array of another integer width."""
    step = build_batch(random_plan(random.Random(0)), BS).tensors
    int64 = {"input_ids", "positions", "logits_indices"}
    for name, array in step.feeds().items():
        assert array.dtype == ("int64" if name in int64 else "int32"), name
        assert array.flags.c_contiguous, name


def test_every_row_of_logits_has_its_owner():
    """A row sampled for another sequence gives fluent text in the wrong answer."""
    rng = random.Random(4)
    for _ in range(300):
        plan = random_plan(rng)
        batch = build_batch(plan, BS)
        token_owner = [(part.seq_id, part.start + i) for part in plan.scheduled for i in range(len(part.token_ids))]
        rows = [token_owner[index] for index in batch.tensors.logits_indices.tolist()]
        first = {p.seq_id: p.start + len(p.token_ids) - 1 - p.num_drafts for p in plan.scheduled}
        sampled = [part.seq_id for part in plan.scheduled if part.samples]
        assert list(batch.sample_seq_ids) == sampled
        assert rows[: len(sampled)] == [(seq_id, first[seq_id]) for seq_id in sampled]
        guessing = [part for part in plan.scheduled if part.num_drafts]
        for owned, part in zip(batch.draft_rows, guessing, strict=True):
            assert owned.token_ids == part.token_ids[-part.num_drafts :]
            found = rows[owned.first_row : owned.first_row + part.num_drafts]
            assert found == [(part.seq_id, first[part.seq_id] + 1 + i) for i in range(part.num_drafts)]
        whole = [part for part in plan.scheduled if part.all_logits]
        for owned, part in zip(batch.prompt_rows, whole, strict=True):
            expected = [(part.seq_id, part.start + i) for i in range(len(part.token_ids))]
            assert rows[owned.first_row : owned.first_row + owned.num_rows] == expected
            assert (owned.seq_id, owned.start) == expected[0]
        drafts, prompts = sum(p.num_drafts for p in guessing), sum(len(p.token_ids) for p in whole)
        assert len(rows) == len(sampled) + drafts + prompts, "a row of logits costs the output head"
