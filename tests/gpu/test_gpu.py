"""The checks of `tests/gpu/run.py` as tests: each case of it, where there is a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.cuda_driver import CudaDriver
from gpu_checks import attention, end_to_end, sampling
from gpu_checks.cases import KernelCase, kernel_cases
from gpu_checks.machine import Machine
from gpu_checks.store import KernelStore, NotRun
from gpu_checks.table import Row

RUN = Path(__file__).parent / "run.py"

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    try:
        driver = CudaDriver()
    except EngineError as error:
        pytest.skip(f"no GPU to run on: {error}")
    made = Machine(driver)
    yield made
    made.close()
    driver.close()


@pytest.fixture(scope="module")
def store(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory, compile_environment: dict[str, str]
) -> KernelStore:
    """Compiled in processes of their own: in this one Triton interprets."""
    if not machine.sku:
        pytest.skip(f"{machine.driver.device_name} is not among engines/skus: python tests/gpu/run.py checks it")
    home = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, str(RUN), "--compile-only", "--sku", machine.sku, "--kernels", str(home)]
    subprocess.run(command, check=True, env=compile_environment)
    return KernelStore(home, machine.driver.compute_capability, machine.sku)


def judge(rows: list[Row]) -> None:
    failed = [row for row in rows if row.failed]
    assert not failed, failed


@pytest.mark.parametrize("case", kernel_cases(), ids=lambda case: case.name)
def test_attention(machine: Machine, store: KernelStore, case: KernelCase) -> None:
    """A kernel that the interpreter proved may still be miscompiled, or mislaunched."""
    judge(attention.check(machine, store, case))


def test_sampling(machine: Machine, store: KernelStore) -> None:
    judge(sampling.check(machine, store))


def test_graph(machine: Machine, store: KernelStore) -> None:
    """What is captured must be what was launched."""
    judge(attention.check_graph(machine, store))


def test_demo(machine: Machine) -> None:
    try:
        judge(end_to_end.check(machine.sku, quick=False))
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
