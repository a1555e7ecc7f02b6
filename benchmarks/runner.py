"""The rounds. In each, every system starts afresh (W7), and then every cell is run on one system after the other.

All systems stay loaded through a round, but only the one that is measured runs: the others are stopped by a signal. So
two systems' figures of a cell lie seconds apart, and no idle system takes time. Each round begins with another system.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.bandwidth import Bandwidth, fastest
from benchmarks.comparison import METRICS, of_equal_quality, worth_repeating
from benchmarks.errors import JobFailed, Unavailable
from benchmarks.figures import Figures, figures_of, require_complete
from benchmarks.machine import CpuTimes, own_cpu_seconds, read_into_page_cache
from benchmarks.preparation import Prepared
from benchmarks.quality import Quality
from benchmarks.results import Results, Sample
from benchmarks.sessions import Session, Warmup
from benchmarks.settings import Settings
from benchmarks.systems.catalogue import CASTLINE, SPECULATIVE
from benchmarks.workloads import Cell, Draw, Job

OURS = (CASTLINE, SPECULATIVE)
SPECULATED = ("W1", "W3", "X2")
"""What the speculative variant is measured on."""
IDLE_S = 20.0
LADDER_STOP_S = 45.0
"""A sweep's point that took longer ends the sweep of that system: the next would take longer still."""


