"""Choices of kernel shapes: what a file says reaches the compiler, and a wrong file is named."""

from pathlib import Path

import pytest

from castline.engines.errors import EngineError
from castline.engines.kernel_choices import (
    CHOICES_DIRECTORY,
    KernelChoice,
    KernelChoices,
    kernel_choices,
    read_kernel_choices,
    write_kernel_choices,
)
from castline.engines.sku import all_skus

DECODE = KernelChoice("decode", 64, 4, 3, "pruned, not timed", "fp8", 128, registers=90, shared_bytes=4096)
SAMPLE = KernelChoice("sample", 4096, 8, 1, "timed on NVIDIA L4, 2026-11-30", microseconds=12.5)


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    """A lost field is a choice that was timed and is not used."""
    choices = KernelChoices("triton 3.9.0", (DECODE, SAMPLE))
    write_kernel_choices(tmp_path / "some" / "l4.toml", choices)
    assert read_kernel_choices(tmp_path / "some" / "l4.toml") == choices


def test_what_is_found() -> None:
    """bf16 goes by fp16: both are 16 bits. Another type or size is another kernel."""
    half = KernelChoice("prefill", 32, 8, 2, "pruned, not timed", "fp16", 64)
    choices = KernelChoices("", (DECODE, SAMPLE, half))
    assert choices.find("decode", "fp8", 128) is DECODE
    assert choices.find("prefill", "bf16", 64) is half
    assert choices.find("sample") is SAMPLE
    assert choices.find("decode", "fp8", 64) is choices.find("decode", "fp16", 128) is choices.find("greedy") is None


@pytest.mark.parametrize(("group", "queries"), [(1, 64), (3, 16), (4, 16), (8, 8), (71, 1)])
def test_tokens_of_a_prefill_tile(group: int, queries: int) -> None:
    """A tile has rows for the power of two above the group; one of fewer than one token would do nothing."""
    assert KernelChoice("prefill", 32, 4, 2, "", "fp8", 64, rows=64).queries(group) == queries


@pytest.mark.parametrize(("text", "said"), [
    ('compiler = "x"\n[[choice]]\nkernel = "decode"\ntile = 64\nnum_stages = 2\nchosen = ""\n', "num_warps"),
    ('compiler = "x"\n[[choice]]\nkernel = "embed"\n', "embed"),
    ('compiler = "x"\nchoice = []\nother = 1\n', "other"),
    ("compiler", "l4.toml"),
])  # fmt: skip
def test_wrong_files_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "l4.toml").write_text(text)
    with pytest.raises(EngineError, match=said):
        read_kernel_choices(tmp_path / "l4.toml")


@pytest.mark.parametrize(("choices", "said"), [
    ((DECODE, DECODE), "decode fp8 128 is chosen twice"),
    ((KernelChoice("decode", 48, 4, 2, ""),), "tile 48 of decode must be a power of two"),
    ((KernelChoice("decode", 32, 6, 2, ""),), "num_warps 6 of decode"),
])  # fmt: skip
def test_choices_that_no_compiler_takes(tmp_path: Path, choices: tuple[KernelChoice, ...], said: str) -> None:
    write_kernel_choices(tmp_path / "l4.toml", KernelChoices("", choices))
    with pytest.raises(EngineError, match=said):
        read_kernel_choices(tmp_path / "l4.toml")


def test_shipped_files_are_sound_and_of_known_skus() -> None:
    """A misnamed file would never be read; a wrong one would stop every build for its SKU."""
    names = {sku.name for sku in all_skus()}
    for path in CHOICES_DIRECTORY.glob("*.toml"):
        assert path.stem in names
        assert kernel_choices(path.stem).choice


def test_unknown_skus_have_no_choices() -> None:
    assert kernel_choices("no-such-gpu").choice == kernel_choices("").choice == ()
