"""Arrays, clocks and workloads of `castline.plugins.tensorrt.kernel_bench`, on the interpreted GPU."""

from typing import Any

import numpy as np
import pytest

from castline.builder.tensorrt.kernel_shapes import attention_kernels, sampling_kernels
from castline.engines.kernel_choices import NOTHING_KNOWN
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt import kernel_bench
from castline.plugins.tensorrt.compile import KernelCompiler
from castline.plugins.tensorrt.kernel_bench import KernelClock, Stopwatch, Workload, device_arrays, workload_arrays
from castline.plugins.tensorrt.kernel_set import KernelSet

A = AttentionAttributes(0, 2, 1, 16, 0.25, 16, int(KvDtypeCode.FP8), rotary_dim=16)


def test_arrays_go_there_and_come_back(gpu: Any) -> None:
    """What no kernel wrote is NaN, not a number that could be taken for a result; all of it is freed."""
    with device_arrays(gpu) as arrays:
        given = np.arange(12, dtype=np.float32).reshape(3, 4).T
        address = arrays.upload(given)
        np.testing.assert_array_equal(arrays.download(address, (4, 3), np.float32), given)
        assert np.isnan(arrays.download(arrays.empty(8), (2,), np.float32)).all()
        assert arrays.download(arrays.empty(0), (0,), np.float32).size == 0
    gpu.close()


def test_median_of_what_is_queued_after_the_cache_was_overwritten(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean counts hiccups; a kernel that finds its keys in L2 looks faster than it will be."""
    done: list[str] = []
    times = iter([5.0, 1.0, 3.0])
    monkeypatch.setattr(gpu, "fill", lambda *given: done.append(f"fill {given[2]}"))
    monkeypatch.setattr(gpu, "record", lambda *given: done.append("record"))
    monkeypatch.setattr(gpu, "elapsed_ms", lambda start, end: next(times))
    watch = Stopwatch(gpu, l2_bytes=1000, repeats=3, flush_bytes=64)
    stream = gpu.create_stream()
    assert watch.microseconds(lambda: done.append("work"), stream) == 3000
    assert done == ["work", *["fill 4000", "record", "work", "record"] * 3]
    watch.close()
    gpu.destroy_stream(stream)
    gpu.close()


def test_every_sequence_has_blocks_of_its_own(gpu: Any) -> None:
    """Sequences that share blocks find them in the cache, and every time is too short."""
    compiled = attention_kernels(KernelCompiler((8, 9), "fp16"), NOTHING_KNOWN, A)
    kernels = KernelSet("", "", tuple(one.spec for one in compiled))
    with device_arrays(gpu) as arrays:
        made = workload_arrays(arrays, A, kernels, Workload(3, 2, 100), multiprocessors=4)
        assert (made.shape.tokens, made.shape.sequences, made.shape.table_width, made.shape.num_blocks) == (6, 3, 7, 21)
        table = arrays.download(made.addresses["table"], (3, 7), np.int32)
        assert sorted(table.ravel()) == list(range(21))
        slots = arrays.download(made.addresses["slots"], (6,), np.int32)
        assert slots.tolist() == [int(table[i, p // 16]) * 16 + p % 16 for i in range(3) for p in (98, 99)]
        assert arrays.download(made.addresses["cu_query_lens"], (4,), np.int32).tolist() == [0, 2, 4, 6]
        qkv = arrays.download(made.addresses["qkv"], (6, 64), np.float16)
        assert np.isfinite(qkv).all()
    gpu.close()


def test_candidates_are_timed_by_their_own_kernels(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner's clock: a decode that was split, or a split that was not joined, is another kernel's time."""
    steps = {"decode": Workload(2, 1, 40), "decode_split": Workload(1, 1, 80), "prefill": Workload(1, 9, 40)}
    monkeypatch.setattr(kernel_bench, "WORKLOADS", steps)
    monkeypatch.setattr(kernel_bench, "SAMPLED_ROWS", 2)
    compiler = KernelCompiler((8, 9), "fp16")
    compiled = attention_kernels(compiler, NOTHING_KNOWN, A)
    sampler = sampling_kernels(compiler, NOTHING_KNOWN, 64, 16)
    ran: list[str] = []
    run = gpu._run

    def watched(function: int, *given: Any) -> None:
        ran.append(gpu.modules[function]["name"])
        run(function, *given)

    monkeypatch.setattr(gpu, "_run", watched)
    watch = Stopwatch(gpu, 1 << 8, repeats=1, flush_bytes=1 << 8)
    clock = KernelClock(gpu, watch, "Interpreted", 4)
    timed = {"decode": ["decode"], "decode_split": ["decode_split", "decode_merge"], "prefill": ["prefill"]}
    for kernel, parts in timed.items():
        ran.clear()
        assert clock.microseconds(kernel, compiled, A) == 250  # type: ignore[arg-type]
        assert ran == parts * 2
    ran.clear()
    assert clock.microseconds("greedy", sampler, None) == 250
    assert ran == ["greedy"] * 2
    watch.close()
    gpu.close()
