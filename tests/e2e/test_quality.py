"""What each recipe of the demo engine costs against transformers in fp32, as its manifest records it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from castline.engines.bundle import find_bundle
from castline.engines.manifest import Parity, read_manifest

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


def test_default_recipe(int8_engine: Path) -> None:
    """int8 weights with int8 KV blocks."""
    found = parity(int8_engine)
    assert found.mean_kl <= 0.02
    assert found.top1_agreement >= 0.94


def test_fp8_kv(engines: Callable[..., Path]) -> None:
    """int8 weights with fp8 KV blocks."""
    assert parity(engines("int8", "fp8")).mean_kl <= 0.05


def test_int4_states_its_true_figures(engines: Callable[..., Path]) -> None:
    """These weights came from another 4-bit grid: the loss is large, and the manifest says so rather than hide it."""
    assert 0.1 < parity(engines("int4", "int8")).mean_kl <= 0.5
