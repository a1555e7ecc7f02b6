"""`castline run`: options reach the loader and the server, and start-up prints what operators look for."""

import asyncio
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import click
import pytest
from click.testing import CliRunner

from castline.commands import run
from castline.engines.capacity import KvCapacity
from castline.engines.errors import EngineError
from castline.runtime.load_options import LoadOptions
from castline.runtime.loader import EnginePlan
from castline.runtime.profile_options import ProfileOptions
from castline.runtime.stream_interval import AdaptiveInterval, StreamInterval
from castline.server.options import Endpoints, ServerOptions

ENDPOINTS = Endpoints("http://127.0.0.1:8123", "grpc://127.0.0.1:8124")


class Calls:
    """What the command asked for, in place of loading and serving."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.bundle = Path("models/tiny/1")
        self.load = LoadOptions()
        self.server = ServerOptions()

    def plan_bundle(self, bundle: Path, options: LoadOptions) -> EnginePlan:
        assert bundle == self.bundle
        self.load = options
        return EnginePlan(bundle, self.engine.manifest, self.engine.limits, KvCapacity(256, 16, 1 << 20, 4096), 2)

    async def serve(self, open_engine: Any, options: ServerOptions, *, on_listening: Any, on_ready: Any) -> None:
        self.server = options
        self.open_engine = open_engine
        on_listening(ENDPOINTS)
        on_ready(None, ENDPOINTS)

    def find_bundle(self, repository: Path, model: str | None, version: int | None) -> Path:
        self.found = repository, model, version
        return self.bundle

    def begin(self, bundle: Path, huge_pages: str) -> tuple[Mock, Mock]:
        self.begun = bundle, huge_pages
        self.process, self.connection = Mock(), Mock()
        return self.process, self.connection

    def profile(self) -> tuple[ProfileOptions | None, int]:
        """What the engine would be started with, and how often a SIGUSR1 then reaches it."""
        asked: list[ProfileOptions | None] = []
        engine = Mock()

        async def start(
            plan: EnginePlan, *, interval: StreamInterval, profile: ProfileOptions | None, loading: Any
        ) -> Mock:
            pinned = self.server.stream_interval
            assert type(interval) is (AdaptiveInterval if pinned is None else StreamInterval)
            assert interval.tokens == (pinned or 1)
            assert loading == (self.process, self.connection)
            self.process.load.assert_called_once_with(self.connection, plan, profile)
            asked.append(profile)
            return engine

        async def open_and_signal() -> None:
            await self.open_engine()
            if asked[0] is not None:
                started = asyncio.Event()
                engine.start_profile.side_effect = started.set
                signal.raise_signal(signal.SIGUSR1)
                await asyncio.wait_for(started.wait(), 60)

        with patch("castline.runtime.async_engine.AsyncEngine.start", start):
            asyncio.run(open_and_signal())
        return asked[0], engine.start_profile.call_count


@pytest.fixture
def calls(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(engine)
    monkeypatch.setattr(run, "find_bundle", calls.find_bundle)
    monkeypatch.setattr("castline.runtime.loader.plan_bundle", calls.plan_bundle)
    monkeypatch.setattr("castline.server.app.serve", calls.serve)
    monkeypatch.setattr("castline.runtime.engine_child.EngineProcess.begin", calls.begin)
    return calls


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(run.command, ["models", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_loading_option_reaches_the_loader(calls: Calls) -> None:
    """Prevents an option that is accepted and ignored, and a loader's option that nobody can set."""
    given = {
        "model": "tiny",
        "version": 3,
        "memory_utilization": 0.5,
        "max_model_len": 100,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_blocks": 7,
        "threads": 1,
        "speculation": "off",
        "max_drafts": 3,
        "huge_pages": "off",
        "max_waiting": 9,
    }
    arguments = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    invoke(*arguments, "--allow-unverified", "--verify-files")
    assert calls.load == LoadOptions(**given, allow_unverified=True, verify_files=True)  # type: ignore[arg-type]
    assert {field.name for field in fields(LoadOptions)} == {*given, "allow_unverified", "verify_files"}
    assert calls.found == (Path("models"), "tiny", 3)
    assert calls.begun == (calls.bundle, "off"), "the process that begins early is of the same engine"
    invoke()
    assert calls.load == LoadOptions(), "without options the loader decides"


