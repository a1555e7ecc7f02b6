"""The JSON document of a run (``--json``). Latencies are in milliseconds, durations in seconds, rates in 1/s.

::

    schema_version   1
    title            --title, or null
    started          when the run began, ISO 8601 with offset
    interrupted      true where Ctrl-C ended the run early; the last point is then partial
    settings         the options of the run, as in `Settings` (never the API key)
    model            the model that was asked
    calibration      how lengths in words became lengths in tokens: tokens_per_word, base_tokens, measured
    versions         castline, python, system
    points[]         one for each load, as in `PointSummary`
    notes            what a reader of the figures should know

With ``--json-requests`` each point also has ``requests[]``: a `RequestRow` for each request, in order of completion.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from castline.server.bench.client import Failure, RequestRecord
from castline.server.bench.prompts import Calibration
from castline.server.bench.settings import Mode, Settings

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a latency, in milliseconds; percentiles interpolate between samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Over the completed requests."""

    total: int
    mean: float
    min: int
    max: int


@dataclass(frozen=True, slots=True)
class FailureCount:
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What the client itself took. ``limited``: it was a bottleneck, and the point's figures are partly its own."""

    cpu_us_per_token: float | None
    cpu_share: float
    """CPU time over wall time; 1 is a whole core."""
    loop_lag_p99_ms: float | None
    loop_lag_max_ms: float | None
    start_delay_p99_ms: float | None
    """How long after it was due a request was sent."""
    limited: bool


@dataclass(frozen=True, slots=True)
class PointSummary:
    """One load of the sweep. Throughputs and latencies are of completed requests; None: nothing to measure."""

    mode: Mode
    load: float
    """Concurrency of a closed loop; requests a second asked for in an open loop."""
    duration_s: float
    """From the start of the load to the end of the last request."""
    started: int
    completed: int
    failed: int
    unfinished: int
    """Cut off by an interrupt."""
    failures: tuple[FailureCount, ...]
    offered_rate: float | None
    """Open loop: requests due a second, the demand that the random arrivals really made. None for a closed loop."""
    request_throughput: float
    output_token_throughput: float
    total_token_throughput: float | None
    """Prompt and output tokens; None where the server reports no usage."""
    peak_in_flight: int
    prompt_tokens: TokenCounts | None
    output_tokens: TokenCounts | None
    output_tokens_counted: bool
    """By the server's usage; False where they are counted as chunks."""
    cached_prompt_tokens: int | None
    """Read from the server's prefix cache; None where it does not say."""
    drafted_tokens: int | None
    """Guessed ahead by the server (speculation), whoever asked; None where its metrics do not say."""
    accepted_draft_tokens: int | None
    tokens_per_chunk: float | None
    finish_reasons: dict[str, int]
    ttft_ms: Distribution | None
    """To the first text. In an open loop this and e2e_ms count from when the request was due."""
    itl_ms: Distribution | None
    """Gaps between the chunks of a request, all requests together."""
    tpot_ms: Distribution | None
    """(end − first token) / (output tokens − 1), one for each request."""
    e2e_ms: Distribution | None
    goodput: float | None
    """Requests a second that met --slo."""
    client: ClientCost


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request. Times in seconds from the start of the point."""

    index: int
    scheduled_s: float
    started_s: float
    first_token_s: float | None
    ended_s: float
    gaps_ms: tuple[float, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    finish_reason: str | None
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class PointResult:
    summary: PointSummary
    begun: float
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True)
class Report:
    started: str
    interrupted: bool
    settings: Settings
    model: str
    calibration: Calibration
    versions: dict[str, str]
    points: tuple[PointResult, ...]
    notes: tuple[str, ...]

    def summaries(self, mode: Mode) -> list[PointSummary]:
        return [point.summary for point in self.points if point.summary.mode == mode]

    @property
    def any_completed(self) -> bool:
        return any(point.summary.completed for point in self.points)


def write_report(path: Path, report: Report, *, with_requests: bool) -> None:
    """Writes the document of the module's docstring."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document(report, with_requests=with_requests))) + b"\n")


def document(report: Report, *, with_requests: bool) -> dict[str, Any]:
    """The document as plain data."""
    points: list[dict[str, Any]] = []
    for point in report.points:
        entry: dict[str, Any] = msgspec.to_builtins(point.summary)
        if with_requests:
            entry["requests"] = [msgspec.to_builtins(_row(record, point.begun)) for record in point.records]
        points.append(entry)
    return {
        "schema_version": SCHEMA_VERSION,
        "title": report.settings.title,
        "started": report.started,
        "interrupted": report.interrupted,
        "settings": msgspec.to_builtins(report.settings),
        "model": report.model,
        "calibration": msgspec.to_builtins(report.calibration),
        "versions": report.versions,
        "points": points,
        "notes": list(report.notes),
    }


def _row(record: RequestRecord, begun: float) -> RequestRow:
    return RequestRow(
        index=record.index,
        scheduled_s=record.scheduled - begun,
        started_s=record.started - begun,
        first_token_s=None if record.first_token is None else record.first_token - begun,
        ended_s=record.ended - begun,
        gaps_ms=tuple(gap * 1e3 for gap in record.gaps),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        finish_reason=record.finish_reason,
        failure=record.failure,
    )
