"""Ten thousand steps of the real scheduler through the executor, on a driver that forgives nothing.

Prompts in chunks, decodes, forks with copied blocks, preemptions, cached prefixes, guesses and prompt
log-probabilities; tokens drawn on the device, logits fetched, or both; and decodes submitted before the tokens of the
step before are known. Every token and every logit is compared with the plain model.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from fake_cuda.model import FakeModel
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors
from castline.plugins.cpu.sampling import CHOICE, NO_TOKEN
from castline.runtime.batch import StepBatch, build_batch
from castline.runtime.device_executor import DeviceStep, StepOutput
from castline.runtime.plan import ScheduledSequence, StepPlan
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.scheduler import Scheduler

STEPS = 2500
"""Of each of four engines."""


@dataclass
class Expected:
    """What a step must give."""

    ticket: int
    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]

    def check(self, output: StepOutput) -> None:
        np.testing.assert_array_equal(output.tokens, self.tokens)
        np.testing.assert_array_equal(output.logits, self.logits)


class Life:
    def __init__(self, rig: Any, seed: int) -> None:
        self.rig, self.random = rig, np.random.default_rng(seed)
        self.scheduler = Scheduler(rig.limits, (5,))
        self.count = 0
        self.bursting = True
        self.flying: deque[Expected] = deque()
        self.kept: tuple[StepOutput, Expected] | None = None
        """Logits stay valid while another step is submitted."""
        self.seen = {"ahead": 0, "copies": 0, "preemptions": 0, "decodes": 0, "drafts": 0, "prompt rows": 0}

    def step(self) -> None:
        self.arrive()
        plan = self.scheduler.schedule()
        batch = build_batch(plan, self.rig.limits.block_size)
        if plan.block_copies:
            self.rig.executor.copy_blocks(plan.block_copies)
        histories = [self.history(part) for part in plan.scheduled]
        logits = self.logits(plan.scheduled, histories, batch.tensors)
        self.note(plan, batch)
        drawn = self.submit(batch.tensors, logits, must_draw=False)
        while len(self.flying) > 1:
            self.collect()
        self.maybe_run_ahead(plan, histories, logits, *drawn)
        self.collect()
        self.commit(plan, batch, logits, *drawn)

    def finish(self) -> None:
        while self.flying:
            self.collect()

    # Requests

    def arrive(self) -> None:
        """In bursts: between them there are only decodes."""
        random, room = self.random, self.rig.limits.max_model_len
        self.bursting ^= random.random() < 0.04
        if random.random() < 0.02 and self.scheduler.groups:
            group = self.scheduler.groups[str(random.choice(list(self.scheduler.groups)))]
            self.scheduler.remove(next(iter(group.members.values())))
        while not self.scheduler.has_work or (self.bursting and self.scheduler.num_waiting < 4):
            prompt = random.integers(0, 4, random.integers(1, room // 2)).tolist()
            params = SamplingParams(
                n=int(random.choice([1, 1, 1, 3])),
                max_tokens=int(random.integers(1, room)),
                prompt_logprobs=0 if random.random() < 0.1 else None,
            )
            self.scheduler.add(Request(str(self.count), tuple(prompt), params, arrival_time=0.0))
            self.count += 1

    def history(self, part: ScheduledSequence) -> list[int]:
        """The sequence's tokens as far as the step computes them."""
        seq = self.scheduler.get(part.seq_id)
        assert seq is not None
        return [*seq.token_ids[: part.start], *part.token_ids]

    # What the device is told, and what it must say

    def logits(
        self, parts: Sequence[ScheduledSequence], histories: list[list[int]], tensors: StepTensors
    ) -> NDArray[np.float32]:
        tags = [self.rig.model.tags(one)[part.start :] for part, one in zip(parts, histories, strict=True)]
        return self.rig.model.logits(np.concatenate(tags)[tensors.logits_indices])

    def submit(
        self,
        tensors: StepTensors,
        logits: NDArray[np.float32],
        must_draw: bool,
        continues: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The draws, and what tokens they give."""
        draws, wanted = self.draws(tensors.logits_indices, must_draw), self.wanted(len(logits))
        tokens = self.rig.expected_tokens(logits, draws)
        step = DeviceStep(tensors, draws, wanted, continues)
        ticket = self.rig.executor.submit(step)
        self.flying.append(Expected(ticket, tokens, logits[wanted]))
        if self.kept is not None:
            output, expected = self.kept
            expected.check(output)
            self.kept = None
        drawn = draws.copy()
        for array in (*tensors.feeds().values(), draws, wanted, *([] if continues is None else [continues])):
            array[...] = np.zeros((), array.dtype) if array.dtype == CHOICE else 77
        return drawn, tokens

    def draws(self, indices: NDArray[np.int64], all_rows: bool) -> NDArray[Any]:
        """The last token of a prompt may have two rows: one of them at most is drawn from."""
        random, num_rows = self.random, len(np.unique(indices))
        kind = random.choice(["none", "greedy", "mixed"], p=[0.0, 0.5, 0.5] if all_rows else [0.1, 0.5, 0.4])
        rows = np.sort(np.unique(indices, return_index=True)[1])
        chosen = rows if all_rows or random.random() < 0.6 else random.permutation(rows)
        count = num_rows if all_rows or random.random() < 0.6 else int(random.integers(0, num_rows + 1))
        draws = np.zeros(0 if kind == "none" else min(count, num_rows), CHOICE)
        draws["row"], draws["top_p"] = chosen[: len(draws)], 1
        draws["uniform"] = random.random(len(draws))
        draws["uniform"][random.random(len(draws)) < 0.02] = 1 - 2**-53  # a float32 would be 1
        if kind == "mixed":
            hot = random.random(len(draws)) < 0.7
            draws["temperature"] = np.where(hot, random.uniform(0.2, 2, len(draws)), 0)
            draws["top_k"] = np.where(random.random(len(draws)) < 0.4, random.integers(1, 200, len(draws)), 0)
            draws["top_p"] = np.where(random.random(len(draws)) < 0.4, random.uniform(0.1, 1, len(draws)), 1)
            draws["min_p"] = np.where(random.random(len(draws)) < 0.2, random.uniform(0, 0.5, len(draws)), 0)
        return draws

    def wanted(self, num_rows: int) -> NDArray[np.int64]:
        random = self.random
        if random.random() < 0.5 or not num_rows:
            return np.zeros(0, np.int64)
        count = int(random.integers(1, num_rows + 1))
        rows = random.permutation(num_rows)[:count] if random.random() < 0.5 else np.arange(count)
        return rows.astype(np.int64)

    def collect(self) -> None:
        expected = self.flying.popleft()
        output = self.rig.executor.collect(expected.ticket)
        expected.check(output)
        self.kept = (output, expected)

    # Ahead of the tokens

    def maybe_run_ahead(
        self,
        plan: StepPlan,
        histories: list[list[int]],
        logits: NDArray[np.float32],
        draws: NDArray[Any],
        tokens: NDArray[np.int64],
    ) -> None:
        """Sequences of a decode go on, in another order, from tokens that the host has not seen; some are given."""
        random, limits, parts = self.random, self.rig.limits, plan.scheduled
        if random.random() < 0.2 or any(
            len(part.token_ids) > 1 or not part.samples or part.all_logits for part in parts
        ):
            return
        following = {int(row): (i, int(t)) for i, (row, t) in enumerate(zip(draws["row"], tokens, strict=True))}
        going = [
            row
            for row, part in enumerate(parts)
            if following.get(row, (0, NO_TOKEN))[1] != NO_TOKEN
            and part.start + 1 < len(part.block_ids) * limits.block_size
            and part.start + 2 < limits.max_model_len
        ]
        going = random.permutation(going)[: random.integers(0, len(going) + 1)].astype(int).tolist()
        if not going:
            return
        self.seen["ahead"] += 1
        given = random.random(len(going)) < 0.2
        ids = [following[row][1] if told else 88 for row, told in zip(going, given, strict=True)]
        longer = [[*histories[row], following[row][1]] for row in going]
        sequences = [
            (parts[row].start + 1, [token], parts[row].block_ids) for row, token in zip(going, ids, strict=True)
        ]
        tensors = self.rig.tensors(sequences)
        ahead = self.rig.model.logits(np.array([self.rig.model.tags(one)[-1] for one in longer], np.uint32))
        continues = [-1 if told else following[row][0] for row, told in zip(going, given, strict=True)]
        self.submit(tensors, ahead, must_draw=random.random() < 0.5, continues=np.array(continues, np.int32))

    # Tokens

    def commit(
        self,
        plan: StepPlan,
        batch: StepBatch,
        logits: NDArray[np.float32],
        draws: NDArray[Any],
        tokens: NDArray[np.int64],
    ) -> None:
        """The device's token of a row, or the best where it drew none; guesses are judged by those."""
        by_row = logits.argmax(axis=1).tolist()
        sound = np.isfinite(logits.max(axis=1))
        for row, token in zip(draws["row"].tolist(), tokens.tolist(), strict=True):
            by_row[row] = token
        guesses = {rows.seq_id: rows for rows in batch.draft_rows}
        sampled: dict[int, list[int]] = {}
        for row, seq_id in enumerate(batch.sample_seq_ids):
            if not sound[row]:
                seq = self.scheduler.get(seq_id)
                assert seq is not None
                self.scheduler.remove(seq)
                continue
            taken = [by_row[row]]
            guess = guesses.get(seq_id)
            while guess is not None and len(taken) <= len(guess.token_ids):
                depth = len(taken) - 1
                if taken[depth] != guess.token_ids[depth] or not sound[guess.first_row + depth]:
                    break
                taken.append(by_row[guess.first_row + depth])
            sampled[seq_id] = taken
        self.scheduler.commit(plan, sampled)

    def note(self, plan: StepPlan, batch: StepBatch) -> None:
        self.seen["copies"] += len(plan.block_copies)
        self.seen["preemptions"] += len(plan.preempted)
        self.seen["drafts"] += len(batch.draft_rows)
        self.seen["prompt rows"] += len(batch.prompt_rows)
        self.seen["decodes"] += len(batch.tensors.input_ids) == len(batch.tensors.kv_lens)


@pytest.mark.parametrize(
    ("seed", "model", "limits"),
    [
        (1, FakeModel(broken=211), {"max_drafts": 2, "num_blocks": 30}),
        (2, FakeModel(num_layers=1, block_size=2), {"block_size": 2, "max_model_len": 24, "max_num_seqs": 5}),
        (
            3,
            FakeModel(num_layers=1, block_size=8),
            {"block_size": 8, "num_blocks": 14, "max_num_seqs": 9, "max_drafts": 3},
        ),
        (4, FakeModel(num_layers=1, vocab_size=31), {"num_blocks": 18, "max_num_batched_tokens": 7, "max_num_seqs": 7}),
    ],
)
def test_ten_thousand_steps(make_rig: Callable[..., Any], seed: int, model: FakeModel, limits: dict[str, int]) -> None:
    """Out of bounds, use after free, unsynchronised reuse and allocation show only in what nobody thinks of."""
    rig = make_rig(model, **limits)
    life = Life(rig, seed)
    for _ in range(STEPS):
        life.step()
    life.finish()
    life.scheduler.check()
    expected = set(life.seen) - (set() if rig.limits.max_drafts else {"drafts"})
    assert all(life.seen[what] > 20 for what in expected), life.seen
    rig.executor.close()
    assert rig.driver.closed
