"""`castline bench` from its command line to its files, against a scripted server. Counts and structure, no timings."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from castline.commands.bench import command

Bench = Callable[..., Result]


@pytest.fixture
def bench(server: Any, tmp_path: Path) -> Bench:
    """Runs the command against the server, with short requests; JSON goes to ``tmp_path / "out.json"``."""

    def run(*arguments: str) -> Result:
        common = ["--url", server.url, "--prompt-tokens", "23", "--output-tokens", "6", "--warmup", "0"]
        return CliRunner().invoke(command, [*common, "--json", str(tmp_path / "out.json"), *arguments])

    return run


def points(tmp_path: Path) -> list[dict[str, Any]]:
    found = json.loads((tmp_path / "out.json").read_text())["points"]
    assert isinstance(found, list)
    return found


def test_sweep(server: Any, bench: Bench, tmp_path: Path) -> None:
    """The whole of it: model found, prompts sized in the server's tokens, every point measured, files written."""
    plot = tmp_path / "curve.png"
    result = bench(
        "--concurrency", "1,3", "--rate", "500", "--num-requests", "6", "--plot", str(plot), "--json-requests"
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["model"] == "scripted"
    assert document["calibration"] == {"tokens_per_word": 2.0, "base_tokens": 3.0, "measured": True}
    assert [(p["mode"], p["load"]) for p in document["points"]] == [("closed", 1), ("closed", 3), ("open", 500)]
    for point in document["points"]:
        assert (point["started"], point["completed"], point["failed"]) == (6, 6, 0)
        assert point["prompt_tokens"] == {"total": 6 * 23, "mean": 23.0, "min": 23, "max": 23}
        assert point["output_tokens"] == {"total": 36, "mean": 6.0, "min": 6, "max": 6}
        assert point["output_tokens_counted"] is True
        assert (point["ttft_ms"]["count"], point["itl_ms"]["count"]) == (6, 30)
        assert point["finish_reasons"] == {"length": 6}
        assert len(point["requests"]) == 6
        assert all(len(request["gaps_ms"]) == 5 for request in point["requests"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(server.measured_bodies) == 18
    assert {body["ignore_eos"] for body in server.measured_bodies} == {True}
    assert len({body["prompt"] for body in server.measured_bodies}) == 18, "no prompt is asked twice"


@pytest.mark.parametrize(
    ("drafted", "accepted"),
    [
        ("castline:spec_drafted_tokens_total", "castline:spec_accepted_tokens_total"),
        ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    ],
)
def test_guessed_tokens_are_reported(server: Any, bench: Bench, tmp_path: Path, drafted: str, accepted: str) -> None:
    """Synthetic answers often run in loops: speed that comes from guessing them must not pass for the engine's own."""
    series = '# HELP x y\n{}{{model_name="m"}} {}\n{}{{model_name="m"}} {}\n'
    counts = [(100.0, 30.0), (140.0, 48.0), (140.0, 48.0), (140.0, 48.0)]
    server.metrics = [series.format(drafted, before, accepted, right) for before, right in counts]
    result = bench("--concurrency", "1,2", "--num-requests", "6")
    first, second = points(tmp_path)
    assert (first["drafted_tokens"], first["accepted_draft_tokens"]) == (40, 18)
    assert (second["drafted_tokens"], second["accepted_draft_tokens"]) == (0, 0)
    assert "at concurrency 1: the server guessed 40 tokens ahead" in " ".join(result.output.split())
    assert "45% were right, 50% of the output" in " ".join(result.output.split())


def test_a_server_without_such_counters_is_measured_all_the_same(server: Any, bench: Bench, tmp_path: Path) -> None:
    """Most servers have no /metrics, or no speculation."""
    server.metrics = ["# TYPE a counter\na_total 3\n"]
    result = bench("--concurrency", "1,2", "--num-requests", "6")
    assert [point["drafted_tokens"] for point in points(tmp_path)] == [None, None]
    assert "guessed" not in result.output


def test_closed_loop_reaches_its_concurrency(server: Any, bench: Bench, tmp_path: Path) -> None:
    """The server answers nobody until 4 requests are there: fewer in flight would hang, and time out as failures."""
    server.release_at = 4
    result = bench("--concurrency", "4", "--num-requests", "12", "--timeout", "20")
    assert result.exit_code == 0, result.output
    assert (points(tmp_path)[0]["completed"], points(tmp_path)[0]["peak_in_flight"]) == (12, 4)


def test_open_loop_starts_whatever_the_server_does(server: Any, bench: Bench, tmp_path: Path) -> None:
    """Coordinated omission, end to end: the server answers only when the last of 20 requests has arrived."""
    server.release_at = 20
    result = bench("--rate", "400", "--num-requests", "20", "--timeout", "20")
    assert result.exit_code == 0, result.output
    (point,) = points(tmp_path)
    assert (point["completed"], point["peak_in_flight"]) == (20, 20)
    assert point["offered_rate"] == pytest.approx(400, rel=0.6)


def test_chat(server: Any, bench: Bench, tmp_path: Path) -> None:
    """The chat endpoint, with data-set conversations of their own lengths."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}\n{"prompt": "c"}\n')
    runner = ["--url", server.url, "--warmup", "0", "--output-tokens", "6", "--json", str(tmp_path / "out.json")]
    arguments = ["--endpoint", "chat", "--dataset", str(rows), "--concurrency", "1", "--num-requests", "4"]
    result = CliRunner().invoke(command, [*runner, *arguments])
    assert result.exit_code == 0, result.output
    assert points(tmp_path)[0]["output_tokens"]["total"] == 2 * (3 + 6)
    assert set(server.paths) == {"/v1/chat/completions"}
    assert [body["messages"][0]["content"] for body in server.measured_bodies] == ["a b", "c", "a b", "c"]


def test_options_reach_the_server(server: Any, bench: Bench) -> None:
    """Model, key, temperature and --no-ignore-eos are what the server sees; warm-up requests are not counted."""
    result = bench(
        *("--model", "other", "--api-key", "secret", "--temperature", "0.5", "--no-ignore-eos"),
        *("--concurrency", "2", "--num-requests", "4", "--warmup", "3"),
    )
    assert result.exit_code == 0, result.output
    assert len(server.measured_bodies) == 3 + 4
    assert {body["model"] for body in server.bodies} == {"other"}
    assert {body["temperature"] for body in server.bodies} == {0.5}
    assert not any("ignore_eos" in body for body in server.bodies)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
    assert "secret" not in result.output


def test_failures_are_counted_by_kind(server: Any, bench: Bench, tmp_path: Path) -> None:
    """Each way to fail is told apart, with an example; the others are still measured."""
    kinds = ["http 503", "mid-stream error", "cut", "malformed", "normal", "normal"]
    server.behave = lambda index: kinds[index]
    result = bench("--concurrency", "2", "--num-requests", "6")
    assert result.exit_code == 0, result.output
    (point,) = points(tmp_path)
    assert (point["completed"], point["failed"]) == (2, 4)
    counts = {failure["kind"]: failure["count"] for failure in point["failures"]}
    assert counts == {"http 503": 1, "stream error": 1, "disconnected": 1, "malformed": 1}
    assert "failed: 1 × http 503: no room" in result.output
    assert "the engine fell over" in result.output
    assert point["output_tokens"]["total"] == 12, "tokens of failed requests are no throughput"


def test_timeout(server: Any, bench: Bench, tmp_path: Path) -> None:
    """A request that hangs is given up and named; the connection is not used again."""
    server.behave = lambda index: "hang" if index == 0 else "normal"
    result = bench("--concurrency", "1", "--num-requests", "3", "--timeout", "2")
    assert result.exit_code == 0, result.output
    (point,) = points(tmp_path)
    assert point["completed"] == 2
    assert point["failures"] == [
        {"kind": "timeout", "count": 1, "example": "no complete answer within 2 s (--timeout)"}
    ]


def test_server_without_usage(server: Any, bench: Bench, tmp_path: Path) -> None:
    """Tokens are then counted as chunks, which is said."""
    server.reports_usage = False
    result = bench("--concurrency", "1", "--num-requests", "2")
    assert result.exit_code == 0, result.output
    (point,) = points(tmp_path)
    assert (point["output_tokens"]["total"], point["output_tokens_counted"], point["prompt_tokens"]) == (
        12,
        False,
        None,
    )
    assert "the server reports no usage" in " ".join(result.output.split())


def test_server_that_refuses_stream_options(server: Any, bench: Bench, tmp_path: Path) -> None:
    """The field is left out, and the run goes on as with any server without usage."""
    server.refused_fields = ("stream_options",)
    assert bench("--concurrency", "1", "--num-requests", "2").exit_code == 0
    assert not any("stream_options" in body for body in server.measured_bodies)
    assert points(tmp_path)[0]["output_tokens_counted"] is False


@pytest.mark.parametrize("refused", [("ignore_eos",), ("ignore_eos", "stream_options")])
def test_server_that_refuses_ignore_eos(server: Any, bench: Bench, refused: tuple[str, ...]) -> None:
    """Nothing is measured with lengths that nobody asked for: the cure is named."""
    server.refused_fields = refused
    result = bench("--concurrency", "1")
    assert result.exit_code == 1
    assert "--no-ignore-eos" in str(result.exception)
    assert not server.measured_bodies


def test_early_stops_are_noted(server: Any, bench: Bench) -> None:
    """Lengths that were not kept change every figure."""
    server.behave = lambda index: "stop"
    result = bench("--concurrency", "1", "--num-requests", "2")
    assert "2 answer(s) ended before the length asked for" in result.output


def test_every_request_failed(server: Any, bench: Bench, tmp_path: Path) -> None:
    """Exit status 1, the figures there are, and no further loads on a server that refuses all."""
    server.behave = lambda index: "http 503"
    result = bench("--concurrency", "1,2,4", "--num-requests", "2")
    assert result.exit_code == 1
    assert "no request succeeded" in result.output
    assert "the loads after it were left out" in result.output
    assert [point["failed"] for point in points(tmp_path)] == [2]


def test_failing_warm_up_ends_the_run(server: Any, bench: Bench) -> None:
    """What a warm-up shows need not be found out a hundred times over."""
    server.behave = lambda index: "http 503"
    result = bench("--warmup", "2")
    assert (result.exit_code, len(server.measured_bodies)) == (1, 2)
    assert "every warm-up request failed (http 503): no room" in str(result.exception)


def test_no_models(server: Any, bench: Bench) -> None:
    """A server that lists nothing needs --model."""
    server.models = {"data": []}
    assert "name one with --model" in str(bench().exception)
    server.models = {"oops": 1}
    assert "name the model with --model" in str(bench().exception)


def test_refused_connection() -> None:
    """One sentence with the address and the cure, no traceback; with --model too, where nothing asks for the list."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        for arguments in ([], ["--model", "m"]):
            done = castline_bench("--url", url, *arguments)
            assert done.returncode == 1
            assert "refused" in done.stderr
            assert "--url" in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "0"], "above 0"),
        (["--concurrency", "1,1"], "twice"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--rate", "x"], "not a list of numbers"),
        (["--rate", "nan"], "above 0"),
        (["--num-requests", "3", "--duration", "3"], "exclude each other"),
        (["--burstiness", "2", "--concurrency", "1"], "--rate"),
        (["--dataset", __file__, "--prompt-tokens", "3"], "leave out --prompt-tokens"),
        (["--prompt-tokens", "8", "--prompt-spread", "8"], "must be below"),
        (["--output-tokens", "8", "--output-spread", "9"], "must be below"),
        (["--json-requests"], "--json FILE"),
        (["--plot", "curve.gif"], ".png or .svg"),
        (["--plot", "/nowhere/curve.png"], "does not exist"),
        (["--json", "/nowhere/out.json"], "does not exist"),
    ],
)
def test_wrong_options(arguments: list[str], says: str) -> None:
    """Found before the server is asked anything (here there is none), with exit status 2."""
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain install lacks rich and matplotlib: the cure is one command, named before anything is measured."""
    monkeypatch.setattr("castline.commands.bench.find_spec", lambda name: None)
    result = CliRunner().invoke(command, ["--plot", "curve.png"])
    assert result.exit_code == 1
    assert "rich and matplotlib" in result.output
    assert "pip install 'castline[bench]'" in result.output


def test_interrupt_keeps_what_was_measured(server: Any, tmp_path: Path) -> None:
    """Ctrl-C in the second point: both points are printed and written, the second as partial; status 130."""
    server.behave = lambda index: "hang" if index >= 4 else "normal"
    out = tmp_path / "out.json"
    arguments = ["--url", server.url, "--output-tokens", "6", "--warmup", "0", "--concurrency", "1,2"]
    process = start_castline_bench(*arguments, "--num-requests", "3", "--json", str(out))
    assert server.reached.wait(60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert "TTFT" in stdout
    document = json.loads(out.read_text())
    assert document["interrupted"] is True
    first, second = document["points"]
    assert (first["completed"], first["unfinished"]) == (3, 0)
    assert (second["completed"] + second["unfinished"], second["failed"]) == (second["started"], 0)
    assert second["unfinished"] >= 1


def start_castline_bench(*arguments: str) -> "subprocess.Popen[str]":
    program = "from castline.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "bench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def castline_bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    process = start_castline_bench(*arguments)
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
