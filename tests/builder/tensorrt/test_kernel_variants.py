"""Every kind of kernel compiles for every GPU, and none spills registers or wants memory that the GPU has not."""

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from castline.plugins.tensorrt.compile import SHARED_BYTES

PROGRAM = Path(__file__).parent / "compile_variants.py"
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "12.1")
KERNELS = {"rope_append", "decode", "decode_split", "decode_merge", "prefill", "greedy", "sample", "gather_inputs"}
INTEGER_E4M3, HARDWARE_E4M3 = 2, 1
MOST_REGISTERS = 255
PROCESSES = 2

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


Fork = Callable[..., subprocess.CompletedProcess[str]]


def run(fork: Fork, capability: str) -> list[dict[str, Any]]:
    done = fork(run_path, str(PROGRAM), None, "__main__", words=(str(PROGRAM), capability))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def variants(fork: Fork) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """``variants(capability)``: what the program said; all capabilities are compiled side by side from the start."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        running: dict[str, Future[list[dict[str, Any]]]] = {
            capability: pool.submit(run, fork, capability) for capability in CAPABILITIES
        }
        yield lambda capability: running[capability].result()
        for future in running.values():
            future.cancel()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_variant_compiles_without_spills(
    variants: Callable[[str], list[dict[str, Any]]], capability: str
) -> None:
    """A kernel that spills is several times slower, and one that wants more shared memory cannot be launched: both are
    seen on the GPU alone, by whoever has it. From 8.9 on the hardware converts fp8 blocks; before, integers do."""
    major, minor = map(int, capability.split("."))
    found = variants(capability)
    assert len(found) == 4
    for variant in found:
        assert not variant["error"], variant
        kernels = variant["kernels"]
        assert set(kernels) == KERNELS
        for name, kernel in kernels.items():
            assert kernel["spills"] == 0, (variant["variant"], name)
            assert 0 < kernel["registers"] <= MOST_REGISTERS
            assert kernel["shared"] <= SHARED_BYTES[major, minor]
            assert kernel["bytes"] > 1000
    fp8 = [variant for variant in found if "FP8" in variant["variant"]]
    kinds = {variant["kernels"][name]["constants"]["kind"] for variant in fp8 for name in ("decode", "prefill")}
    assert kinds == {HARDWARE_E4M3 if (major, minor) >= (8, 9) else INTEGER_E4M3}


DOES_NOT_FIT = """
from castline.engines.errors import BuildError
from castline.plugins.contract import AttentionAttributes
from castline.plugins.tensorrt.compile import KernelCompiler, KernelShape
a = AttentionAttributes(0, 8, 2, 64, 0.125, 16, 4, rotary_dim=64)
shape = KernelShape(tile={tile}, queries={queries}, num_warps={num_warps})
list(KernelCompiler((8, 9), "fp16").attention(a, shape, ("prefill",)))
"""


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"tile": 64, "queries": 16, "num_warps": 1}, "bytes of registers are spilled"),
        ({"tile": 512, "queries": 4, "num_warps": 16}, "bytes of shared memory, the GPU has 101376"),
    ],
)
def test_what_does_not_fit_is_seen(fork: Fork, shape: dict[str, int], message: str) -> None:
    """The check above must be able to fail: 64 query rows in the registers of one warp, and keys that are larger than
    shared memory."""
    done = fork(exec, DOES_NOT_FIT.format(**shape), {})
    assert done.returncode != 0
    assert message in done.stderr
