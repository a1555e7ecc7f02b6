"""The attention kernels: results against the reference, times against their roofline, and a graph of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.attention_case import decode, encode
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.reference import AttentionInputs, round_trip
from castline.plugins.tensorrt.kernel_bench import (
    PARTS,
    DeviceArrays,
    Workload,
    device_arrays,
    queue_of,
    workload_arrays,
)
from castline.plugins.tensorrt.launcher import Launcher, StepShape, attention_launches, workspace_bytes
from gpu_checks import roofline
from gpu_checks.cases import STEPS, KernelCase, timed_attributes
from gpu_checks.machine import Machine
from gpu_checks.store import KernelStore
from gpu_checks.table import Row

POOL_TOLERANCE = 0.002
"""Share of a pool's elements that may be another value: those at a tie that the GPU's float32 rounds the other way."""
MANY = 10_000
"""Multiprocessors that a step can never fill: decodes are split. None at all: they are not."""
ACTIVATION_CODES = {"fp16": KvDtypeCode.FP16, "bf16": KvDtypeCode.BF16}
WORKLOADS = {
    "rope_append": (Workload(64, 1, 1024), Workload(1, 2048, 2048)),
    "decode": (Workload(32, 1, 2048), Workload(128, 1, 1024)),
    "decode_split": (Workload(1, 1, 8192), Workload(4, 1, 4096)),
    "prefill": (Workload(1, 2048, 2048), Workload(8, 256, 1024)),
}
LAYERS = 16


@contextmanager
def loaded(machine: Machine, store: KernelStore, a: AttentionAttributes, activations: str) -> Iterator[Launcher]:
    directory, kernels = store.attention(a, activations)
    launcher = Launcher(directory, kernels, machine.driver, machine.driver.multiprocessors)
    try:
        yield launcher
    finally:
        launcher.close()


def check(machine: Machine, store: KernelStore, case: KernelCase) -> list[Row]:
    """Runs the case's steps twice, with decodes whole and split; rows for both, and for what the pool holds then."""
    worst = {"decode, prefill": 0.0, "decode_split": 0.0}
    made = case.sequences()
    with loaded(machine, store, case.attributes, case.activations) as launcher, device_arrays(machine.driver) as arrays:
        pool = arrays.upload(made.pool())
        for query_lens in STEPS:
            inputs = made.inputs(list(query_lens))
            expected = made.expected(inputs)
            for kind, units in (("decode, prefill", 0), ("decode_split", MANY)):
                found = _run(arrays, launcher, case, inputs, pool, made.num_blocks, units)
                worst[kind] = max(worst[kind], _error(found, expected))
        elements = made.pool()
        kept = made.slots_of(arrays.download(pool, elements.shape, elements.dtype))
    unequal = _unequal(kept, np.stack([made.reference.k, made.reference.v]))
    rows = [Row(kind, case.name, error, case.tolerance) for kind, error in worst.items()]
    return [*rows, Row("rope_append", f"{case.name}: share of the pool", unequal, POOL_TOLERANCE)]


def _run(arrays: DeviceArrays, launcher: Launcher, case: KernelCase, inputs: AttentionInputs, pool: int,
         num_blocks: int, multiprocessors: int) -> NDArray[np.float32]:  # fmt: skip
    a, code = case.attributes, ACTIVATION_CODES[case.activations]
    inputs = _padded(inputs)
    tokens, sequences = len(inputs.qkv), len(inputs.kv_lens)
    shape = StepShape(tokens, sequences, inputs.block_table.shape[1], num_blocks)
    out_shape = (tokens, a.num_heads * a.head_dim)
    addresses = {
        "qkv": arrays.upload(encode(round_trip(inputs.qkv, code), code)),
        "pool": pool,
        "slots": arrays.upload(inputs.slot_mapping),
        "cu_query_lens": arrays.upload(inputs.cu_query_lens),
        "kv_lens": arrays.upload(inputs.kv_lens),
        "table": arrays.upload(inputs.block_table),
        "out": arrays.empty(2 * tokens * a.num_heads * a.head_dim),
    }
    optional = {
        "cos": inputs.cos,
        "sin": inputs.sin,
        "q_weight": inputs.q_norm_weight,
        "k_weight": inputs.k_norm_weight,
    }
    addresses |= {name: arrays.upload(value) for name, value in optional.items() if value is not None}
    workspace = arrays.empty(workspace_bytes(launcher.kernels, a, shape, multiprocessors))
    launches = attention_launches(launcher.kernels, a, shape, addresses, workspace, multiprocessors)
    queue_of(launcher, launches, arrays.stream)()
    return decode(arrays.download(addresses["out"], out_shape, encode(np.zeros(1, np.float32), code).dtype), code)


