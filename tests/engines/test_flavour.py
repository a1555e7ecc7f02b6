"""Which TensorRT builds an engine here."""

import pytest

from castline.engines.errors import EngineError
from castline.engines.flavour import choose_flavour
from castline.engines.manifest import Gpu
from castline.engines.sku import load_sku

L4 = Gpu("l4", "NVIDIA L4", "8.9")
H100 = Gpu("h100-sxm", "NVIDIA H100 80GB HBM3", "9.0")


def test_rtx_builds_with_no_gpu() -> None:
    """The whole point: a plan for an RTX 4090 from a machine that has none, also when asked for as tensorrt."""
    for target in ("tensorrt", "tensorrt_rtx"):
        assert choose_flavour(load_sku("rtx4090"), target, {"tensorrt_rtx"}, None) == "tensorrt_rtx"  # type: ignore[arg-type]


def test_tensorrt_builds_for_the_gpu_that_is_here() -> None:
    """TensorRT tunes on the chip, so it wins there, unless RTX was asked for; for another chip it cannot."""
    both = {"tensorrt", "tensorrt_rtx"}
    assert choose_flavour(load_sku("l4"), "tensorrt", both, L4) == "tensorrt"  # type: ignore[arg-type]
    assert choose_flavour(load_sku("l4"), "tensorrt_rtx", both, L4) == "tensorrt_rtx"  # type: ignore[arg-type]
    assert choose_flavour(load_sku("rtx4090"), "tensorrt", both, L4) == "tensorrt_rtx"  # type: ignore[arg-type]
    assert choose_flavour(load_sku("h100-sxm"), "tensorrt", {"tensorrt"}, H100) == "tensorrt"


@pytest.mark.parametrize(
    ("installed", "gpu", "words"),
    [
        (set(), None, ["pip install tensorrt", "found no GPU", "--kernels-only"]),
        ({"tensorrt", "tensorrt_rtx"}, L4, ["build on a machine with one (found NVIDIA L4)", "--kernels-only"]),
        ({"tensorrt_rtx"}, H100, ["pip install tensorrt", "--kernels-only"]),
    ],
)
def test_hopper_says_in_one_line_what_it_needs(installed: set[str], gpu: Gpu | None, words: list[str]) -> None:
    """9.0 and 10.0 need TensorRT and the GPU: the line names what is missing here, and what builds all the same."""
    with pytest.raises(EngineError) as caught:
        choose_flavour(load_sku("h100-sxm"), "tensorrt", installed, gpu)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert "h100-sxm (compute capability 9.0) needs TensorRT and that GPU" in message
    for word in words:
        assert word in message


def test_a_missing_rtx_names_its_installation() -> None:
    """Its packages must be installed without their dependencies, which nobody guesses."""
    with pytest.raises(EngineError, match="pip install --no-deps tensorrt_rtx_cu13_libs"):
        choose_flavour(load_sku("l4"), "tensorrt", set(), None)
