"""A planned engine made ready to step: executor, warm-up, core."""

from pathlib import Path

import numpy as np

from castline.engines.capacity import blocks_for
from castline.engines.errors import EngineError
from castline.engines.manifest import read_manifest
from castline.plugins.contract import StepTensors
from castline.runtime.client import EffectiveLimits
from castline.runtime.core import EngineCore
from castline.runtime.cpu_executor import CpuExecutor
from castline.runtime.executor import Executor
from castline.runtime.sampler import Sampler
from castline.runtime.step_profile import NO_MARKS, StepMarks


def load_core(
    bundle: Path, limits: EffectiveLimits, num_threads: int, marks: StepMarks = NO_MARKS
) -> tuple[EngineCore, CpuExecutor]:
    """Loads the bundle, warms it up, and gives a core with nothing in it. The caller closes the executor.

    The bundle was checked by `castline.runtime.loader.plan_engine`; *marks* hears of every step. Raises EngineError.
    """
    manifest = read_manifest(bundle)
    executor = CpuExecutor(bundle, manifest, limits.num_blocks, num_threads)
    model = manifest.model
    try:
        if executor.vocab_size != model.vocab_size:
            raise EngineError(
                f"{bundle / manifest.graph_file} gives {executor.vocab_size} logits a row, and engine.json says "
                f"vocab_size {model.vocab_size}; rebuild it: {manifest.rebuild_command}"
            )
        warm_up(executor, limits)
    except BaseException:
        executor.close()
        raise
    sampler = Sampler(model.vocab_size, model.eos_token_ids)
    return EngineCore(executor, limits, model.eos_token_ids, sampler, marks=marks), executor


def warm_up(executor: Executor, limits: EffectiveLimits) -> None:
    """Runs the smallest step, a decode at the longest context, and the largest step; writes nothing to the pool.

    After these no step compiles, plans or first touches anything: they span the shapes that steps have.
    """
    widest = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    tokens_each, extra = divmod(limits.max_num_batched_tokens, widest)
    longest = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    for query_lens, context in (
        ([1], 0),
        ([1], longest - 1),
        ([min(tokens_each + (i < extra), longest) for i in range(widest)], 0),
    ):
        executor.execute(_idle_step(query_lens, context, limits.block_size))


def _idle_step(query_lens: list[int], context: int, block_size: int) -> StepTensors:
    """A step whose sequences have *context* tokens before it, in blocks 0 and up, and whose own K and V go nowhere."""
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
        block_table=np.tile(np.arange(longest, dtype=np.int32), (len(lens), 1)),
        logits_indices=cu_query_lens[1:].astype(np.int64) - 1,
    )
