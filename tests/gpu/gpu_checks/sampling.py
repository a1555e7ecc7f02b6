"""The sampler's kernels and the gathering of inputs, against the host's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.tensorrt.kernel_bench import DeviceArrays, device_arrays, queue_of
from castline.plugins.tensorrt.kernel_set import KernelName
from castline.plugins.tensorrt.launcher import Launch, Launcher
from castline.runtime.draw import Choice, draw
from gpu_checks import roofline
from gpu_checks.machine import Machine
from gpu_checks.store import VOCAB_SIZE, KernelStore
from gpu_checks.table import Row

BLOCK_SIZE = 32
ROWS = 64
NEAR = 1e-5
"""A uniform number so near to where two tokens meet may give either: the GPU's exponentials differ in the last bits."""
TOLERANCE = 0.02
"""Share of rows whose token is another all the same: those at an edge of top-p."""
OPTIONS: tuple[dict[str, float], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
)


def check(machine: Machine, store: KernelStore, rows: int = ROWS, vocab: int = VOCAB_SIZE) -> list[Row]:
    with _loaded(machine, store, vocab) as launcher, device_arrays(machine.driver) as arrays:
        logits = np.random.default_rng(0).standard_normal((rows, vocab), np.float32) * 3
        found = [_greedy(machine, launcher, arrays, logits), _broken(launcher, arrays, logits)]
        for options in OPTIONS[: 2 if machine.quick else None]:
            found.append(_sample(machine, launcher, arrays, logits, options))
        return [*found, _gather(launcher, arrays)]


def _greedy(machine: Machine, launcher: Launcher, arrays: DeviceArrays, logits: NDArray[np.float32]) -> Row:
    logits = np.round(logits * 4) / 4  # many equal ones
    values = {"logits": arrays.upload(logits), **_results(arrays, len(logits))}
    launch = _launch(launcher, "greedy", len(logits), values)
    took = machine.watch.microseconds(queue_of(launcher, [launch], arrays.stream), arrays.stream)
    wrong = float((_tokens(arrays, values, len(logits)) != logits.argmax(1)).mean())
    moved = roofline.sampling_bytes(*logits.shape)
    return Row("greedy", f"{logits.shape[0]} rows of {logits.shape[1]}: share unlike argmax", wrong, 0.0, took, moved)


def _broken(launcher: Launcher, arrays: DeviceArrays, logits: NDArray[np.float32]) -> Row:
    logits = logits.copy()
    logits[1, -3], logits[2, 5], logits[3] = np.nan, np.inf, -np.inf
    values = {"logits": arrays.upload(logits), **_results(arrays, len(logits))}
    queue_of(launcher, [_launch(launcher, "greedy", len(logits), values)], arrays.stream)()
    finite = arrays.download(values["finite"], (len(logits),), np.int32)
    expected = np.ones(len(logits), np.int32)
    expected[1:4] = 0
    return Row("greedy", "rows with NaN, infinity and nothing", float((finite != expected).sum()), 0.0)


def _sample(machine: Machine, launcher: Launcher, arrays: DeviceArrays, logits: NDArray[np.float32],
            options: Mapping[str, float]) -> Row:  # fmt: skip
    rows = len(logits)
    uniform = np.random.default_rng(5).uniform(0.001, 0.999, rows)
    choice = Choice(
        temperature=np.full(rows, 0.8),
        top_k=np.full(rows, options.get("top_k", 0), np.int64),
        top_p=np.full(rows, options.get("top_p", 1.0)),
        min_p=np.full(rows, options.get("min_p", 0.0)),
        uniform=uniform,
    )
    types = {
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "uniform": np.float32,
    }
    values = {"logits": arrays.upload(logits), **_results(arrays, rows)}
    values |= {name: arrays.upload(getattr(choice, name).astype(kind)) for name, kind in types.items()}
    launch = _launch(launcher, "sample", rows, values)
    took = machine.watch.microseconds(queue_of(launcher, [launch], arrays.stream), arrays.stream)
    found = _tokens(arrays, values, rows)
    wrong = 1 - np.mean([found[row] in allowed for row, allowed in enumerate(allowed_tokens(logits, choice))])
    said = ", ".join(f"{name} {value:g}" for name, value in options.items()) or "no truncation"
    moved = roofline.sampling_bytes(*logits.shape)
    title = f"{rows} rows of {logits.shape[1]}, {said}: share unlike the host's"
    return Row("sample", title, float(wrong), TOLERANCE, took, moved)


def allowed_tokens(logits: NDArray[np.float32], choice: Choice) -> list[set[int]]:
    """What the host draws at each row's number, and right beside it."""
    peak = logits.max(1)
    drawn = [
        draw(logits, peak, Choice(choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.uniform + shift))
        for shift in (-NEAR, 0.0, NEAR)
    ]
    return [set(map(int, row)) for row in zip(*drawn, strict=True)]


def _gather(launcher: Launcher, arrays: DeviceArrays) -> Row:
    batch, width, random = 200, 9, np.random.default_rng(2)
    sampled = random.integers(0, 40_000, 64).astype(np.int32)
    source = random.integers(-1, 64, batch).astype(np.int32)
    given = random.integers(0, 40_000, batch).astype(np.int32)
    table = random.integers(1, 5000, (batch, width)).astype(np.int32)
    lens = random.integers(1, (width - 1) * BLOCK_SIZE, batch).astype(np.int32)
    lens[-30:] = 0
    arrays_in = {"sampled": sampled, "source": source, "given": given, "table": table, "kv_lens": lens}
    values = {name: arrays.upload(array) for name, array in arrays_in.items()}
    values |= {name: arrays.empty(4 * batch) for name in ("input_ids", "positions", "slots")}
    spec = launcher.kernels.find("gather_inputs")
    blocks = -(-batch // int(spec.constants["width"]))
    launch = _launch(launcher, "gather_inputs", blocks, {**values, "batch": batch, "table_width": width})
    queue_of(launcher, [launch], arrays.stream)()
    live = lens > 0
    block = table[np.arange(batch), lens // BLOCK_SIZE]
    expected = {
        "input_ids": np.where(live, np.where(source >= 0, sampled[source], given), 0),
        "positions": np.where(live, lens, 0),
        "slots": np.where(live, block * BLOCK_SIZE + lens % BLOCK_SIZE, -1),
        "kv_lens": np.where(live, lens + 1, 0),
    }
    wrong = sum(
        int((arrays.download(values[name], (batch,), np.int32) != want).sum()) for name, want in expected.items()
    )
    return Row("gather_inputs", f"{batch} sequences: wrong numbers", wrong, 0)


@contextmanager
def _loaded(machine: Machine, store: KernelStore, vocab: int) -> Iterator[Launcher]:
    directory, kernels = store.sampling(BLOCK_SIZE, vocab)
    launcher = Launcher(directory, kernels, machine.driver, machine.driver.multiprocessors)
    try:
        yield launcher
    finally:
        launcher.close()


def _results(arrays: DeviceArrays, rows: int) -> dict[str, int]:
    return {name: arrays.empty(4 * rows) for name in ("tokens", "finite")}


def _tokens(arrays: DeviceArrays, values: Mapping[str, int], rows: int) -> NDArray[Any]:
    return arrays.download(values["tokens"], (rows,), np.int32)


def _launch(launcher: Launcher, name: KernelName, programs: int, values: Mapping[str, int]) -> Launch:
    spec = launcher.kernels.find(name)
    return Launch(spec, (programs, 1, 1), tuple(values[argument.name] for argument in spec.arguments))
