"""Which kernels a step launches, with what: proved without a GPU, on a driver that writes down what it is told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from castline.engines.errors import EngineError
from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt.kernel_set import Argument, KernelSet, KernelSpec, attributes_key
from castline.plugins.tensorrt.launcher import (
    ALIGNMENT,
    Launcher,
    StepShape,
    Workspace,
    attention_launches,
    split_count,
    workspace_bytes,
)

A = AttentionAttributes(0, 8, 2, 64, 0.125, 32, int(KvDtypeCode.FP8), rotary_dim=64)
ARGUMENTS = {
    "rope_append": "qkv cos sin q_weight k_weight pool slots q_out num_blocks",
    "prefill": "q pool table kv_lens cu_query_lens out num_sequences table_width num_blocks",
    "decode": "q pool table kv_lens cu_query_lens out table_width num_blocks",
    "decode_split": "q pool table kv_lens cu_query_lens partial table_width num_blocks num_splits",
    "decode_merge": "partial cu_query_lens out num_splits",
}
CONSTANTS: dict[str, dict[str, Any]] = {
    "prefill": {"queries": 16},
    "decode_split": {"tile": 64},
    "decode_merge": {"max_splits": 32, "padded": 64},
}
NUMBERS = ("num_blocks", "num_sequences", "table_width", "num_splits")
ADDRESSES = {name: 1000 + i for i, name in enumerate(("qkv", "cos", "sin", "pool", "slots", "table", "kv_lens",
                                                      "cu_query_lens", "out"))}  # fmt: skip
WORKSPACE = 1 << 20


def spec(name: str, a: AttentionAttributes = A, arguments: str | None = None) -> KernelSpec:
    names = (arguments or ARGUMENTS[name]).split()
    typed = tuple(Argument(one, "i32" if one in NUMBERS else "pointer") for one in names)
    constants = CONSTANTS.get(name, {})
    return KernelSpec(name, name, f"{name}.cubin", typed, constants, 4, 512, 90, 0, attributes_key(a))  # type: ignore[arg-type]


def kernels(a: AttentionAttributes = A) -> KernelSet:
    return KernelSet("8.9", "triton", tuple(spec(name, a) for name in ARGUMENTS))


def launched(shape: StepShape, a: AttentionAttributes = A, multiprocessors: int = 100) -> dict[str, Any]:
    """Kernel name → (grid, arguments by name)."""
    found = attention_launches(kernels(a), a, shape, ADDRESSES, WORKSPACE, multiprocessors)
    return {
        one.kernel.name: (one.grid, dict(zip((x.name for x in one.kernel.arguments), one.arguments, strict=True)))
        for one in found
    }


def test_a_mixed_step_launches_both_kinds_of_attention() -> None:
    """A step of a prompt's chunk and of decodes: each kernel skips the other's sequences, so both must run."""
    found = launched(StepShape(tokens=70, sequences=40, table_width=4, num_blocks=500))
    assert list(found) == ["rope_append", "prefill", "decode_split", "decode_merge"]
    assert found["rope_append"][0] == (70, 8 + 2 * 2, 1)
    assert found["prefill"][0] == (70 // 16 + 40, 2, 1)
    values = found["prefill"][1]
    assert (values["num_sequences"], values["table_width"], values["num_blocks"]) == (40, 4, 500)
    assert values["q"] == found["rope_append"][1]["q_out"] == WORKSPACE
    assert values["out"] == found["decode_merge"][1]["out"] == ADDRESSES["out"]


def test_a_decode_step_launches_no_prefill() -> None:
    """The graph of a decode is captured once for all: an empty prefill in each of its layers costs every token."""
    found = launched(StepShape(tokens=200, sequences=200, table_width=4, num_blocks=500))
    assert list(found) == ["rope_append", "decode"]
    assert found["decode"][0] == (200, 2, 1)


def test_nothing_to_do_launches_nothing() -> None:
    """A grid of 0 programs is an error of the driver's."""
    assert launched(StepShape(0, 0, 4, 500)) == {}


@pytest.mark.parametrize(
    ("sequences", "width", "window", "splits"),
    [
        (1, 64, 0, 32),  # 2,048 keys are 32 tiles; 100 would fill the GPU; 32 is what the merge takes
        (1, 4, 0, 2),  # two tiles: no part without one
        (10, 64, 0, 10),  # 2 waves of 100 / (10 * 2 kv heads)
        (100, 64, 0, 1),
        (500, 64, 0, 1),
        (1, 64, 128, 2),  # only a window is read
    ],
)
def test_splits_fill_the_gpu_and_no_more(sequences: int, width: int, window: int, splits: int) -> None:
    """Too few leave multiprocessors idle at batch 1; too many merge for nothing."""
    a = AttentionAttributes(0, 8, 2, 64, 0.125, 32, int(KvDtypeCode.FP8), window=window, rotary_dim=64)
    shape = StepShape(sequences, sequences, width, 500)
    assert split_count(kernels(a), a, shape, 100) == splits
    found = launched(shape, a)
    assert ("decode" in found) == (splits == 1)
    if splits > 1:
        assert found["decode_split"][0] == (sequences, 2, splits)
        assert found["decode_split"][1]["num_splits"] == found["decode_merge"][1]["num_splits"] == splits
        assert found["decode_merge"][0] == (sequences, 8, 1)