def test_a_refused_engine_leaves_no_process(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins before the engine is checked; a supervisor that tries again would have one more each time."""
    monkeypatch.setattr("castline.runtime.loader.plan_bundle", Mock(side_effect=EngineError("not built for this host")))
    with pytest.raises(EngineError, match="not built for this host"):
        invoke()
    calls.process.abandon.assert_called_once_with(calls.connection)
    calls.process.load.assert_not_called()


def test_serving_options_reach_the_server(calls: Calls) -> None:
    """Prevents a port or a name that is accepted and ignored."""
    invoke(
        *("--host", "0.0.0.0", "--http-port", "1", "--grpc-port", "2", "--served-model-name", "x"),
        *("--drain-timeout", "3", "--stream-interval", "7"),
    )
    assert calls.server == ServerOptions("0.0.0.0", 1, 2, "x", 3.0, 7)
    calls.profile()
    invoke()
    assert calls.server == ServerOptions(model_name="tiny")
    calls.profile()
    invoke("--stream-interval", "auto")
    assert calls.server == ServerOptions(model_name="tiny")


@pytest.mark.parametrize(
    "option",
    [
        ("--http-port", "65536"),
        ("--grpc-port", "-1"),
        ("--drain-timeout", "-1"),
        ("--stream-interval", "0"),
        ("--stream-interval", "-1"),
        ("--stream-interval", "many"),
    ],
)
def test_impossible_values_are_refused(calls: Calls, option: tuple[str, str]) -> None:
    """Prevents a traceback from deep inside a socket."""
    result = CliRunner().invoke(run.command, ["models", *option])
    assert result.exit_code == 2
    assert option[0] in result.output


def test_the_directory_names_the_model(calls: Calls) -> None:
    """Prevents --model b from being served as a: a copy goes by its directory, a bundle alone by its manifest."""
    calls.bundle = Path("models/b/1")
    invoke()
    assert calls.server.model_name == "b"
    calls.bundle = Path("somewhere/engine")
    invoke()
    assert calls.server.model_name == "tiny"


def test_start_up_lines(calls: Calls) -> None:
    """Prevents an operator from having to guess the limits, and scripts from not finding the ports."""
    lines = invoke().splitlines()
    assert "KV cache: 256 blocks of 16 tokens (256 MiB)" in lines
    assert "maximum concurrency at max_model_len (4096): 16.00x" in lines
    assert "limits: max_model_len 4096, max_num_seqs 4, max_num_batched_tokens 512, max_waiting 64" in lines
    assert "speculation: off" in lines
    assert "listening: http://127.0.0.1:8123 grpc://127.0.0.1:8124" in lines
    assert lines[-1].startswith("ready in ")
    assert len([line for line in lines if line.startswith("ready")]) == 1


def test_a_signal_before_the_engine_is_ready_ends_nothing(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for a profile too early gets none; a signal that nobody handles yet would kill the server."""
    before = signal.getsignal(signal.SIGUSR1)
    seen = []

    def find_bundle(*asked: Any) -> Path:
        seen.append(signal.getsignal(signal.SIGUSR1))
        return calls.bundle

    monkeypatch.setattr(run, "find_bundle", find_bundle)
    try:
        invoke("--profile", str(tmp_path))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIG_IGN]


def test_a_profile_reaches_the_engine(calls: Calls, tmp_path: Path) -> None:
    """Prevents --profile from being accepted and ignored, and a directory that cannot be from failing at the end."""
    directory = tmp_path / "new" / "profiles"
    invoke("--profile", str(directory), "--profile-steps", "7")
    assert calls.profile() == (ProfileOptions(str(directory), 7), 1)
    assert directory.is_dir()
    invoke()
    assert calls.profile() == (None, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot write profiles into"):
        invoke("--profile", str(tmp_path / "file" / "sub"))


def test_speculation_is_named_at_start_up(calls: Calls) -> None:
    """Prevents throughput figures of which nobody knows whether guesses are in them."""
    calls.engine.limits = replace(calls.engine.limits, max_drafts=5)
    assert "speculation: prompt lookup where it pays, up to 5 tokens ahead" in invoke().splitlines()


def test_huge_pages_are_named_at_start_up(calls: Calls) -> None:
    """Prevents a server that is slow because its system gives none from looking like one that is not."""
    assert any(
        "none of 2 MiB here" in line and "see /sys/kernel/mm/transparent_hugepage" in line
        for line in invoke().splitlines()
    )
    assert calls.load.huge_pages == "auto"
    assert "huge pages: off" in invoke("--huge-pages", "off").splitlines()
    assert calls.load.huge_pages == "off"


def test_a_server_that_cannot_begin_leaves_no_engine(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is started before the ports are bound: a port that is taken must not leave it loading."""
    monkeypatch.setattr("castline.server.app.serve", Mock(side_effect=EngineError("cannot listen")))
    with pytest.raises(EngineError, match="cannot listen"):
        invoke()
    calls.process.kill.assert_called_once_with()


def test_every_option_has_a_help_text() -> None:
    """Prevents options that only the source explains."""
    for parameter in run.command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or parameter.name == "log_level", parameter.name