def _padded(inputs: AttentionInputs) -> AttentionInputs:
    """A step of decodes alone gets a row as a graph's bucket has them: of length 0, which writes nowhere."""
    if len(inputs.qkv) != len(inputs.kv_lens):
        return inputs
    one = [np.float32(1)]

    def longer(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if array is None else np.concatenate([array, array[:1] * one[0]]).astype(array.dtype)

    return replace(
        inputs,
        qkv=longer(inputs.qkv),
        cos=longer(inputs.cos),
        sin=longer(inputs.sin),
        slot_mapping=np.append(inputs.slot_mapping, -1).astype(np.int32),
        cu_query_lens=np.append(inputs.cu_query_lens, len(inputs.qkv) + 1).astype(np.int32),
        kv_lens=np.append(inputs.kv_lens, 0).astype(np.int32),
        block_table=np.concatenate([inputs.block_table, np.zeros_like(inputs.block_table[:1])]),
    )


def _error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference; NaN where anything is not finite, rows of padding after the expected ones among it."""
    return float(np.abs(found[: len(expected)] - expected).max()) if np.isfinite(found).all() else float("nan")


def _unequal(found: NDArray[Any], expected: NDArray[Any]) -> float:
    if not np.isfinite(found).all():
        return float("nan")
    return float((np.abs(found - expected) > 1e-3 * np.abs(expected) + 1e-6).mean())


def time_kernels(machine: Machine, store: KernelStore, workloads: Any = None) -> list[Row]:
    """Each attention kernel on usual nodes and steps."""
    rows = []
    for a in timed_attributes(machine.quick):
        with loaded(machine, store, a, "fp16") as launcher:
            for kernel, steps in (workloads or WORKLOADS).items():
                rows += [_time(machine, launcher, a, kernel, step) for step in steps[: 1 if machine.quick else None]]
    return rows


def _time(machine: Machine, launcher: Launcher, a: AttentionAttributes, kernel: str, step: Workload) -> Row:
    units = 0 if kernel == "decode" else MANY if kernel == "decode_split" else machine.driver.multiprocessors
    if kernel == "decode_split":
        units = max(machine.driver.multiprocessors, step.sequences * a.num_kv_heads)
    with device_arrays(machine.driver) as arrays:
        made = workload_arrays(arrays, a, launcher.kernels, step, units)
        launches = attention_launches(launcher.kernels, a, made.shape, made.addresses, made.workspace, units)
        wanted = [one for one in launches if one.kernel.name in PARTS[kernel]]
        took = machine.watch.microseconds(queue_of(launcher, wanted, arrays.stream), arrays.stream)
    name = KernelCase(a, "fp16").name
    count = roofline.append_bytes if kernel == "rope_append" else roofline.attend_bytes
    return Row(kernel, f"{step}; {name}", microseconds=took, num_bytes=count(a, step))


def check_graph(machine: Machine, store: KernelStore, step: Workload | None = None) -> list[Row]:
    """A decode step's attention in every layer, launched one by one and as a CUDA graph: same outputs, both timed."""
    a = timed_attributes(quick=True)[0]
    step = step or Workload(8, 1, 512)
    driver = machine.driver
    with loaded(machine, store, a, "fp16") as launcher, device_arrays(driver) as arrays:
        layers = [
            workload_arrays(arrays, a, launcher.kernels, step, driver.multiprocessors)
            for _ in range(2 if machine.quick else LAYERS)
        ]
        launches = [
            one
            for made in layers
            for one in attention_launches(
                launcher.kernels, a, made.shape, made.addresses, made.workspace, driver.multiprocessors
            )
        ]
        queue = queue_of(launcher, launches, arrays.stream)
        queue()
        size = step.tokens * a.num_heads * a.head_dim
        eager = [arrays.download(made.addresses["out"], (size,), np.uint16) for made in layers]
        for made in layers:
            driver.fill(made.addresses["out"], 0xFF, 2 * size, arrays.stream)
        driver.synchronize(arrays.stream)
        driver.begin_capture(arrays.stream)
        try:
            queue()
        finally:
            graph = driver.end_capture(arrays.stream)
        try:
            driver.launch_graph(graph, arrays.stream)
            captured = [arrays.download(made.addresses["out"], (size,), np.uint16) for made in layers]
            different = sum(int((x != y).sum()) for x, y in zip(eager, captured, strict=True))
            eager_us = machine.watch.microseconds(queue, arrays.stream)
            graph_us = machine.watch.microseconds(lambda: driver.launch_graph(graph, arrays.stream), arrays.stream)
        finally:
            driver.synchronize(arrays.stream)
            driver.destroy_graph(graph)
    moved = len(layers) * (roofline.attend_bytes(a, step) + roofline.append_bytes(a, step))
    title = f"decode {step}, {len(layers)} layers; {KernelCase(a, 'fp16').name}"
    return [
        Row("eager launches", title, microseconds=eager_us, num_bytes=moved),
        Row("CUDA graph", f"{title}: elements unlike eager's", different, 0, graph_us, moved),
    ]
