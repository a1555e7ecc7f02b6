"""Warm-up covers the steps that serving will run, and leaves no trace."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from numpy.typing import NDArray

from castline.engines.capacity import blocks_for
from castline.engines.errors import EngineError
from castline.engines.manifest import read_manifest, write_manifest
from castline.plugins.contract import StepTensors
from castline.plugins.cpu.session import CpuSession
from castline.runtime.client import EffectiveLimits
from castline.runtime.cpu_executor import CpuExecutor
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.startup import load_core, time_decodes, warm_up


class Recorder:
    vocab_size = 8
    maxima = None

    def __init__(self) -> None:
        self.steps: list[StepTensors] = []
        self.rehearsed: list[StepTensors] = []

    def execute(self, step: StepTensors) -> NDArray[np.float32]:
        self.steps.append(step)
        return np.zeros((len(step.logits_indices), self.vocab_size), np.float32)

    def rehearse(self, step: StepTensors) -> None:
        self.rehearsed.append(step)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("a warm-up copies nothing")

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "max_tokens", "num_blocks"),
    [(512, 8, 64, 100), (512, 7, 64, 32), (2, 1, 1, 1), (8, 64, 512, 5), (4096, 4, 512, 300)],
)
def test_the_smallest_the_longest_a_prompt_and_the_largest_step(
    max_model_len: int, max_num_seqs: int, max_tokens: int, num_blocks: int
) -> None:
    """C11: the first request must meet no step that is larger than all before it; nor may warming up write to the pool
    or read past it, whatever the limits."""
    limits = EffectiveLimits(max_model_len, max_num_seqs, max_tokens, 16, num_blocks, 1.0)
    recorder = Recorder()
    warm_up(recorder, limits)
    smallest, longest, prompt = recorder.steps
    [largest] = recorder.rehearsed
    assert smallest.kv_lens.tolist() == [1]
    assert longest.kv_lens.tolist() == [min(max_model_len, num_blocks * 16)]
    assert prompt.kv_lens.tolist() == [min(16, max_model_len, len(largest.input_ids))]
    assert len(largest.kv_lens) == len(largest.logits_indices) == min(max_num_seqs, max_tokens)
    assert len(largest.input_ids) == min(max_tokens, max_num_seqs * max_model_len)
    for step in (*recorder.steps, largest):
        assert (step.slot_mapping == -1).all()
        assert step.block_table.max(initial=0) < num_blocks
        assert step.block_table.shape[1] >= blocks_for(int(step.kv_lens.max()), 16)
        assert step.positions.max() < max_model_len
        lens = np.diff(step.cu_query_lens)
        assert step.cu_query_lens[-1] == len(step.input_ids) == len(step.positions)
        assert (step.kv_lens >= lens).all()
        ends = step.positions[step.cu_query_lens[1:] - 1] + 1
        assert ends.tolist() == step.kv_lens.tolist()


@pytest.mark.parametrize(("max_tokens", "max_drafts"), [(64, 7), (9, 7), (64, 20)])
def test_the_largest_step_has_the_rows_that_guesses_take(max_tokens: int, max_drafts: int) -> None:
    """C11: the buffer of logits grows with the rows; it must not grow under the first guess."""
    limits = EffectiveLimits(512, 8, max_tokens, 16, 100, 1.0, max_drafts=max_drafts)
    recorder = Recorder()
    warm_up(recorder, limits)
    [largest] = recorder.rehearsed
    assert len(largest.logits_indices) == 8 + min(max(8, max_drafts), max_tokens)
    assert largest.logits_indices.max() < max_tokens


@pytest.mark.parametrize(("max_num_seqs", "sizes"), [(64, [1, 8, 32]), (8, [1, 8]), (3, [1])])
def test_decodes_are_timed_within_the_limits(max_num_seqs: int, sizes: list[int]) -> None:
    """A step of more sequences than the engine was built for may fail, and says nothing of those that will run."""
    recorder = Recorder()
    seconds = time_decodes(recorder, EffectiveLimits(512, max_num_seqs, 64, 16, 100, 1.0, max_drafts=4))
    assert sorted(seconds) == sizes
    assert min(seconds.values()) > 0
    assert [len(step.kv_lens) for step in recorder.steps] == [size for size in sizes for _ in range(2)]
    assert all((step.slot_mapping == -1).all() for step in recorder.steps)


def test_the_pool_gets_its_memory_ahead_of_use(tiny_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is taken whole at the start, or one whose pages every step has to fetch itself."""
    monkeypatch.setattr("castline.runtime.pool_growth.GROWTH_BYTES", 1)
    ranges: SimpleQueue[tuple[int, int]] = SimpleQueue()
    monkeypatch.setattr(CpuSession, "provide", lambda _, begin, end: ranges.put((begin, end)) is None)
    plan = plan_engine(tiny_repository, LoadOptions(kv_blocks=64, max_num_batched_tokens=16, max_num_seqs=8))
    growth = 2 * blocks_for(16, plan.limits.block_size)
    core, executor = load_core(plan.bundle, plan.limits, plan.num_threads)
    assert ranges.get_nowait() == (0, growth)
    assert ranges.empty()
    core.add_request(Request("r", tuple(range(3, 3 + growth * plan.limits.block_size)), SamplingParams(max_tokens=1)))
    while core.has_work:
        core.step()
    assert ranges.get(timeout=60) == (growth, 2 * growth)
    core.close()
    executor.close()


def test_a_recording_leaves_nothing_unsettled(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording begins while the heap still waits: a server that records from the start would keep it as it is."""
    said: list[str] = []

    class Recorded:
        def __init__(self, move_weights: object) -> None:
            said.append("settles")

        def stop(self) -> None:
            said.append("stops")

        def join(self) -> None:
            said.append("ends")

    def move(_: CpuSession, enough: int) -> int:
        said.append("weights")
        return 0

    monkeypatch.setattr("castline.runtime.cpu_executor.Settling", Recorded)
    monkeypatch.setattr(CpuSession, "move_weights", move)
    plan = plan_engine(tiny_repository, LoadOptions(kv_blocks=64))
    core, executor = load_core(plan.bundle, plan.limits, plan.num_threads, huge_pages=True)
    assert isinstance(executor, CpuExecutor)
    assert said == ["settles"]
    executor.start_profile(str(tmp_path / "profile"))
    assert said == ["settles", "stops", "ends", "weights", "settles"]
    core.close()
    executor.close()
    assert said[-2:] == ["stops", "ends"]


def test_an_engine_for_a_gpu_wants_a_driver(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be handed to the cpu's executor, which would speak of a graph it cannot read."""
    manifest = read_manifest(tiny_repository / "tiny" / "1")
    write_manifest(tmp_path, replace(manifest, host=replace(manifest.host, target="tensorrt_rtx")))

    def no_driver() -> None:
        raise EngineError("no NVIDIA driver")

    monkeypatch.setattr("castline.plugins.tensorrt.cuda_driver.CudaDriver", no_driver)
    with pytest.raises(EngineError, match="no NVIDIA driver"):
        load_core(tmp_path, EffectiveLimits(32, 1, 8, 16, 4, 1.0), 1)
