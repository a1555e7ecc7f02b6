"""An executor on a driver in memory, and what its steps must give, computed plainly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda.driver import FakeDriver
from fake_cuda.model import FakeModel
from fake_cuda.plan import FakePlan, PlanLimits
from numpy.typing import NDArray

from castline.engines.capacity import blocks_for
from castline.plugins.contract import StepTensors
from castline.plugins.cpu.sampling import CHOICE
from castline.plugins.tensorrt.launcher import Launcher
from castline.runtime.client import EffectiveLimits
from castline.runtime.device_executor import DeviceStep, StepOutput
from castline.runtime.draw import draw_rows
from castline.runtime.tensorrt.executor import TensorRtExecutor


@dataclass
class Rig:
    """One engine. Sequences of a `step` are (tokens so far, new tokens, blocks)."""

    model: FakeModel
    limits: EffectiveLimits
    driver: FakeDriver
    launcher: Launcher
    plan: FakePlan
    executor: TensorRtExecutor

    def tensors(
        self, sequences: Sequence[tuple[int, Sequence[int], Sequence[int]]], rows: Sequence[int] | None = None
    ) -> StepTensors:
        """*rows*: the packed tokens whose logits are wanted, or the last of each sequence."""
        size = self.limits.block_size
        lens = [len(tokens) for _, tokens, _ in sequences]
        cu = np.cumsum([0, *lens])
        width = max(len(blocks) for _, _, blocks in sequences)
        positions = np.concatenate([np.arange(start, start + len(new)) for start, new, _ in sequences])
        slots = [blocks[p // size] * size + p % size for start, new, blocks in sequences
                 for p in range(start, start + len(new))]  # fmt: skip
        return StepTensors(
            input_ids=np.concatenate([np.array(new, np.int64) for _, new, _ in sequences]),
            positions=positions.astype(np.int64),
            slot_mapping=np.array(slots, np.int32),
            cu_query_lens=cu.astype(np.int32),
            kv_lens=np.array([start + len(new) for start, new, _ in sequences], np.int32),
            block_table=np.array([[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in sequences], np.int32),
            logits_indices=np.array(cu[1:] - 1 if rows is None else rows, np.int64),
        )

    def step(
        self,
        tensors: StepTensors,
        draws: NDArray[Any] | Sequence[int] = (),
        wanted: Sequence[int] = (),
        continues: Sequence[int] | None = None,
    ) -> DeviceStep:
        """*draws*: options, or rows that take the best token."""
        options = draws if isinstance(draws, np.ndarray) else greedy(draws)
        after = None if continues is None else np.array(continues, np.int32)
        return DeviceStep(tensors, options, np.array(wanted, np.int64), after)

    def run(self, *arguments: Any, **options: Any) -> StepOutput:
        return self.executor.collect(self.executor.submit(self.step(*arguments, **options)))

    def last_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self.model.logits(self.model.tags(token_ids)[-1:])[0]

    def next_token(self, token_ids: Sequence[int]) -> int:
        """The best after all of those."""
        return int(self.last_logits(token_ids).argmax())

    def expected_tokens(self, logits: NDArray[np.float32], draws: NDArray[Any]) -> NDArray[np.int64]:
        """By the host's draw, with options as a kernel has them: float32."""
        rounded = draws.copy()
        for name in ("temperature", "top_p", "min_p"):
            rounded[name] = draws[name].astype(np.float32)
        below_one = np.nextafter(np.float32(1), np.float32(0))
        rounded["uniform"] = np.minimum(draws["uniform"].astype(np.float32), below_one)
        return draw_rows(logits, rounded)


def greedy(rows: Sequence[int]) -> NDArray[Any]:
    draws = np.zeros(len(rows), CHOICE)
    draws["row"], draws["top_p"] = rows, 1
    return draws


LIMITS = EffectiveLimits(
    max_model_len=64, max_num_seqs=6, max_num_batched_tokens=20, block_size=4, num_blocks=40, max_concurrency=1.0
)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """``make_rig(model, **limits)``: an executor that is ready: nothing may be allocated any more. Closing it, at the
    end of the test, must leave nothing on its driver."""
    rigs: list[Rig] = []

    def make(
        model: FakeModel | None = None,
        driver: FakeDriver | None = None,
        on_plan: Callable[[FakePlan], None] = lambda plan: None,
        planned_scratch: int | None = None,
        **changes: Any,
    ) -> Rig:
        """*on_plan* may change the plan before the executor sees it; None plans just the scratch memory it needs."""
        model = model or FakeModel()
        limits = replace(LIMITS, **changes)
        driver = driver or model.driver()
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        launcher = Launcher(directory, model.write_kernels(directory), driver, model.multiprocessors)
        width = blocks_for(limits.max_model_len, limits.block_size)
        sequences = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        sizes = PlanLimits(limits.max_num_batched_tokens, sequences, width, 1000)
        plan = FakePlan(driver, launcher, model, sizes)
        on_plan(plan)
        try:
            planned = plan.scratch_bytes if planned_scratch is None else planned_scratch
            executor = TensorRtExecutor(driver, launcher, plan, limits, model.num_layers, planned)
        except BaseException:
            launcher.close()
            driver.close()
            raise
        driver.forbid_allocation()
        rigs.append(Rig(model, limits, driver, launcher, plan, executor))
        return rigs[-1]

    yield make
    for rig in rigs:
        if not rig.driver.closed:
            rig.executor.close()
        assert rig.plan.closed


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@dataclass
class Device:
    """A driver with a stream, 1 KiB of device memory and as much of pinned memory."""

    driver: FakeDriver
    stream: int
    address: int
    pinned: Any

    def second_stream(self) -> int:
        return self.driver.create_stream()

    def marked(self, stream: int) -> int:
        event = self.driver.create_event()
        self.driver.record(event, stream)
        return event


@pytest.fixture
def device() -> Device:
    driver = FakeModel().driver(total_bytes=1 << 20)
    return Device(driver, driver.create_stream(), driver.allocate(1024), driver.allocate_pinned(1024))
