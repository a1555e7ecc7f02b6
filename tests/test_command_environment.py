"""What a castline process takes over from outside, and what it leaves there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SILENCES = ("ORT_DISABLE_TELEMETRY", "CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST")
"""What keeps ONNX Runtime quiet by itself."""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if name not in SILENCES}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=outer | environment, capture_output=True, text=True, timeout=60, check=False)


def test_nothing_is_told_to_anybody(tmp_path: Path) -> None:
    """ONNX Runtime leaves an identifier and its records in the user's cache before it sends them."""
    code = "import castline.plugins.cpu.session as s; s.onnxruntime.InferenceSession"
    done = run(code, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name.lower()]


def test_who_wants_it_told_can_say_so() -> None:
    code = "import os, castline; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert run(code).stdout == "1\n"
    assert run(code, ORT_DISABLE_TELEMETRY="0").stdout == "0\n"


@pytest.mark.parametrize("closed", [(0,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_closed_streams_are_nobody_elses(closed: tuple[int, ...], tmp_path: Path) -> None:
    """A socket in the place of a standard stream would be printed to, and a clean end would be an abort."""
    told = tmp_path / "told"
    code = f"""
import json, os, sys
for stream in {closed}:
    os.close(stream)
from castline.cli import main
sys.argv = ["castline", "inspect", "--help"]
try:
    main()
except BaseException:
    pass
at = [os.path.samestat(os.fstat(stream), os.stat(os.devnull)) for stream in range(3)]
kept = [os.get_inheritable(stream) for stream in range(3)]
json.dump([at, kept], open({str(told)!r}, "w"))
"""
    run(code)
    at, kept = json.loads(told.read_text())
    assert all(at[stream] for stream in closed)
    assert kept == [True] * 3
