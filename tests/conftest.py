"""Fixtures that rooms share: the demo engines, each built once a run, and a running server."""

import os

# Triton decorates its own library when it is first imported, and transformers imports it: GPU kernels run in its
# interpreter in this process, and are compiled in processes of their own (`uninterpreted`).
os.environ["TRITON_INTERPRET"] = "1"
# References multiply small matrices: threads of BLAS wait for each other several times longer than they multiply.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import contextlib
import fcntl
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from numpy.typing import NDArray

CASTLINE = [sys.executable, "-m", "castline"]
TESTS = Path(__file__).parent
LONGEST_FIRST = [
    TESTS / name
    for name in (
        "builder/tensorrt/test_demo.py",
        "builder/test_demo_quality.py",
        "builder/tensorrt/test_gpu_build.py",
        "builder/tensorrt/test_kernel_variants.py",
        "builder/tensorrt/test_plan.py",
        "gpu/test_checks.py",
        "builder/test_instruction_sets.py",
        "builder/test_architectures.py",
        "plugins/test_native_equals_reference.py",
        "runtime/tensorrt/test_random_steps.py",
        "runtime/device/test_run_ahead_machine.py",
        "server/test_lifecycle.py",
    )
]
"""Files of half a minute to some minutes of a processor."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes that take one file after the other end together if none of the long files comes last."""
    assert all(path.is_file() for path in LONGEST_FIRST), LONGEST_FIRST
    rank = {path: place for place, path in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def uninterpreted() -> dict[str, str]:
    """The environment of a process that compiles kernels."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@dataclass
class Server:
    """A `castline run` process that has said it is ready."""

    process: subprocess.Popen[str]
    http_url: str
    grpc_address: str
    log: list[str]

    def wait(self, timeout: float = 60) -> int:
        return self.process.wait(timeout)


def _collect(stream: Iterator[str], log: list[str], ready: threading.Event) -> None:
    for line in stream:
        log.append(line.rstrip("\n"))
        if line.startswith("ready"):
            ready.set()
    ready.set()


@contextlib.contextmanager
def run_server(repository: Path, *options: str) -> Iterator[Server]:
    """Serves *repository* on free ports until the block ends."""
    command = [*CASTLINE, "run", str(repository), "--http-port", "0", "--grpc-port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=uninterpreted()
    )
    assert process.stdout is not None
    log: list[str] = []
    ready = threading.Event()
    threading.Thread(target=_collect, args=(process.stdout, log, ready), daemon=True).start()
    try:
        ready.wait(120)
        text = "\n".join(log)
        http = re.search(r"http://[\d.]+:\d+", text)
        grpc = re.search(r"grpc://([\d.]+:\d+)", text)
        assert process.poll() is None, text
        assert http, text
        assert grpc, text
        yield Server(process, http.group(0), grpc.group(1), log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def build_by_command(repository: Path) -> None:
    """The default demo engine, as a user builds it."""
    command = [*CASTLINE, "build", "demo", "--name", "smollm2", "--no-tune", "--output", str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=uninterpreted())
    assert done.returncode == 0, done.stdout + done.stderr


class DemoBuilder:
    """Builds variants of the demo engine, which have their first stages in common: it loads, exports, fuses and asks
    the reference once. Every other stage is the real one, every time."""

    def __init__(self) -> None:
        self._checkpoint: Any = None
        self._fused: Any = None
        self._logits: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def build(self, repository: Path, recipe: str, kv_dtype: str) -> None:
        from castline.builder import pipeline
        from castline.builder.options import BuildOptions
        from castline.builder.progress import BuildLog

        options = BuildOptions("demo", repository, name="smollm2", tune=False, recipe=recipe, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            for stage in ("load_checkpoint", "export_and_fuse", "torch_reference"):
                patch.setattr(pipeline, stage, partial(getattr(self, stage), getattr(pipeline, stage)))
            pipeline.build(options, BuildLog())

    def load_checkpoint(self, real: Callable[..., Any], model: str) -> Any:
        if self._checkpoint is None:
            self._checkpoint = real(model)
        return self._checkpoint

    def export_and_fuse(self, real: Callable[..., Any], *arguments: Any) -> Any:
        if self._fused is None:
            self._fused = real(*arguments)
        return replace(self._fused, model=self._fused.model.clone())

    def torch_reference(self, real: Callable[..., Any], model: Any) -> Callable[[Sequence[int]], NDArray[np.float32]]:
        reference = real(model)

        def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
            key = tuple(tokens)
            if key not in self._logits:
                self._logits[key] = reference(tokens)
                self._logits[key].flags.writeable = False
            return self._logits[key]

        return logits


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds each variant of the demo engine at most once. CASTLINE_TEST_ENGINES keeps them between runs."""
    kept = os.environ.get("CASTLINE_TEST_ENGINES")
    root = Path(kept) if kept else tmp_path_factory.mktemp("engines")
    builder = DemoBuilder()

    def engine(recipe: str, kv_dtype: str) -> Path:
        repository = root / f"{recipe}-{kv_dtype}"
        root.mkdir(parents=True, exist_ok=True)
        with open(root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run side by side: the second finds what the first built
            if not any(repository.glob("*/*/engine.json")):
                if (recipe, kv_dtype) == ("auto", "auto"):
                    build_by_command(repository)
                else:
                    builder.build(repository, recipe, kv_dtype)
        return repository

    return engine


@pytest.fixture(scope="session")
def default_engine(engines: Callable[..., Path]) -> Path:
    """Repository with the default demo engine: 4-bit weights on their own grid, int8 KV."""
    return engines("auto", "auto")


@pytest.fixture(scope="session")
def fp32_engine(engines: Callable[..., Path]) -> Path:
    """Repository with the demo engine in fp32 weights and fp32 KV."""
    return engines("fp32", "fp32")


@pytest.fixture(scope="session")
def compile_environment() -> dict[str, str]:
    """See `uninterpreted`."""
    return uninterpreted()


@pytest.fixture(scope="session")
def fork() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``fork(function, *arguments, words=...)``: see `forks.run`."""
    return forks.run


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    return run_server
