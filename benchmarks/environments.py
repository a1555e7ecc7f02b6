"""An environment for each peer: created once, installed from the package index with pip, kept between runs."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import Unavailable

BUILD_TIMEOUT_S = 3600.0
NICE = ("nice", "-n", "10") if shutil.which("nice") else ()
"""Installing and converting step aside for whoever else uses the machine."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment at *path*."""

    path: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    def tool(self, name: str) -> str:
        return str(self.path / "bin" / name)

    def install(self, packages: Sequence[str], log: Path, *, drop: Sequence[str] = ()) -> None:
        """Creates it with *packages*, less those of *drop*; does nothing where the same was done before.

        Raises Unavailable with pip's last words.
        """
        marker = self.path / "installed.json"
        wanted = {"packages": list(packages), "drop": list(drop)}
        if marker.exists() and json.loads(marker.read_text()) == wanted:
            return
        if not Path(self.python).exists():
            run([sys.executable, "-m", "venv", str(self.path)], log, "creating the environment")
        pip = [self.python, "-m", "pip", "--disable-pip-version-check"]
        run([*pip, "install", *packages], log, "pip install")
        if drop:
            run([*pip, "uninstall", "--yes", *drop], log, "pip uninstall")
        marker.write_text(json.dumps(wanted))

    def versions(self, packages: Sequence[str]) -> dict[str, str]:
        """Of those of *packages* that are installed."""
        program = (
            "import importlib.metadata as m, json, sys\n"
            "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
            "print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
        )
        done = subprocess.run([self.python, "-c", program, *packages], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {}
        versions: dict[str, str] = json.loads(done.stdout)
        return versions


def run(command: Sequence[str], log: Path, what: str, environment: Mapping[str, str] | None = None) -> None:
    """Runs a long command, its output appended to *log*. Raises Unavailable naming *what* and its last words."""
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    print(f"  {what} …", file=sys.stderr, flush=True)
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        try:
            done = subprocess.run(
                [*NICE, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what} took longer than {BUILD_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise Unavailable(f"{what}: {error}") from None
    if done.returncode != 0:
        raise Unavailable(f"{what} failed ({done.returncode}): {_last_line(log)}; all of it in {log}")
    print(f"  {what}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or ["it said nothing"])[-1][:300]
