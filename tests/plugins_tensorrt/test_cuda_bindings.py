"""The real cuda-bindings over a driver library of our own: types, sizes and order of arguments as C receives them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "libcuda_stub.c"
USE = """
import numpy as np
from castline.engines.errors import EngineError
from castline.plugins.tensorrt.cuda_driver import CudaDriver

driver = CudaDriver()
assert driver.device_name == "Stub" and driver.cuda_version == "13.2" and driver.compute_capability == (75, 76)
assert (driver.multiprocessors, driver.l2_bytes, driver.memory()) == (16, 38, (3000, 8000))
stream, event = driver.create_stream(), driver.create_event()
driver.record(event, stream); driver.wait(stream, event); driver.synchronize_event(event)
assert driver.elapsed_ms(event, event) == 1.5

host = driver.allocate_pinned(64)
host[:] = np.arange(64)
first, second = driver.allocate(64), driver.allocate(64)
driver.copy_to_device(first, host, stream)
driver.copy_on_device(second, first + 16, 32, stream)
driver.fill(first, 7, 8, stream)
driver.copy_to_host(host[:8], first, stream)
driver.copy_to_host(host[8:40], second, stream)
driver.synchronize(stream)
assert host[:40].tolist() == [7] * 8 + list(range(16, 48))

function = driver.function(driver.load_module(b"cubin\\0binary"), "decode", 60_000)
typed = [("pointer", 2**40 + 16), ("i32", -5), ("i64", 2**33), ("f32", 0.5)]
driver.launch(function, (7, 2, 3), 128, 60_000, stream, typed)
driver.begin_capture(stream)
graph = driver.end_capture(stream)
driver.launch_graph(graph, stream); driver.destroy_graph(graph)

for use in (lambda: driver.allocate(2 << 20), lambda: driver.synchronize(99)):
    try:
        use()
    except EngineError as error:
        print("error:", error)
driver.free(first); driver.free(second); driver.free_pinned(host)
driver.destroy_event(event); driver.destroy_stream(stream); driver.unload_module(0x13)
driver.close()
"""
SAID = """
current 0x70
stream 1
event 0
wait 0x11 0x12
image cubin
kernel decode
attribute 8 60000
launch 0x14 7 2 3 / 128 1 1, 60000 bytes, 0x11, extra (nil)
arguments 10000000010 -5 8589934592 0.5 0 0
capture 1
graph 0x15
graph destroyed 0x15
graph launched 0x16
error: the GPU is out of memory: 2,097,152 bytes were asked for, 3,000 of 8,000 are free; lower --memory-utilization \
or --kv-blocks, or stop what else uses the GPU
error: waiting for the GPU: cuStreamSynchronize gave CUDA_ERROR_SOME (some words)
release 0
"""


def test_calls_as_the_driver_receives_them(tmp_path: Path) -> None:
    """The bindings convert what they are given: an address cut to 32 bits or a swapped size fails on GPUs alone."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    compiler = shutil.which("g++") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the stub of the driver's library cannot be built")
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-w", "-o", str(library), str(STUB), "-ldl"]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == SAID.strip()