def test_kv_split_of_the_node_is_obeyed() -> None:
    """An attribute that is accepted and ignored tells a tuner lies."""
    a = AttentionAttributes(0, 8, 2, 64, 0.125, 32, int(KvDtypeCode.FP8), kv_split=512)
    assert split_count(kernels(a), a, StepShape(100, 100, 64, 500), 100) == 4


def test_workspace_holds_every_step_up_to_the_largest() -> None:
    """Small batches are cut into more parts: the workspace of the largest step alone is too small for them."""
    largest = StepShape(tokens=256, sequences=64, table_width=64, num_blocks=500)
    total = workspace_bytes(kernels(), A, largest, 100)
    for sequences in (1, 2, 3, 5, 8, 33, 64):
        for tokens in (sequences, 256):
            for width in (1, 7, 64):
                shape = StepShape(tokens, sequences, width, 500)
                splits = split_count(kernels(), A, shape, 100)
                parts = Workspace.of(kernels(), A, shape, splits)
                assert parts.partial >= tokens * 8 * 64 * 2
                assert parts.partial % ALIGNMENT == 0
                assert parts.total <= total
                needed = sequences * 8 * splits * (64 + 2) * 4 if splits > 1 else 0
                assert parts.total - parts.partial >= needed


def test_inputs_that_the_node_has_not_are_null() -> None:
    """A stale address would be read; null faults."""
    values = launched(StepShape(4, 4, 4, 500))["rope_append"][1]
    assert (values["q_weight"], values["k_weight"]) == (0, 0)
    assert values["cos"] == ADDRESSES["cos"]


def test_kernel_of_another_castline_is_refused() -> None:
    """Arguments are given by name: one that is unknown must not shift the others by a place."""
    strange = KernelSet("8.9", "triton", (*kernels().kernels[1:], spec("rope_append", arguments="qkv mystery")))
    with pytest.raises(EngineError, match="kernel rope_append takes mystery, which this castline does not give"):
        attention_launches(strange, A, StepShape(4, 4, 4, 500), ADDRESSES, WORKSPACE, 100)
    other = AttentionAttributes(0, 8, 2, 128, 0.125, 32, int(KvDtypeCode.FP8))
    with pytest.raises(EngineError, match="the engine has no kernel"):
        attention_launches(kernels(), other, StepShape(4, 4, 4, 500), ADDRESSES, WORKSPACE, 100)


class RecordingDriver:
    """Writes down modules, functions and launches."""

    def __init__(self) -> None:
        self.loaded: dict[int, bytes] = {}
        self.functions: dict[int, tuple[int, str, int]] = {}
        self.launches: list[tuple[Any, ...]] = []

    def load_module(self, cubin: bytes) -> int:
        if cubin == b"bad":
            raise EngineError("cuModuleLoadData: no binary for this GPU")
        self.loaded[len(self.loaded) + 1] = cubin
        return len(self.loaded)

    def unload_module(self, module: int) -> None:
        del self.loaded[module]

    def function(self, module: int, entry: str, shared_bytes: int) -> int:
        self.functions[100 + module] = (module, entry, shared_bytes)
        return 100 + module

    def launch(
        self, function: int, grid: Any, threads: int, shared: int, stream: int, arguments: Sequence[Any]
    ) -> None:
        self.launches.append((self.functions[function][1], grid, threads, shared, stream, list(arguments)))


def write_cubins(directory: Path) -> None:
    for name in ARGUMENTS:
        (directory / f"{name}.cubin").write_bytes(name.encode())


def test_launcher_loads_once_and_launches_in_order(tmp_path: Path) -> None:
    """What the driver is handed: the right function, the threads of its warps, typed arguments, the caller's stream."""
    write_cubins(tmp_path)
    driver = RecordingDriver()
    launcher = Launcher(tmp_path, kernels(), driver, 100)  # type: ignore[arg-type]
    assert sorted(driver.loaded.values()) == sorted(name.encode() for name in ARGUMENTS)
    launcher.attention(A, StepShape(3, 3, 64, 500), ADDRESSES, WORKSPACE, stream=77)
    assert [one[0] for one in driver.launches] == ["rope_append", "decode_split", "decode_merge"]
    entry, grid, threads, shared, stream, arguments = driver.launches[2]
    assert (entry, grid, threads, shared, stream) == ("decode_merge", (3, 8, 1), 128, 512, 77)
    assert [kind for kind, _ in arguments] == ["pointer", "pointer", "pointer", "i32"]
    launcher.close()
    assert not driver.loaded


def test_cubin_that_does_not_load_leaves_no_module(tmp_path: Path) -> None:
    """A bundle for another chip, or a damaged one: what was loaded before it must not stay."""
    write_cubins(tmp_path)
    (tmp_path / "decode.cubin").write_bytes(b"bad")
    driver = RecordingDriver()
    with pytest.raises(EngineError, match="no binary for this GPU"):
        Launcher(tmp_path, kernels(), driver, 100)  # type: ignore[arg-type]
    assert not driver.loaded
    (tmp_path / "decode.cubin").unlink()
    with pytest.raises(EngineError, match=r"cannot read .*decode\.cubin"):
        Launcher(tmp_path, kernels(), driver, 100)  # type: ignore[arg-type]
    assert not driver.loaded
