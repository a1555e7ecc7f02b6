"""Recordings of engine steps with their operators: each ends as a table on the terminal and a trace file.

A recording takes the next ``num_steps`` steps. Its operators come from the inference library's own profiler, which can
only be on from the start, so the executor opens the engine anew for it: a start costs as much as a load without the
pool, and weights in huge pages move there again before it begins; nothing lasts when it is over. Of a device that
samples, the phases alone are recorded: what runs on it is for the vendor's own profiler to tell.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from castline.engines.errors import EngineError, ProfileRefused
from castline.plugins.cpu.operator_profile import OperatorRun
from castline.runtime.client import EffectiveLimits
from castline.runtime.device_executor import DeviceExecutor
from castline.runtime.executor import RehearsingExecutor
from castline.runtime.plan import StepPlan
from castline.runtime.profile_options import ProfileOptions
from castline.runtime.profile_report import ProfiledStep, join_runs, table
from castline.runtime.profile_trace import trace_json
from castline.runtime.startup import warm_up
from castline.runtime.step_profile import Phase, StepRecorder


class ProfilingExecutor(RehearsingExecutor, Protocol):
    def start_profile(self, prefix: str) -> None:
        """Operators of later steps are recorded; *prefix* begins the names of files that it may need meanwhile."""
        ...

    def end_profile(self) -> list[OperatorRun]:
        """The steps since `start_profile`, on `perf_counter_ns`'s clock."""
        ...


class Profiler:
    """Not thread-safe: the engine loop owns it. It implements `castline.runtime.step_profile.StepMarks`."""

    def __init__(self, options: ProfileOptions, on_lost: Callable[[EngineError], None] | None = None) -> None:
        """*on_lost* is told of a recording that cannot be written, and what runs goes on. None: `finish` raises it."""
        self._options = options
        self._on_lost = on_lost
        self._recorder: StepRecorder | None = None
        self._number = 0

    def attach(self, executor: ProfilingExecutor | DeviceExecutor, limits: EffectiveLimits) -> None:
        """What runs the steps; before the first `start`."""
        self._executor = None if isinstance(executor, DeviceExecutor) else executor
        self._limits = limits

    @property
    def recording(self) -> bool:
        return self._recorder is not None

    def start(self) -> None:
        """Begins a recording; one that runs is finished first. Raises EngineError.

        Where one is refused, *on_lost* is told, and what runs goes on.
        """
        self.finish()
        if self._executor is not None:
            try:
                self._executor.start_profile(str(Path(self._options.directory) / "operators"))
            except ProfileRefused as refusal:
                if self._on_lost is None:
                    raise
                self._on_lost(refusal)
                return
            warm_up(self._executor, self._limits)
        self._recorder = StepRecorder(self._options.num_steps)

    def finish(self) -> None:
        """Ends the recording, if there is one, and writes what it has. Raises EngineError unless *on_lost* is told."""
        if self._recorder is None:
            return
        records, self._recorder = self._recorder.records, None
        try:
            steps = join_runs(records, [] if self._executor is None else self._executor.end_profile())
            if steps:
                self._write(steps)
        except (OSError, ValueError) as error:  # ValueError: half of an operator profile, where a disk is full
            lost = EngineError(
                f"a profile of {len(records)} steps is lost ({error}): see that {self._options.directory} is there, may"
                " be written and has room, and record again"
            )
            if self._on_lost is None:
                raise lost from error
            self._on_lost(lost)

    def _write(self, steps: list[ProfiledStep]) -> None:
        path = self._free_path()
        try:
            path.write_bytes(trace_json(steps))
        except OSError:
            path.unlink(missing_ok=True)  # no viewer opens half of it
            raise
        print(f"{table(steps)}\n\ntrace: {path} (open it in https://ui.perfetto.dev)", flush=True)

    def mark(self, phase: Phase) -> None:
        if self._recorder is not None:
            self._recorder.mark(phase)

    def scheduled(self, plan: StepPlan) -> None:
        if self._recorder is not None:
            self._recorder.scheduled(plan)

    def step_done(self) -> None:
        if self._recorder is not None:
            self._recorder.step_done()
            if self._recorder.complete:
                self.finish()

    def _free_path(self) -> Path:
        """Profiles of earlier servers in the same directory stay."""
        while True:
            self._number += 1
            path = Path(self._options.directory) / f"castline-{self._number}.trace.json"
            if not path.exists():
                return path
