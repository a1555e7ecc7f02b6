"""All points of a run, one after the other, on one event loop."""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from castline.server.bench.client import Client, RequestRecord
from castline.server.bench.connection import allow_connections
from castline.server.bench.dataset import read_dataset
from castline.server.bench.errors import BenchError
from castline.server.bench.guesses import read_guesses
from castline.server.bench.loops import Send, Trace, closed_loop, open_loop
from castline.server.bench.monitor import Monitor
from castline.server.bench.notes import notes
from castline.server.bench.preflight import Prepared, prepare
from castline.server.bench.results import PointResult, Report
from castline.server.bench.schedule import schedule
from castline.server.bench.settings import Point, Settings
from castline.server.bench.slo import Slo
from castline.server.bench.stats import summarise
from castline.server.bench.status import StatusLine
from castline.server.bench.workload import WARMUP, Workload


@dataclass(slots=True)
class Sweep:
    """One run. Cancelled (Ctrl-C), ``run`` returns what was measured; before the first point it raises instead."""

    settings: Settings
    versions: dict[str, str]
    status: StatusLine
    api_key: str | None = None
    interrupted: bool = False
    stopped_early: bool = False
    """A point had no success at all, so the points after it were left out."""
    results: list[PointResult] = field(default_factory=list)

    async def run(self) -> Report:
        """Raises BenchError where the server cannot be measured as asked."""
        settings = self.settings
        started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        slo = Slo.parse(settings.slo) if settings.slo else None
        rows = read_dataset(Path(settings.dataset), settings.endpoint) if settings.dataset else None
        client = Client(settings.url, self.api_key, settings.timeout_s)
        try:
            self.status.show("asking the server for its model and tokens")
            prepared = await prepare(client, settings)
            workload = Workload(settings, prepared.calibration, rows)
            await self._warm_up(client, workload, prepared)
            await self._run_points(client, workload, prepared, slo)
        finally:
            client.close()
        return Report(
            started=started,
            interrupted=self.interrupted,
            settings=settings,
            model=prepared.options.model,
            calibration=prepared.calibration,
            versions=self.versions,
            points=tuple(self.results),
            notes=tuple(notes(settings, [result.summary for result in self.results])),
        )

    async def _warm_up(self, client: Client, workload: Workload, prepared: Prepared) -> None:
        """Unmeasured requests, one at a time; that every one of them fails ends the run."""
        clock = asyncio.get_running_loop().time
        records: list[RequestRecord] = []
        for index, spec in zip(range(self.settings.warmup), workload.requests(WARMUP), strict=False):
            self.status.show(f"warm-up {index + 1}/{self.settings.warmup}")
            records.append(await client.send(index, spec, prepared.options, clock()))
        failures = [record.failure for record in records if record.failure is not None]
        if records and len(failures) == len(records):
            raise BenchError(f"every warm-up request failed ({failures[0].kind}): {failures[0].message}")

    async def _run_points(self, client: Client, workload: Workload, prepared: Prepared, slo: Slo | None) -> None:
        points = self.settings.points()
        for point in points:
            result = await self._run_point(point, client, workload, prepared, slo)
            self.results.append(result)
            self.status.point_done(result.summary)
            if self.interrupted:
                return
            if not result.summary.completed:
                self.stopped_early = point is not points[-1]
                return

    async def _run_point(
        self, point: Point, client: Client, workload: Workload, prepared: Prepared, slo: Slo | None
    ) -> PointResult:
        specs = workload.requests(point.label)

        async def send(index: int, due: float) -> RequestRecord:
            return await client.send(index, next(specs), prepared.options, due)

        trace = Trace()
        before = await read_guesses(client)
        with Monitor() as monitor, self.status.watch(point, trace):
            try:
                await self._load(point, send, trace, workload)
            except asyncio.CancelledError:
                # Ctrl-C: what has been measured is worth having. The run ends after this point.
                self.interrupted = True
            load = monitor.load()
        after = None if before is None else await read_guesses(client)
        guesses = after.since(before) if before and after else None
        return PointResult(summarise(point, trace, load, slo, guesses), trace.begun, tuple(trace.records))

    async def _load(self, point: Point, send: Send, trace: Trace, workload: Workload) -> None:
        if point.mode == "closed":
            allow_connections(int(point.load))
            await closed_loop(
                send, trace, int(point.load), num_requests=point.num_requests, duration_s=point.duration_s
            )
            return
        times = schedule(
            point.load,
            self.settings.burstiness,
            workload.arrival_rng(point.label),
            num_requests=point.num_requests,
            duration_s=point.duration_s,
        )
        allow_connections(len(times))
        await open_loop(send, trace, times)


def run_sweep(sweep: Sweep) -> Report:
    """Blocks until the sweep is done or interrupted."""
    return asyncio.run(sweep.run())
