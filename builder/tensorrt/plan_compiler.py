"""Builds a plan in a process of its own, and checks what came out. One function: `compile_plan`."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from castline.builder.tensorrt.plan_log import Layer, check_plan
from castline.builder.tensorrt.plan_request import PlanRequest, decode_answer, encode
from castline.engines.errors import BuildError
from castline.plugins.tensorrt.flavour import link_libraries

WORKER: Final = "castline.builder.tensorrt.plan_worker"
_SHOWN_ERRORS: Final = 3
_SHOWN_LINES: Final = 12


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    path: Path
    seconds: float
    layers: tuple[Layer, ...]
    log: tuple[str, ...]
    """Every message of the builder."""


def compile_plan(
    request: PlanRequest, attention: Collection[str], e4m3: Collection[str] = (), timeout_s: float | None = None
) -> CompiledPlan:
    """Builds the plan of *request*; *attention* and *e4m3* are the nodes that it is checked for (`check_plan`).

    Raises BuildError with the parser's or the builder's own words, naming the node where they do, and where the process
    ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="castline-plan-") as name:
        directory = Path(name)
        link_libraries(request.flavour, directory)
        asked, answered = directory / "request.json", directory / "answer.json"
        asked.write_bytes(encode(request))
        command = [sys.executable, "-m", WORKER, str(asked), str(answered)]
        process = subprocess.Popen(
            command, env=_environment(directory), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BuildError(f"plan: {request.flavour} had no plan after {timeout_s:g} s") from None
        finally:
            process.kill()
            process.wait()
        if not answered.exists():
            raise BuildError(f"plan: the process that builds it {_ending(process.returncode)}: {_last(said)}")
        answer = decode_answer(answered.read_bytes())
    if answer.errors:
        more = len(answer.errors) - _SHOWN_ERRORS
        shown = "; ".join(answer.errors[:_SHOWN_ERRORS]) + (f"; and {more} more" if more > 0 else "")
        raise BuildError(f"plan: {request.flavour} cannot build it for {request.compute_capability}: {shown}")
    layers = check_plan(answer.log, attention, e4m3)
    return CompiledPlan(request.plan, answer.seconds, layers, answer.log)


def _environment(libraries: Path) -> dict[str, str]:
    environment = dict(os.environ)
    path = [str(libraries), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in path if part)
    return environment


def _ending(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _last(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-_SHOWN_LINES:]) or "it said nothing"
