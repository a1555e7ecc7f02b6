"""A planned engine made ready to step: executor, warm-up, core."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from castline.engines.capacity import blocks_for
from castline.engines.errors import EngineError
from castline.engines.manifest import Manifest, read_manifest
from castline.plugins.contract import StepTensors
from castline.plugins.cpu.sampling import CHOICE
from castline.runtime.client import EffectiveLimits
from castline.runtime.core import EngineCore
from castline.runtime.cpu_executor import CpuExecutor
from castline.runtime.device_executor import DeviceExecutor, DeviceStep
from castline.runtime.executor import Executor, RehearsingExecutor
from castline.runtime.sampler import Sampler
from castline.runtime.speculation import max_step_drafts
from castline.runtime.step_profile import NO_MARKS, StepMarks

PROMPT_TOKENS = 16
"""Of the prompt that is run: enough for the kernels of many rows and of many queries."""
DECODE_SIZES = (1, 8, 32)
"""Sequences of the decodes that are timed: enough to tell what more tokens cost; serving refines it."""


def load_core(
    bundle: Path, limits: EffectiveLimits, num_threads: int, marks: StepMarks = NO_MARKS, *, huge_pages: bool = False
) -> tuple[EngineCore, CpuExecutor | DeviceExecutor]:
    """Loads the bundle, warms it up, and gives a core with nothing in it. The caller closes core, then executor.

    The bundle was checked by `castline.runtime.loader.plan_bundle`; *marks* hears of every step; *huge_pages*: a cpu
    engine gets them in the background (`castline.runtime.huge_pages`). Raises EngineError.
    """
    manifest = read_manifest(bundle)
    model = manifest.model
    executor: CpuExecutor | DeviceExecutor
    if manifest.host.target == "cpu":
        executor = CpuExecutor(bundle, manifest, limits, num_threads)
    else:
        executor = _load_gpu(bundle, manifest, limits)
    try:
        if executor.vocab_size != model.vocab_size:
            raise EngineError(
                f"{bundle / manifest.graph_file} gives {executor.vocab_size} logits a row, and engine.json says "
                f"vocab_size {model.vocab_size}; rebuild it: {manifest.rebuild_command}"
            )
        step_seconds: dict[int, float] = {}
        if isinstance(executor, CpuExecutor):
            warm_up(executor, limits)
            step_seconds = time_decodes(executor, limits) if limits.max_drafts else {}
        else:
            warm_up_device(executor, limits)
    except BaseException:
        executor.close()
        raise
    sampler = Sampler(model.vocab_size, model.eos_token_ids, num_threads=num_threads)
    core = EngineCore(executor, limits, model.eos_token_ids, sampler, step_seconds=step_seconds, marks=marks)
    if isinstance(executor, CpuExecutor):
        core.scheduler.kv.pool.on_first_use = executor.on_first_use
        if huge_pages:
            executor.settle()
    return core, executor


def _load_gpu(bundle: Path, manifest: Manifest, limits: EffectiveLimits) -> DeviceExecutor:
    # Here, so that nothing of it is imported where there is no GPU.
    from castline.plugins.tensorrt.cuda_driver import CudaDriver
    from castline.runtime.tensorrt.executor import TensorRtExecutor

    return TensorRtExecutor.load(bundle, manifest, limits, CudaDriver())


def warm_up(executor: RehearsingExecutor, limits: EffectiveLimits) -> None:
    """Runs the smallest step, a decode at the longest context and a short prompt, and rehearses the largest step.

    After these no step compiles or plans anything, and the largest finds its memory there; nothing is written to the
    pool. A CPU's largest step takes as long the first time as the second, and took a quarter of a start.
    """
    *steps, largest = _spanning_steps(limits)
    prompt = _idle_step([min(PROMPT_TOKENS, len(largest.input_ids), limits.max_model_len)], 0, limits.block_size)
    for step in (*steps, prompt):
        executor.execute(step)
    executor.rehearse(largest)


def warm_up_device(executor: DeviceExecutor, limits: EffectiveLimits) -> None:
    """The steps of `warm_up`, each with its rows drawn and then with its rows fetched, and a step that runs ahead.

    Only the last writes to the pool, which is empty: the device reads a token there that it has drawn itself.
    """
    for step in _spanning_steps(limits):
        num_rows = len(step.logits_indices)
        draws = np.zeros(num_rows, CHOICE)
        draws["row"], draws["top_p"] = np.arange(num_rows), 1
        drawn, no_rows = draws.copy(), np.empty(0, np.int64)
        drawn["temperature"], drawn["top_k"] = 1, 20
        executor.collect(executor.submit(DeviceStep(step, draws, no_rows)))
        executor.collect(executor.submit(DeviceStep(step, drawn, no_rows)))
        executor.collect(executor.submit(DeviceStep(step, draws[:0], draws["row"])))
    first, second = (_one_token(position, limits.block_size) for position in range(2))
    draw = np.zeros(1, CHOICE)
    draw["top_p"] = 1
    tickets = [
        executor.submit(DeviceStep(first, draw, np.empty(0, np.int64))),
        executor.submit(DeviceStep(second, draw, np.empty(0, np.int64), np.zeros(1, np.int32))),
    ]
    for ticket in tickets:
        executor.collect(ticket)


def _spanning_steps(limits: EffectiveLimits) -> list[StepTensors]:
    widest = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    tokens_each, extra = divmod(limits.max_num_batched_tokens, widest)
    longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    return [
        _idle_step(query_lens, context, limits.block_size, num_drafts)
        for query_lens, context, num_drafts in (
            ([1], 0, 0),
            ([1], longest - 1, 0),
            ([min(tokens_each + (i < extra), longest) for i in range(widest)], 0, max_step_drafts(limits)),
        )
    ]


def _one_token(position: int, block_size: int) -> StepTensors:
    """A decode whose sequence has the first blocks of the pool."""
    step = _idle_step([1], position, block_size)
    return replace(step, slot_mapping=np.array([position], np.int32))


def time_decodes(executor: Executor, limits: EffectiveLimits) -> dict[int, float]:
    """Seconds of a step of so many decodes; the faster of two, for the first may still warm up."""
    seconds = {}
    for size in DECODE_SIZES:
        if size <= min(limits.max_num_seqs, limits.max_num_batched_tokens):
            step = _idle_step([1] * size, 0, limits.block_size)
            seconds[size] = min(_time(executor, step), _time(executor, step))
    return seconds


def _time(executor: Executor, step: StepTensors) -> float:
    begin = perf_counter()
    executor.execute(step)
    return perf_counter() - begin


def _idle_step(query_lens: list[int], context: int, block_size: int, num_drafts: int = 0) -> StepTensors:
    """A step whose sequences have *context* tokens before it, all in block 0, and whose own K and V go nowhere.

    *num_drafts* rows of logits beside one a sequence, as far as there are tokens.
    """
    lens = np.array(query_lens, np.int32)
    total = int(lens.sum())
    cu_query_lens = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
    longest = blocks_for(context + int(lens.max()), block_size)
    return StepTensors(
        input_ids=np.zeros(total, np.int64),
        positions=context + np.arange(total, dtype=np.int64) - np.repeat(cu_query_lens[:-1], lens),
        slot_mapping=np.full(total, -1, np.int32),
        cu_query_lens=cu_query_lens,
        kv_lens=context + lens,
        block_table=np.zeros((len(lens), longest), np.int32),
        logits_indices=np.concatenate([cu_query_lens[1:] - 1, np.arange(min(num_drafts, total))]).astype(np.int64),
    )
