"""The engine in a process of its own: start, serve, die, stop. With the tiny bundle."""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from castline.engines.errors import EngineError
from castline.engines.manifest import BundleFile, read_manifest, write_manifest
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.client import Output, Phase
from castline.runtime.engine_child import EngineProcess
from castline.runtime.engine_link import EngineLink
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine
from castline.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


async def tokens(engine: AsyncEngine, prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    return [t async for output in engine.generate(prompt, params, request_id="r") for t in output.token_ids]


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def _rest(outputs: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in outputs]


def test_it_serves_and_stops(tiny_repository: Path, reference: Callable[[Sequence[int], int], list[int]]) -> None:
    """The real child gives the reference's tokens, and is gone after a drain."""

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        pid = engine.pid
        assert engine.health().ready
        prompts = [f"prompt number {i}" for i in range(20)]
        results = await asyncio.gather(*(tokens(engine, p) for p in prompts))
        assert results == [reference(p.encode(), 16) for p in prompts]
        await engine.drain(5)
        assert not psutil.pid_exists(pid)
        await engine.drain(5)

    run(scenario)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot choose their cores here")
@pytest.mark.parametrize("end", ["all is said", "the engine dies", "the server stops"])
def test_the_event_loop_keeps_off_the_step_loop(tiny_repository: Path, end: str) -> None:
    """While there is work, and not longer, however that ends."""

    async def scenario() -> None:
        allowed = os.sched_getaffinity(0)
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        outputs = engine.generate("a", replace(GREEDY, max_tokens=100), request_id="r")
        await anext(outputs)
        assert len(os.sched_getaffinity(0)) == max(1, len(allowed) - 1)
        if end == "all is said":
            await _rest(outputs)
        elif end == "the engine dies":
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="signal 9"):
                await _rest(outputs)
        else:
            await engine.drain(0)
        assert os.sched_getaffinity(0) == allowed
        await engine.drain(0)

    run(scenario)


@pytest.mark.parametrize(
    ("number", "where_to_look"), [(signal.SIGKILL, "when memory runs out"), (signal.SIGSEGV, "its log says why")]
)
def test_a_killed_engine_ends_every_request(tiny_repository: Path, number: signal.Signals, where_to_look: str) -> None:
    """The out-of-memory killer or a crash in a kernel: each request ends with the reason, none hangs."""

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        long = replace(GREEDY, max_tokens=200)
        streams = [engine.generate(f"stream {i}", long, request_id="r") for i in range(24)]
        await anext(streams[0])
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams[1:]]
        await asyncio.sleep(0)
        os.kill(engine.pid, number)

        async def exhaust(stream: Any) -> None:
            async for _ in stream:
                pass

        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineError, match=f"killed by signal {int(number)}.*{where_to_look}"):
            await exhaust(streams[0])
        assert engine.health().phase is Phase.FAILED
        with pytest.raises(EngineError, match="signal"):
            await tokens(engine, "later")
        await engine.drain(1)

    run(scenario)


def test_a_hung_engine_is_killed_though_the_drain_is_cut_short(tiny_repository: Path) -> None:
    """A server that has no more time must not leave a process behind that hangs in a step, with its pool."""

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        process = psutil.Process(engine.pid)
        process.suspend()
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.drain(0)
            await asyncio.to_thread(process.wait, 20)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    run(scenario)


def test_the_engine_ends_with_its_server(tiny_repository: Path) -> None:
    """A server that is killed cannot stop its engine: the closed socket must, or a pool of gigabytes stays behind."""

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        process = psutil.Process(engine.pid)
        assert engine._link is not None
        engine._link.close()
        assert await asyncio.to_thread(process.wait, 20) == 0

    run(scenario)


SERVE = """
import asyncio, sys
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.loader import plan_engine

async def serve():
    engine = await AsyncEngine.start(plan_engine(sys.argv[1]))
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's death")
def test_a_hung_engine_ends_with_its_killed_server(tiny_repository: Path) -> None:
    """A loop that hangs in a step never sees the closed socket: it would hold its memory for ever."""
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(tiny_repository)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    engine.suspend()
    server.kill()
    server.wait(60)
    server.stdout.close()
    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_signals_to_the_group_do_not_reach_the_engine(tiny_repository: Path) -> None:
    """Ctrl-C goes to every process of the terminal: the server drains, so its engine must go on stepping."""

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        stream = engine.generate("go on", replace(GREEDY, max_tokens=100), request_id="r")
        await anext(stream)
        os.kill(engine.pid, signal.SIGINT)
        os.kill(engine.pid, signal.SIGTERM)
        rest = [output async for output in stream]
        assert rest[-1].finish_reason is not None
        await engine.drain(5)

    run(scenario)


def test_a_bundle_that_does_not_load_says_why(tiny_repository: Path, tmp_path: Path) -> None:
    """A graph that ONNX Runtime refuses: the child's reason must reach the user, and no process may stay."""
    bundle = shutil.copytree(tiny_repository / "tiny" / "1", tmp_path / "bundle")
    (bundle / "model.onnx").write_bytes(b"not a graph")
    manifest = read_manifest(bundle)
    size, digest = len(b"not a graph"), hashlib.sha256(b"not a graph").hexdigest()
    write_manifest(bundle, replace(manifest, files={"model.onnx": BundleFile(size, digest)}))

    async def scenario() -> None:
        children = psutil.Process().children()
        with pytest.raises(EngineError, match=r"cannot load .*model\.onnx"):
            await AsyncEngine.start(plan_engine(bundle))
        assert psutil.Process().children() == children

    run(scenario)