@dataclass(slots=True)
class Runner:
    """*results* is filled as the run goes, so that an interrupted run keeps what it has."""

    settings: Settings
    prepared: Sequence[Prepared]
    cells: Sequence[Cell]
    results: Results
    draw: Draw
    read_bandwidth: Callable[[], Sequence[Bandwidth]] | None = None
    """Measures it now, with all threads; None where that is not possible."""
    _sessions: dict[str, Session] = field(default_factory=dict)
    _ladder_ended: dict[str, str] = field(default_factory=dict)
    _out: dict[str, str] = field(default_factory=dict)
    """Why a system is out for the rest of the round."""

    def run(self) -> None:
        """Interrupted, the results count the rounds that were whole."""
        begun, whole = time.monotonic(), 0
        try:
            for number in range(self.settings.rounds):
                self._round(number)
                whole += 1
        finally:
            self.results.seconds = time.monotonic() - begun
            self.results.rounds = max(whole, 1)

    def _round(self, number: int) -> None:
        draw = Draw(self.draw.vocabulary, self.draw.texts, self.draw.seed, number, self.draw.quick)
        turn = number % len(self.prepared) if self.prepared else 0
        order = [*self.prepared[turn:], *self.prepared[:turn]]
        try:
            for prepared in order:
                self._start(number, prepared, draw)
            for cell in self.cells:
                for prepared in order:
                    self._visit(number, cell, prepared, draw)
        finally:
            for session in self._sessions.values():
                session.stop()
            self._sessions.clear()
            self._out.clear()

    def _start(self, number: int, prepared: Prepared, draw: Draw) -> None:
        system, cells = prepared.system, self._wanted_cells(prepared)
        if not cells:
            return
        timed = any(cell.name == "W7" for cell in cells)
        read_into_page_cache(system.model_files())
        before, own = CpuTimes.now(), own_cpu_seconds()
        try:
            session = system.start()
        except Unavailable as error:
            self._out[system.name] = str(error)
            if timed:
                self._add(Sample(number, system.name, "W7", {}, 0.0, 0.0, str(error)))
            return
        used = session.group.cpu_seconds() + own_cpu_seconds() - own
        others = before.others_share(CpuTimes.now(), used)
        if timed:
            self._add(Sample(number, system.name, "W7", {"start_s": session.started_in}, session.started_in, others))
        self._sessions[system.name] = session
        rng = draw.rng("warm-up")
        prompts = tuple(draw.vocabulary.prompt(64, rng) for _ in range(4))
        try:
            Warmup(prompts).run(session, self.settings.job_timeout_s)
        except JobFailed as error:
            self._drop(prepared, f"its warm-up failed: {error}")
            return
        session.group.suspend()

    def _visit(self, number: int, cell: Cell, prepared: Prepared, draw: Draw) -> None:
        system, session = prepared.system, self._sessions.get(prepared.system.name)
        if cell.name == "W7" or not self._wants(cell, prepared, number):
            return
        if session is None:
            self._add(Sample(number, system.name, cell.name, {}, 0.0, 0.0, f"not run: {self._out[system.name]}"))
            return
        readings = self._readings(cell, prepared)
        session.group.resume()
        try:
            if cell.job is None:
                sample = (self._idle if cell.workload == "X4" else self._weigh)(number, prepared, session)
            else:
                sample = self._measure(number, cell, prepared, session, cell.job(draw))
        except JobFailed as error:
            sample = Sample(number, system.name, cell.name, {}, 0.0, 0.0, str(error))
        alive = session.group.alive
        if alive:
            session.group.suspend()
        if sample.values:
            sample = replace(sample, bandwidths=fastest([*readings, *self._readings(cell, prepared)]))
        self._add(sample)
        if not alive:
            self._drop(prepared, f"it ended in {cell.name}")

    def _readings(self, cell: Cell, prepared: Prepared) -> Sequence[Bandwidth]:
        """What castline's W1 is held against, while nothing runs: a minute later the machine may be another."""
        if self.read_bandwidth is None or (prepared.system.name, cell.name) != (CASTLINE, "W1"):
            return ()
        return self.read_bandwidth()

    def _measure(self, number: int, cell: Cell, prepared: Prepared, session: Session, job: Job) -> Sample:
        before, own, theirs = CpuTimes.now(), own_cpu_seconds(), session.group.cpu_seconds()
        begun = time.monotonic()
        outcome = session.run(job, self.settings.job_timeout_s)
        seconds = time.monotonic() - begun
        used = session.group.cpu_seconds() - theirs + own_cpu_seconds() - own
        require_complete(outcome, [request.max_tokens for request in job.requests])
        if cell.workload == "W3" and seconds > LADDER_STOP_S:
            self._ladder_ended[prepared.system.name] = f"not tried: {cell.name} took {seconds:.0f} s"
        others = before.others_share(CpuTimes.now(), used)
        return Sample(number, prepared.system.name, cell.name, figures_of(cell, outcome), seconds, others)

    def _weigh(self, number: int, prepared: Prepared, session: Session) -> Sample:
        """Resident memory, and what of it the KV pool does not account for."""
        memory = session.group.memory_bytes()
        values: Figures = {"resident_mib": memory / 2**20}
        pool = prepared.system.kv_pool_bytes(session.group.log.read_text(errors="replace"))
        if pool is not None:
            values["without_kv_mib"] = (memory - pool) / 2**20
        return Sample(number, prepared.system.name, "W8", values, 0.0)

    def _idle(self, number: int, prepared: Prepared, session: Session) -> Sample:
        """Processor time of a system that has nothing to do, after what it still had to do has been given time."""
        seconds = IDLE_S / 10 if self.draw.quick else IDLE_S
        time.sleep(seconds / 10)
        before, own, theirs = CpuTimes.now(), own_cpu_seconds(), session.group.cpu_seconds()
        time.sleep(seconds)
        used = session.group.cpu_seconds() - theirs
        others = before.others_share(CpuTimes.now(), used + own_cpu_seconds() - own)
        return Sample(number, prepared.system.name, "X4", {"idle_percent": used / seconds * 100}, seconds, others)

    def _wanted_cells(self, prepared: Prepared) -> list[Cell]:
        """castline's own extras are its alone, and its guessing variant is measured where guessing matters."""
        if prepared.system.name == SPECULATIVE:
            return [cell for cell in self.cells if cell.workload in SPECULATED]
        return [cell for cell in self.cells if "castline" not in cell.needs - prepared.system.can]

    def _wants(self, cell: Cell, prepared: Prepared, number: int) -> bool:
        """Whether a cell is run now; the first round notes in words why one never is."""
        name = prepared.system.name
        if cell not in self._wanted_cells(prepared):
            return False
        if name in OURS:
            return True
        reason = self._reason_against(cell, prepared)
        if reason is not None:
            if number == 0:
                self._add(Sample(number, name, cell.name, {}, 0.0, 0.0, reason))
            return False
        return number == 0 or self.settings.repeat_all or self._is_worth_repeating(cell, name)

    def _reason_against(self, cell: Cell, prepared: Prepared) -> str | None:
        if "batching" in cell.needs - prepared.system.can:
            return "static batches: a request cannot join a running one"
        if "prefix_cache" in cell.needs - prepared.system.can:
            return "keeps no prefix between requests: as unshared"
        return self._ladder_ended.get(prepared.system.name) if cell.workload == "W3" else None

    def _is_worth_repeating(self, cell: Cell, name: str) -> bool:
        if cell.job is None:
            return True
        samples = [s for s in self.results.samples if s.round == 0 and s.cell == cell.name and s.system not in OURS]
        seconds = next((sample.seconds for sample in samples if sample.system == name), 0.0)
        for metric in METRICS[cell.workload]:
            first = {sample.system: sample.values[metric.key] for sample in samples if metric.key in sample.values}
            equal = of_equal_quality(first, self.results.qualities, self._our_quality())
            if worth_repeating(metric, name, first, seconds, equal):
                return True
        return False

    def _our_quality(self) -> Quality:
        return self.results.qualities.get(CASTLINE, Quality())

    def _drop(self, prepared: Prepared, reason: str) -> None:
        self._out[prepared.system.name] = reason
        self._sessions.pop(prepared.system.name).stop()

    def _add(self, sample: Sample) -> None:
        self.results.samples.append(sample)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in sample.values.items())
        others = f"  (others {sample.others_share:.0%})" if sample.others_share > 0.05 else ""
        figures += "".join(f", {measured.gb_per_s:.1f} GB/s" for measured in sample.bandwidths)
        print(
            f"[{sample.round + 1}] {sample.cell:12} {sample.system:24} {figures or sample.failure}{others}",
            file=sys.stderr,
            flush=True,
        )
