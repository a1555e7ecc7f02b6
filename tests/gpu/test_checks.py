"""The GPU checks themselves, on a GPU that Triton's interpreter plays: they must work at their first real one."""

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from castline.engines.errors import EngineError
from castline.plugins.contract import KvDtypeCode, QkNorm
from castline.plugins.tensorrt.kernel_bench import Workload
from castline.runtime.draw import Choice
from gpu_checks import attention, end_to_end, roofline, sampling
from gpu_checks.cases import LENGTHS, STEPS, KernelCase, attributes, kernel_cases
from gpu_checks.machine import Machine
from gpu_checks.store import KernelStore, NotRun
from gpu_checks.table import Row, render

SMALL = {"repeats": 1, "flush_bytes": 1 << 12, "copy_bytes": 1 << 16}
TINY = {name: (Workload(2, 1, 40),) for name in ("rope_append", "decode", "decode_split")} | {
    "prefill": (Workload(1, 9, 40),)
}


@pytest.fixture
def machine(gpu: Any) -> Any:
    made = Machine(gpu, quick=True, **SMALL)
    yield made
    made.close()
    gpu.close()


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path, (8, 9))


def test_cases_cover_what_is_promised() -> None:
    """A combination that falls out of the sweep is a kernel that no GPU has ever checked."""
    cases = kernel_cases()
    assert len(set(cases)) == len(cases)
    found = {(KvDtypeCode(c.attributes.kv_dtype), c.attributes.block_size,
              c.attributes.num_heads // c.attributes.num_kv_heads) for c in cases}  # fmt: skip
    for kv in (KvDtypeCode.FP8, KvDtypeCode.FP16, KvDtypeCode.BF16):
        for block in (16, 32, 64):
            for group in (1, 3, 4, 8):
                assert (kv, block, group) in found
    assert {(c.activations, c.attributes.kv_dtype) for c in cases} >= {
        (x, int(kv)) for x in ("fp16", "bf16") for kv in (KvDtypeCode.FP8, KvDtypeCode.FP16, KvDtypeCode.BF16)
    }
    assert {c.attributes.head_dim for c in cases} >= {64, 128, 256}
    assert {c.attributes.qk_norm for c in cases} == {QkNorm.NONE, QkNorm.PER_HEAD, QkNorm.FULL}
    assert any(c.attributes.window for c in cases)
    assert any(c.attributes.softcap for c in cases)
    assert {0, 1} <= {n for step in STEPS for n in step}
    for case in cases:
        longest = max(n + sum(step[i] for step in STEPS) for i, n in enumerate(LENGTHS))
        assert longest <= case.sequences().table_width * case.attributes.block_size


def test_bytes_of_the_roofline() -> None:
    """By hand, for 2 sequences at 100 tokens, 4 heads over 2 of 64 elements."""
    step = Workload(2, 1, 100)
    fp8 = attributes(group=2, kv=KvDtypeCode.FP8)
    rows = 2 * 2 * 4 * 64 * 2
    assert roofline.attend_bytes(fp8, step) == rows + 2 * (2 * 100 * 2 * 64 + 4 * 4)
    assert roofline.attend_bytes(attributes(group=2, kv=KvDtypeCode.FP16), step) == rows + 2 * (4 * 100 * 2 * 64 + 16)
    windowed = attributes(group=2, kv=KvDtypeCode.FP8, window=10)
    assert roofline.attend_bytes(windowed, step) == rows + 2 * (2 * 10 * 2 * 64 + 4)
    assert roofline.visible_tokens(windowed, Workload(1, 50, 100)) == 59
    appended = 2 * 8 * 64 * 2 + 2 * 64 * 4 + 2 * 4 * 64 * 2 + 2 * 2 * 2 * 64 + 8
    assert roofline.append_bytes(fp8, step) == appended


def test_table() -> None:
    """NaN passes no check; what was not run says why; shares are of what was measured."""
    rows = [
        Row("decode", "a | b", 0.001, 0.004),
        Row("decode", "c", float("nan"), 0.004),
        Row("prefill", "d", 0.005, 0.004),
        Row("prefill", "e", microseconds=10.0, num_bytes=5_000_000),
        Row("engine", "f", not_run="no TensorRT"),
    ]
    text = render({"GPU": "some"}, rows, copy_gb_per_s=1000)
    lines = text.splitlines()
    assert "- GPU: some" in lines
    table = [line for line in lines if line.startswith("| ")]
    assert [line.split(" | ")[-1].rstrip(" |") for line in table[1:]] == [
        "yes", "FAIL", "FAIL", "timed", "not run: no TensorRT"
    ]  # fmt: skip
    assert "| 10.0 | 500 | 50 |" in text
    assert "a / b" in text
    assert "1 of 3 checks passed, 1 not run." in text
    assert [row.failed for row in rows] == [False, True, True, False, False]


@pytest.mark.parametrize("case", [
    KernelCase(attributes(group=3, kv_heads=1, block=16), "fp16"),
    KernelCase(attributes(group=1, kv_heads=1, kv=KvDtypeCode.FP16, window=20, qk_norm=int(QkNorm.PER_HEAD)), "fp16"),
], ids=lambda case: case.name)  # fmt: skip
def test_attention_passes_on_what_the_interpreter_computes(machine: Any, store: KernelStore, case: KernelCase) -> None:
    """Addresses, padding, both kinds of decode and the pool's way back: all that a real GPU goes through."""
    rows = attention.check(machine, store, case)
    assert [row.kernel for row in rows] == ["decode, prefill", "decode_split", "rope_append"]
    assert not any(row.failed for row in rows), rows
    assert all(row.error is not None and row.error > 0 for row in rows[:2])  # fp16 against float64


@pytest.mark.parametrize("spoiled", ["decode", "decode_merge", "prefill"])
def test_attention_fails_where_a_kernel_is_wrong(machine: Any, gpu: Any, store: KernelStore, spoiled: str) -> None:
    """A check that cannot fail proves nothing."""
    gpu.spoil = spoiled
    rows = attention.check(machine, store, KernelCase(attributes(group=1, kv_heads=1, block=64), "fp16"))
    assert any(row.failed for row in rows)


def test_times_and_graph(machine: Any, store: KernelStore) -> None:
    rows = attention.time_kernels(machine, store, TINY)
    assert [row.kernel for row in rows] == list(TINY)
    assert all(row.microseconds == 250 and row.num_bytes > 0 for row in rows)
    eager, graph = attention.check_graph(machine, store, Workload(2, 1, 40))
    assert (eager.microseconds, graph.microseconds, graph.error) == (250, 250, 0)


def test_graph_that_differs_is_seen(
    machine: Any, gpu: Any, store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that was captured with other arguments would give the tokens of another batch."""
    monkeypatch.setattr(gpu, "launch_graph", lambda graph, stream: None)
    _, graph = attention.check_graph(machine, store, Workload(2, 1, 40))
    assert graph.failed


def test_sampling(machine: Any, gpu: Any, store: KernelStore) -> None:
    rows = sampling.check(machine, store, rows=4, vocab=1100)
    assert [row.kernel for row in rows] == ["greedy", "greedy", "sample", "sample", "gather_inputs"]
    assert not any(row.failed for row in rows), rows
    gpu.spoil = "greedy"
    assert any(row.failed for row in sampling.check(machine, store, rows=4, vocab=1100))


def test_tokens_beside_an_edge_are_allowed() -> None:
    """The GPU's exponentials end in other bits: at an edge either token is right, elsewhere one."""
    logits = np.log(np.array([[0.5, 0.3, 0.2]] * 2, np.float32))
    flat = np.ones(2)
    choice = Choice(flat, np.zeros(2, np.int64), flat, flat * 0, np.array([0.5, 0.6]))
    assert sampling.allowed_tokens(logits, choice) == [{0, 1}, {1}]


def test_missing_kernels_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_checks.store.find_spec", lambda name: None)
    with pytest.raises(NotRun, match="Triton is not installed, and there is no sampling-49152-32 in --kernels"):
        KernelStore(tmp_path, (9, 0)).sampling(32)


def test_kernels_of_another_gpu_are_refused(gpu: Any, store: KernelStore, tmp_path: Path) -> None:
    store.sampling(32)
    with pytest.raises(NotRun, match=r"are for 8.9, this GPU has 9.0"):
        KernelStore(tmp_path, (9, 0)).sampling(32)


def test_what_the_demo_lacks_is_said() -> None:
    """A check that is skipped in silence reads as one that passed."""
    every = end_to_end.lacking("l4", ["tensorrt_rtx"], lambda name: True)
    assert every == ""
    assert "not among engines/skus" in end_to_end.lacking("", ["tensorrt"], lambda name: True)
    assert "neither TensorRT" in end_to_end.lacking("l4", [], lambda name: True)
    assert "tensorrt_executor" in end_to_end.lacking("l4", ["tensorrt"], lambda name: name != end_to_end.EXECUTOR)
    assert "torch" in end_to_end.lacking("l4", ["tensorrt"], lambda name: name != "torch")


def _engine(answer: str, tokens: int) -> Any:
    class Engine:
        def __init__(self, repository: Path, **options: Any) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def generate(self, prompts: list[str], params: Any) -> list[Any]:
            facts = [end_to_end.FACTS.get(prompt, "") for prompt in prompts]
            return [
                SimpleNamespace(outputs=[SimpleNamespace(text=answer.format(fact), token_ids=[1] * tokens)])
                for fact in facts
            ]

    return Engine


@pytest.mark.parametrize(("answer", "tokens", "failed"), [
    (" {}.", 64, []),
    (" somewhere.", 64, [0, 1]),
    (" {}.", 63, [2]),
])  # fmt: skip
def test_demo_is_judged_by_what_it_says(tmp_path: Path, answer: str, tokens: int, failed: list[int]) -> None:
    rows = end_to_end.serve(tmp_path, _engine(answer, tokens))
    assert [i for i, row in enumerate(rows) if row.failed] == failed


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", Path(__file__).parent / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_runs_to_its_table(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first call to its last line, with one check that breaks: the others still run, and the run fails."""
    script = _script()
    case = KernelCase(attributes(group=1, kv_heads=1, block=64), "fp16")
    monkeypatch.setattr(script, "kernel_cases", lambda quick: [case])
    monkeypatch.setattr(attention, "WORKLOADS", TINY)
    monkeypatch.setattr(sampling, "check", lambda machine, store: 1 // 0)
    monkeypatch.setattr(attention, "check_graph", lambda machine, store: [Row("CUDA graph", "", 0.0, 0.0)])
    said: list[str] = []
    monkeypatch.setattr(KernelStore, "compile_ahead", lambda self, wanted, block_size, jobs: [])
    text, passed = script.run(gpu, tmp_path, True, said.append, **SMALL)
    assert not passed
    assert "ZeroDivisionError" in text
    assert "Interpreted (SKU unknown)" in text
    assert "not run: this GPU is not among engines/skus" in text
    assert "| prefill | 1 x 9 at 40" in text
    assert sum(line.endswith("ok") for line in said) == 3
    gpu.close()  # nothing is left on the device


def test_nothing_checked_is_no_pass(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton and without kernels every check says why it was not run: that is no success."""
    script = _script()
    monkeypatch.setattr("gpu_checks.store.find_spec", lambda name: None)
    text, passed = script.run(gpu, tmp_path, True, lambda line: None, **SMALL)
    assert not passed
    assert "0 of 0 checks passed" in text
    assert "not run: Triton is not installed" in text
    gpu.close()


def test_an_illegal_access_is_reported(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one, CUDA fails every call, those that free things too: the table must be printed all the same."""
    script = _script()

    def broken(*_given: Any) -> None:
        raise EngineError("cuMemFree gave CUDA_ERROR_ILLEGAL_ADDRESS")

    case = KernelCase(attributes(group=1, kv_heads=1, block=64), "fp16")
    monkeypatch.setattr(script, "kernel_cases", lambda quick: [case])
    monkeypatch.setattr(script, "checks", lambda *given: [("decode", lambda: [Row("decode", "", 0.0, 0.0)])])
    monkeypatch.setattr(KernelStore, "compile_ahead", lambda self, wanted, block_size, jobs: [])
    monkeypatch.setattr(gpu, "destroy_event", broken)
    monkeypatch.setattr(gpu, "memory", lambda: (1, 2))
    text, passed = script.run(gpu, tmp_path, True, lambda line: None, **SMALL)
    assert not passed
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in text
    assert "1 of 2 checks passed" in text


def test_no_gpu_is_no_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without a driver the script says so, and a workflow does not take that for success."""
    monkeypatch.setattr("sys.argv", ["run.py", "--device", "99"])
    assert _script().main() == 2
    assert "nothing was checked: " in capsys.readouterr().err
