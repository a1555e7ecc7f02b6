"""`castline tune-kernels`: what it tunes, where it writes, and what it refuses."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from castline.builder.tensorrt import kernels, tune_kernels
from castline.cli import main
from castline.commands import tune_kernels as tune_command
from castline.engines.errors import BuildError
from castline.engines.gpu import FoundGpu
from castline.engines.kernel_choices import KernelChoice, KernelChoices, read_kernel_choices, write_kernel_choices

SAMPLE = KernelChoice("sample", 1024, 8, 1, "timed on NVIDIA L4, 2026-01-01", microseconds=9.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tuner is asked for; it finds one shape for everything."""
    seen: list[Any] = []

    def tune(self: Any, tuned: Sequence[Any], known: KernelChoices, advance: Any) -> KernelChoices:
        seen.append((self.sku.name, self.clock, [(one.kernel, one.kv_dtype, one.head_dim) for one in tuned]))
        made = [KernelChoice(one.kernel, 64, 4, 2, "found", one.kv_dtype, one.head_dim) for one in tuned]
        return KernelChoices("triton", (*known.choice, *made))

    monkeypatch.setattr(tune_kernels.KernelTuner, "tune", tune)
    monkeypatch.setattr(kernels, "require_compiler", lambda: None)
    monkeypatch.setattr(tune_command, "detect_gpu", lambda: None)
    return seen


def run(*arguments: str) -> str:
    done = CliRunner().invoke(tune_command.command, list(arguments), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_options_choose_what_is_tuned_and_the_rest_stays(asked: list[Any], tmp_path: Path) -> None:
    output = tmp_path / "l4.toml"
    write_kernel_choices(output, KernelChoices("triton", (SAMPLE,)))
    said = run("--sku", "l4", "--kernel", "decode", "--kernel", "prefill", "--head-dim", "128", "--kv-dtype", "fp8",
               "-o", str(output))  # fmt: skip
    assert asked == [("l4", None, [("decode", "fp8", 128), ("prefill", "fp8", 128)])]
    assert "pruned and not timed: this machine has no NVIDIA L4" in said
    assert {one.key for one in read_kernel_choices(output).choice} == {
        ("sample", "", 0), ("decode", "fp8", 128), ("prefill", "fp8", 128)
    }  # fmt: skip


def test_defaults_are_the_heads_that_models_have(asked: list[Any], tmp_path: Path) -> None:
    run("--sku", "h200", "-o", str(tmp_path / "h200.toml"))
    [(_, _, tuned)] = asked
    assert len(tuned) == 3 * 2 * 2 + 2
    assert {one[2] for one in tuned} == {0, 64, 128}


def test_a_machine_without_gpu_must_be_told_which(asked: list[Any]) -> None:
    with pytest.raises(BuildError, match="--sku is missing, and there is no GPU here"):
        run()


def test_this_machines_gpu_is_the_default_and_no_time_is_obeyed(asked: list[Any], tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    gpu = FoundGpu(0, "NVIDIA L4", "8.9", 1, 1, "13.0")
    monkeypatch.setattr(tune_command, "detect_gpu", lambda: gpu)
    said = run("--no-time", "-o", str(tmp_path / "l4.toml"))
    assert asked[0][:2] == ("l4", None)
    assert "--no-time was given" in said
    unknown = FoundGpu(0, "NVIDIA T1000", "7.5", 1, 1, "13.0")
    monkeypatch.setattr(tune_command, "detect_gpu", lambda: unknown)
    with pytest.raises(BuildError, match="NVIDIA T1000 is not among engines/skus"):
        run()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pruning_needs_no_gpu(tmp_path: Path, fork: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The real compiler, on the demo's heads: what is chosen fits, and says that no clock was asked."""
    pytest.importorskip("triton", reason="Triton is not installed: no kernels")
    output = tmp_path / "a100-40.toml"
    words = ("castline", "tune-kernels", "--sku", "a100-40", "--kernel", "decode_split",
             "--head-dim", "64", "--kv-dtype", "fp8", "--no-time", "-o", str(output))  # fmt: skip
    done = fork(main, words=words)
    assert done.returncode == 0, done.stderr
    [choice] = read_kernel_choices(output).choice
    assert choice.key == ("decode_split", "fp8", 64)
    assert choice.chosen == "pruned, not timed"
    assert 0 < choice.registers <= 255
    assert 0 < choice.shared_bytes <= 163 << 10
    assert choice.max_splits * 8 >= 2 * 108