def test_a_model_of_another_vocabulary_is_refused(tiny_repository: Path, tmp_path: Path) -> None:
    """engine.json and graph of two builds in one directory: sampling would read past a row."""
    bundle = shutil.copytree(tiny_repository / "tiny" / "1", tmp_path / "bundle")
    manifest = read_manifest(bundle)
    write_manifest(bundle, replace(manifest, model=replace(manifest.model, vocab_size=300)))

    async def scenario() -> None:
        with pytest.raises(EngineError, match=r"gives 260 logits a row, and engine.json says vocab_size 300"):
            await AsyncEngine.start(plan_engine(bundle, LoadOptions(kv_blocks=16)))

    run(scenario)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_is_the_servers(tiny_repository: Path, number: signal.Signals) -> None:
    """Ctrl-C while it still imports: a traceback of the child beside the server's own word, or no drain at all."""

    async def scenario() -> None:
        plan = plan_engine(tiny_repository)
        process, connection = EngineProcess.begin(plan.bundle, "off")
        os.kill(process.pid, number)
        process.load(connection, plan)
        engine = await AsyncEngine.start(plan, loading=(process, connection))
        os.kill(process.pid, number)
        assert len(await tokens(engine, "prompt")) == 16
        await engine.drain(5)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    run(scenario)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask, "the server's own are as they were"


def open_files() -> int:
    return psutil.Process().num_fds()


def test_a_process_that_cannot_be_started_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedder that tries again, where the system has no room for a process, would run out of descriptors too."""
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    before = open_files()
    with pytest.raises(FileNotFoundError) as caught:
        EngineProcess.spawn()
    assert open_files() == before, f"{caught.value} still refers to what it met"


def test_a_process_that_ends_at_once_is_told_of_and_cleared_away(
    tiny_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that dies before it has read what to load: its status must reach the user, and no zombie may stay."""
    started: list[int] = []

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    plan = plan_engine(tiny_repository)
    before = open_files()
    with pytest.raises(EngineError, match="the engine process ended with status 1") as caught:
        EngineProcess.start(plan)
    assert not psutil.pid_exists(started[0])
    assert open_files() == before, f"{caught.value} still refers to what it met"


@pytest.mark.parametrize(
    ("manifest", "mode", "huge"),
    [
        ({"host": {"target": "cpu"}}, "auto", True),
        ({"host": {"target": "cpu"}}, "off", False),
        ({"host": {"target": "tensorrt"}}, "auto", False),
        ({"host": []}, "auto", False),
        ([], "auto", False),
    ],
)
def test_a_process_that_begins_early_has_the_heap_that_its_engine_will_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: Any, mode: str, huge: bool
) -> None:
    """A heap cannot be chosen later. What cannot be read is the plan's to refuse, in words."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(EngineProcess, "spawn", lambda environment: given.append(environment))
    monkeypatch.setattr("castline.runtime.huge_heap.available", lambda: True)
    monkeypatch.setattr("castline.runtime.engine_child.environment", lambda outer: {**outer, "HEAP": "huge"})
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    (tmp_path / "engine.json").write_text(json.dumps(manifest))
    EngineProcess.begin(tmp_path, mode)
    assert ("HEAP" in given[0]) is huge
    assert given[0]["OPENBLAS_NUM_THREADS"] == "3", "what the user sets prevails"
    (tmp_path / "engine.json").write_text("{")
    EngineProcess.begin(tmp_path, mode)
    assert "HEAP" not in given[1]


@pytest.mark.parametrize("where", ["the link", "the tokenizer"])
def test_a_start_that_fails_half_way_leaves_nothing(
    tiny_repository: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The engine process loads meanwhile: its memory would stay as long as the embedder's process."""

    async def no_link(*_: object) -> Any:
        raise OSError("no room for another socket")

    def no_tokenizer(bundle: Path) -> Any:
        raise OSError("no room for a tokenizer")

    if where == "the link":
        monkeypatch.setattr(EngineLink, "connect", no_link)
    else:
        monkeypatch.setattr("castline.runtime.async_engine.load_tokenizer", no_tokenizer)

    async def scenario() -> None:
        process, connection = EngineProcess.start(plan_engine(tiny_repository))
        with pytest.raises(OSError, match="no room"):
            await AsyncEngine.start(plan_engine(tiny_repository), loading=(process, connection))
        assert connection.fileno() == -1
        assert not psutil.pid_exists(process.pid)

    run(scenario)
