"""What each recipe of the demo engine costs against transformers in fp32, as its manifest records it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from castline.engines.manifest import Parity, read_manifest
from castline.engines.repository import find_bundle

pytestmark = pytest.mark.slow


def parity(repository: Path) -> Parity:
    found = read_manifest(find_bundle(repository)).parity
    assert found is not None
    assert found.verified
    assert found.num_tokens >= 500
    return found


def test_fp32_is_exact(fp32_engine: Path) -> None:
    """Fusing changes the order of sums and nothing else."""
    found = parity(fp32_engine)
    assert found.mean_kl < 1e-6
    assert found.top1_agreement == 1.0


def test_default_recipe(default_engine: Path) -> None:
    """Weights that came as Q4_1 are packed on their own grid: the loss is that of int8 activations and KV blocks."""
    found = parity(default_engine)
    manifest = read_manifest(find_bundle(default_engine))
    assert (manifest.precision.recipe, manifest.precision.kv_dtype) == ("q4_1", "int8")
    assert set(manifest.tuning.matmul.values()) == {"linear-w4dm-g32", "linear-w8-g32"}
    assert found.mean_kl <= 0.01
    assert found.top1_agreement >= 0.95
    assert found.by_step["decode"].mean_kl <= 0.01


def test_int8(engines: Callable[..., Path]) -> None:
    """What checkpoints get whose weights are on no grid."""
    found = parity(engines("int8", "int8"))
    assert found.mean_kl <= 0.01
    assert found.top1_agreement >= 0.94


def test_fp8_kv(engines: Callable[..., Path]) -> None:
    """The default weights with fp8 KV blocks."""
    assert parity(engines("auto", "fp8")).mean_kl <= 0.05
