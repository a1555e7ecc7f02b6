"""From a bundle to an executor: what is made in which order, and what is left where it fails."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda.driver import FakeDriver
from fake_cuda.model import FakeModel
from fake_cuda.plan import FakePlan, PlanLimits

from castline.engines.errors import EngineError
from castline.engines.sku import load_sku
from castline.runtime.client import EffectiveLimits
from castline.runtime.tensorrt import executor as module
from castline.runtime.tensorrt.executor import TensorRtExecutor

LIMITS = EffectiveLimits(64, 6, 20, 4, 40, max_concurrency=1.0)
MODEL = FakeModel()


def manifest(target: str = "tensorrt_rtx", sku: str | None = "rtx4090", num_layers: int = 2) -> Any:
    gpu = SimpleNamespace(sku=sku) if sku else None
    return SimpleNamespace(
        host=SimpleNamespace(target=target, gpu=gpu),
        model=SimpleNamespace(num_layers=num_layers),
        graph_file="model.plan",
        tool_versions={target: "1.7.1"},
        inputs_sha256="0123456789abcdef" * 4,
        device=SimpleNamespace(weight_bytes=1, scratch_bytes=1 << 20),
    )


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A bundle whose plan is a `FakePlan`; ``hosts`` gets what plans were made with."""
    (tmp_path / "kernels").mkdir()
    kernels = MODEL.write_kernels(tmp_path / "kernels")
    made = SimpleNamespace(path=tmp_path, driver=MODEL.driver(), hosts=[], plans=[], failure=None)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def plan(tensorrt: Any, path: Path, host: Any, compiled: Path) -> FakePlan:
        assert path == tmp_path / "model.plan"
        assert compiled == tmp_path / "castline" / "tensorrt_rtx-1.7.1-rtx4090-0123456789abcdef.runtime"
        if made.failure:
            raise made.failure
        made.hosts.append(host)
        model = replace(MODEL, multiprocessors=load_sku("rtx4090").sm_count)
        made.plans.append(FakePlan(made.driver, host.launcher, model, PlanLimits(20, 6, 16, 100)))
        return made.plans[-1]

    monkeypatch.setattr(module, "read_kernel_set", lambda directory: kernels)
    monkeypatch.setattr(module, "load_flavour", lambda flavour: flavour)
    monkeypatch.setattr(module, "TensorRtPlan", plan)
    return made


def test_a_bundle_is_loaded_for_its_sku(bundle: SimpleNamespace) -> None:
    """The plan's workspace was sized for the SKU's multiprocessors: with other ones, parts of a decode would lie
    beyond it."""
    executor = TensorRtExecutor.load(bundle.path, manifest(), LIMITS, bundle.driver)
    (host,) = bundle.hosts
    assert host.multiprocessors == host.launcher.multiprocessors == load_sku("rtx4090").sm_count
    assert executor.vocab_size == MODEL.vocab_size
    assert bundle.plans[0].is_kept
    executor.close()
    assert bundle.driver.closed


def test_whatever_fails_leaves_nothing(bundle: SimpleNamespace) -> None:
    """The driver is closed, and its close finds no leak."""
    bundle.failure = EngineError("cannot deserialise")
    with pytest.raises(EngineError, match="cannot deserialise"):
        TensorRtExecutor.load(bundle.path, manifest(), LIMITS, bundle.driver)
    assert bundle.driver.closed
    bundle.failure, bundle.driver = None, MODEL.driver()
    with pytest.raises(EngineError, match=r"engine\.json says 3 layers"):
        TensorRtExecutor.load(bundle.path, manifest(num_layers=3), LIMITS, bundle.driver)
    assert bundle.driver.closed


def test_another_targets_bundle_is_refused(bundle: SimpleNamespace) -> None:
    for wrong in (manifest("cpu", None), manifest("tensorrt", None)):
        driver = FakeDriver()
        with pytest.raises(EngineError, match="not for a GPU"):
            TensorRtExecutor.load(bundle.path, wrong, LIMITS, driver)
        assert driver.closed
