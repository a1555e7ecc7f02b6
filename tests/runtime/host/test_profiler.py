"""Profiles of a real engine: the tiny bundle, in this process and behind a server's link."""

import asyncio
import errno
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from castline.commands import profile
from castline.engines.errors import EngineError
from castline.plugins.cpu.operator_profile import read_profile
from castline.runtime.async_engine import AsyncEngine
from castline.runtime.core import EngineCore
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import plan_engine
from castline.runtime.profile_options import ProfileOptions
from castline.runtime.profiler import Profiler
from castline.runtime.request import Request
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.startup import load_core
from castline.runtime.step_profile import NO_MARKS, Phase

IN_STEP = [str(phase) for phase in Phase if phase is not Phase.IDLE]


def check_trace(path: Path) -> list[dict[str, Any]]:
    """The slices of a trace, in order, each with its ``parent``'s name. Asserts what Perfetto's importer wants."""
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if (e["ph"], e["name"]) == ("M", "thread_name")}
    processes = {e["pid"] for e in events if (e["ph"], e["name"]) == ("M", "process_name")}
    slices: list[dict[str, Any]] = []
    last: dict[str, float] = {}
    for event in events:
        assert event["ph"] in ("M", "X", "C")
        assert isinstance(event["name"], str)
        assert (event["pid"], event["tid"]) in tracks
        assert event["pid"] in processes
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert event["ts"] >= last.get(event["name"], 0)
            assert all(isinstance(value, int) for value in event["args"].values())
            last[event["name"]] = event["ts"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            slices.append(event)
    _check_nesting(slices)
    return slices


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Each slice begins when those before it have ended, or lies inside one that has not; in whole nanoseconds."""
    open_slices: list[tuple[int, str]] = []
    begin = 0
    for event in slices:
        assert round(event["ts"] * 1000) >= begin, "slices are in order"
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while open_slices and open_slices[-1][0] <= begin and end > open_slices[-1][0]:
            open_slices.pop()
        assert not open_slices or end <= open_slices[-1][0], f"{event['name']} sticks out of {open_slices[-1][1]}"
        event["parent"] = open_slices[-1][1] if open_slices else None
        open_slices.append((end, event["name"]))


def run_requests(core: EngineCore, marks: Any, count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number in range(count):
        core.add_request(Request(str(number), tuple(b"a prompt"), params))
    tokens = []
    while core.has_work:
        marks.mark(Phase.RECEIVE)
        tokens += [token for event in core.step() for token in event.token_ids]
        marks.mark(Phase.SEND)
        marks.step_done()
    return tokens


def profiled(repository: Path, directory: Path, num_steps: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens of three requests, and the slices of the one trace."""
    plan = plan_engine(repository, LoadOptions(kv_blocks=64))
    profiler = Profiler(ProfileOptions(str(directory), num_steps))
    core, executor = load_core(plan.bundle, plan.limits, plan.num_threads, profiler)
    profiler.attach(executor, plan.limits)
    profiler.start()
    tokens = run_requests(core, profiler, 3)
    profiler.finish()
    executor.close()
    (path,) = directory.iterdir()
    return tokens, check_trace(path)


def test_a_trace_nests_operators_in_the_step_that_ran_them(tiny_repository: Path, tmp_path: Path) -> None:
    """A trace that Perfetto refuses, or operators that lie beside their executor phase."""
    _, slices = profiled(tiny_repository, tmp_path, 100)
    parents = {(event["name"], event["parent"]) for event in slices if event["cat"] != "operator"}
    assert parents == {("step", None), *((name, "step") for name in IN_STEP), ("forward pass", "executor")}
    names = Counter(event["name"] for event in slices)
    steps = names["step"]
    assert steps >= 8
    assert names["forward pass"] == steps, "the clocks of both profiles agree"
    operators = [event for event in slices if event["cat"] == "operator"]
    assert {event["parent"] for event in operators} == {"forward pass"}
    roles = Counter(event["args"]["role"] for event in operators)
    assert (roles["qkv"], roles["attention"], roles["o"], roles["head"]) == (2 * steps, 2 * steps, 2 * steps, steps)
    assert sum(e["args"]["tokens"] for e in slices if e["name"] == "step") == 3 * (8 + 7)


def test_a_profile_changes_no_token(tiny_repository: Path, tmp_path: Path) -> None:
    """A recording that begins or ends between two steps must not touch what the requests get."""
    plan = plan_engine(tiny_repository, LoadOptions(kv_blocks=64))
    core, executor = load_core(plan.bundle, plan.limits, plan.num_threads)
    expected = run_requests(core, NO_MARKS, 3)
    executor.close()
    tokens, slices = profiled(tiny_repository, tmp_path, 3)
    assert tokens == expected
    assert sum(event["name"] == "step" for event in slices) == 3, "the recording ended by itself"


async def greedy(engine: AsyncEngine, prompt: str) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [t async for o in engine.generate(prompt, params, request_id="r") for t in o.token_ids]


def test_profiles_of_a_server(
    tiny_repository: Path,
    tmp_path: Path,
    reference: Callable[[Sequence[int], int], list[int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """--profile through the link: recordings end at their steps, at the next command, and at the end of the server."""

    async def scenario() -> None:
        plan = plan_engine(tiny_repository)
        engine = await AsyncEngine.start(plan, profile=ProfileOptions(str(tmp_path), 5))
        for prompt in ("one", "two", "three"):
            assert await greedy(engine, prompt) == reference(prompt.encode(), 8)
            engine.start_profile()
        await engine.drain(5)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    names = ["castline-1.trace.json", "castline-2.trace.json", "castline-3.trace.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    slices = [check_trace(tmp_path / name) for name in names]
    assert [sum(event["name"] == "step" for event in part) for part in slices] == [5, 5, 5]
    # The engine waits for the first prompt; what starts the later recordings may arrive together with their prompts.
    assert "idle" in {event["name"] for event in slices[0] if event["parent"] is None}
    output = capfd.readouterr().out
    assert output.count("phases of the engine loop") >= 3
    assert all(str(tmp_path / name) in output for name in names)


def test_a_profile_that_cannot_be_written_ends_no_server(
    tiny_repository: Path,
    tmp_path: Path,
    reference: Callable[[Sequence[int], int], list[int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A directory that is removed while it serves: the profile is lost, at its last step and at the next command; no
    request is, and once the directory is there again so is the next profile.
    """
    directory = tmp_path / "profiles"
    directory.mkdir()

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository), profile=ProfileOptions(str(directory), 5))
        shutil.rmtree(directory)
        assert await greedy(engine, "one") == reference(b"one", 8)
        engine.start_profile()
        assert await greedy(engine, "two") == reference(b"two", 8)
        directory.mkdir()
        engine.start_profile()
        assert await greedy(engine, "three") == reference(b"three", 8)
        await engine.drain(5)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    log = capfd.readouterr().err
    assert log.count("a profile of 5 steps is lost") == 2
    assert f"see that {directory} is there" in log
    assert sum(e["name"] == "step" for e in check_trace(directory / "castline-1.trace.json")) == 5


def test_a_profile_of_an_engine_that_is_gone_ends_no_server(
    tiny_repository: Path,
    tmp_path: Path,
    reference: Callable[[Sequence[int], int], list[int]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The graph is opened anew for a recording: removed, or built anew in its place, it would end what it serves."""
    repository = tmp_path / "models"
    shutil.copytree(tiny_repository, repository)
    (graph,) = repository.rglob("model.onnx")
    profiles = tmp_path / "profiles"

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(repository), profile=ProfileOptions.into(profiles, 2))
        assert await greedy(engine, "one") == reference(b"one", 8)
        graph.rename(graph.with_suffix(".old"))
        engine.start_profile()
        assert await greedy(engine, "two") == reference(b"two", 8)
        shutil.copy(graph.with_suffix(".old"), graph)
        engine.start_profile()
        assert await greedy(engine, "three") == reference(b"three", 8)
        await engine.drain(5)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert capfd.readouterr().err.count(f"{graph} is not what was loaded: start the server again to record one") == 2
    assert [path.name for path in profiles.iterdir()] == ["castline-1.trace.json"]


def test_a_signal_to_all_processes_of_a_server_ends_none(tiny_repository: Path) -> None:
    """``pkill -USR1 -f castline`` asks the server for a profile, and must not kill the engine beside it."""

    async def scenario() -> None:
        engine = await AsyncEngine.start(plan_engine(tiny_repository))
        os.kill(engine.pid, signal.SIGUSR1)
        assert len(await greedy(engine, "one")) == 8
        await engine.drain(5)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_directory_that_takes_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """Otherwise a server that is profiled for an hour says so when the profile is to be written."""
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", Path("/proc/self/fdinfo")):
        with pytest.raises(EngineError, match=f"cannot write profiles into {directory}"):
            ProfileOptions.into(directory, 5)


@pytest.mark.parametrize("size", [0, 1000])
def test_half_a_profile_is_no_profile(
    tiny_repository: Path, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves ONNX Runtime's file cut off: a server is told, and `castline profile` fails with the cure."""

    def read_cut_off(path: Path, start_ns: int, vocab_size: int) -> Any:
        os.truncate(path, size)
        return read_profile(path, start_ns, vocab_size)

    monkeypatch.setattr("castline.plugins.cpu.session.read_profile", read_cut_off)
    lost: list[EngineError] = []
    plan = plan_engine(tiny_repository, LoadOptions(kv_blocks=64))
    for on_lost in (lost.append, None):
        profiler = Profiler(ProfileOptions(str(tmp_path), 3), on_lost)
        core, executor = load_core(plan.bundle, plan.limits, plan.num_threads, profiler)
        profiler.attach(executor, plan.limits)
        profiler.start()
        try:
            if on_lost is None:
                with pytest.raises(EngineError, match=r"a profile of 3 steps is lost .*has room"):
                    run_requests(core, profiler, 3)
            else:
                assert len(run_requests(core, profiler, 3)) == 24
        finally:
            executor.close()
    assert len(lost) == 1
    assert not list(tmp_path.iterdir()), "nothing of it stays"


def test_a_trace_that_a_full_disk_cuts_off_does_not_stay(
    tiny_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer would refuse it, and its name says that there is one."""

    def cut_off(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", cut_off)
    with pytest.raises(EngineError, match="No space left on device"):
        profiled(tiny_repository, tmp_path, 3)
    assert not list(tmp_path.iterdir())


def invoke(repository: Path, *arguments: str) -> str:
    result = CliRunner().invoke(profile.command, [str(repository), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_steps_of_a_given_shape(tiny_repository: Path, tmp_path: Path) -> None:
    """`castline profile`: every recorded step has the shape that was asked for, and the table says which."""
    output = invoke(tiny_repository, "--batch", "5", "--context", "20", "--steps", "6", "-o", str(tmp_path))
    assert output.startswith("decode steps: 6, 5.0 sequences and 5.0 tokens each")
    assert sum(event["name"] == "step" for event in check_trace(tmp_path / "castline-1.trace.json")) == 6
    output = invoke(
        tiny_repository, "--batch", "2", "--context", "9", "--prefill", "30", "--steps", "4", "-o", str(tmp_path),
        "--temperature", "0.7", "--top-p", "0.9", "--top-k", "20",
    )  # fmt: skip
    assert output.startswith("steps with prompts: 4, 3.0 sequences and 32.0 tokens each")
    assert (tmp_path / "castline-2.trace.json").exists(), "an earlier profile stays"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "17"), "the step has 17 sequences, and this engine runs 1 to 16"),
        (("--batch", "0"), "the step has 0 sequences"),
        (("--context", "250", "--steps", "100"), "a sequence reaches its greatest length"),
        (("--batch", "8", "--context", "50", "--kv-blocks", "32", "--steps", "100"), "the KV pool is too small"),
    ],
)
def test_impossible_shapes_are_refused(
    tiny_repository: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """A step that silently has another shape gives figures that mean something else."""
    with pytest.raises(EngineError, match=message):
        invoke(tiny_repository, *arguments, "-o", str(tmp_path))
