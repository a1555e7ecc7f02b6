"""castline behind either of its doors, and the processor time that a job takes of its processes."""

import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import replace

from benchmarks.errors import JobFailed
from benchmarks.figures import CpuUse, EngineTime, Outcome
from benchmarks.sessions import HttpSession, driver_environment, job_fields, outcome_of
from benchmarks.workloads import Job

GRPC_ADDRESS = re.compile(r"grpc://(\S+)")
"""In what a server says of itself when it listens."""
ENGINE_SECONDS = re.compile(r"^castline:(engine_busy|executor)_seconds_total\S* (\S+)$", re.MULTILINE)
CLIENT_START_S = 30.0


class CastlineSession(HttpSession):
    """Runs a job over the door that it names."""

    def run(self, job: Job, limit_s: float) -> Outcome:
        before, earlier = self._cpu_seconds(), self._engine_time()
        outcome = self._run_over_grpc(job, limit_s) if job.door == "grpc" else super().run(job, limit_s)
        after, later = self._cpu_seconds(), self._engine_time()
        return replace(
            outcome,
            cpu=CpuUse(after.serving - before.serving, after.engine - before.engine),
            engine=EngineTime(later.busy - earlier.busy, later.executor - earlier.executor),
        )

    def _cpu_seconds(self) -> CpuUse:
        """So far. The first process of the group answers requests; the engine is its child."""
        seconds = self.group.cpu_seconds_by_process()
        serving = seconds.pop(self.group.process.pid, 0.0)
        return CpuUse(serving, sum(seconds.values()))

    def _engine_time(self) -> EngineTime:
        """So far. What the engine reports with a request's last token is there before that token arrives."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
                found = dict(ENGINE_SECONDS.findall(response.read().decode()))
            return EngineTime(float(found["engine_busy"]), float(found["executor"]))
        except (OSError, LookupError, ValueError) as error:
            raise JobFailed(f"no engine times in /metrics: {error}") from None

    def _run_over_grpc(self, job: Job, limit_s: float) -> Outcome:
        address = GRPC_ADDRESS.search(self.group.log.read_text(errors="replace"))
        if address is None:
            raise JobFailed("the server named no gRPC address")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.grpc_client", address[1]],
                input=json.dumps(job_fields(job, limit_s)),
                capture_output=True,
                text=True,
                env=driver_environment({}),
                timeout=limit_s + CLIENT_START_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise JobFailed(f"not done within {limit_s:g} s") from None
        if done.returncode != 0:
            raise JobFailed(f"the gRPC client failed: {done.stderr.strip()[-300:]}")
        return outcome_of(job, json.loads(done.stdout))
