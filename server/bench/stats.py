"""From the records of one point to its figures. Pure: no clock, no input or output."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from castline.server.bench.client import RequestRecord
from castline.server.bench.guesses import Guesses
from castline.server.bench.loops import Trace
from castline.server.bench.monitor import ClientLoad
from castline.server.bench.results import ClientCost, Distribution, FailureCount, PointSummary, TokenCounts
from castline.server.bench.settings import Point
from castline.server.bench.slo import Slo

BUSY_SHARE = 0.5
"""A client that takes more of a core than this is reckoned a bottleneck."""
LAG_SHARE = 0.25
MIN_LAG_S = 0.001
"""So is one whose event loop is later (P99) than LAG_SHARE of the median inter-token latency, and than MIN_LAG_S."""


def distribution_ms(seconds: Iterable[float]) -> Distribution | None:
    """None where there is no sample."""
    samples = np.fromiter(seconds, dtype=np.float64) * 1e3
    if samples.size == 0:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(samples, (50, 90, 99)))
    return Distribution(int(samples.size), float(samples.mean()), p50, p90, p99, float(samples.max()))


def token_counts(counts: Sequence[int]) -> TokenCounts | None:
    if not counts:
        return None
    return TokenCounts(sum(counts), sum(counts) / len(counts), min(counts), max(counts))


def failure_counts(records: Sequence[RequestRecord]) -> tuple[FailureCount, ...]:
    """By kind, the most frequent first; the example is the first message of the kind."""
    failures = [record.failure for record in records if record.failure is not None]
    examples = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return tuple(FailureCount(kind, count, examples[kind]) for kind, count in counts.most_common())


def summarise(
    point: Point, trace: Trace, load: ClientLoad, slo: Slo | None = None, guesses: Guesses | None = None
) -> PointSummary:
    """The figures of one point; of what had completed, where it was interrupted."""
    records = trace.records
    completed = [record for record in records if record.failure is None]
    duration = load.wall_s
    if records and trace.in_flight == 0:
        duration = max(record.ended for record in records) - trace.begun
    per_second = 1.0 / duration if duration > 0 else 0.0
    prompt_tokens = [record.prompt_tokens for record in completed if record.prompt_tokens is not None]
    output_tokens = [record.output_tokens for record in completed]
    cached = [record.cached_tokens for record in completed if record.cached_tokens is not None]
    num_chunks = sum(1 + len(record.gaps) for record in completed if record.first_token is not None)
    itl = distribution_ms(gap for record in completed for gap in record.gaps)
    counted = bool(completed) and all(record.counted for record in completed)
    return PointSummary(
        mode=point.mode,
        load=point.load,
        duration_s=duration,
        started=trace.started,
        completed=len(completed),
        failed=len(records) - len(completed),
        unfinished=trace.in_flight,
        failures=failure_counts(records),
        offered_rate=offered_rate(records, trace.begun) if point.mode == "open" else None,
        request_throughput=len(completed) * per_second,
        output_token_throughput=sum(output_tokens) * per_second,
        total_token_throughput=(sum(prompt_tokens) + sum(output_tokens)) * per_second if counted else None,
        peak_in_flight=trace.peak_in_flight,
        prompt_tokens=token_counts(prompt_tokens),
        output_tokens=token_counts(output_tokens),
        output_tokens_counted=counted,
        cached_prompt_tokens=sum(cached) if cached else None,
        drafted_tokens=guesses.drafted if guesses else None,
        accepted_draft_tokens=guesses.accepted if guesses else None,
        tokens_per_chunk=sum(output_tokens) / num_chunks if num_chunks else None,
        finish_reasons=dict(Counter(record.finish_reason for record in completed if record.finish_reason)),
        ttft_ms=distribution_ms(record.ttft for record in completed if record.ttft is not None),
        itl_ms=itl,
        tpot_ms=distribution_ms(record.tpot for record in completed if record.tpot is not None),
        e2e_ms=distribution_ms(record.e2e for record in completed),
        goodput=None if slo is None else sum(map(slo.met_by, records)) * per_second,
        client=client_cost(load, records, itl),
    )


def offered_rate(records: Sequence[RequestRecord], begun: float) -> float | None:
    """Requests due a second, up to the last one due; None where that took no time."""
    last_due = max((record.scheduled for record in records), default=begun)
    return len(records) / (last_due - begun) if last_due > begun else None


def client_cost(load: ClientLoad, records: Sequence[RequestRecord], itl: Distribution | None) -> ClientCost:
    num_tokens = sum(record.output_tokens for record in records)
    share = load.cpu_s / load.wall_s if load.wall_s > 0 else 0.0
    lag = distribution_ms(load.lags_s)
    delay = distribution_ms(record.started - record.scheduled for record in records)
    bearable_ms = max(MIN_LAG_S * 1e3, LAG_SHARE * itl.p50 if itl else 0.0)
    return ClientCost(
        cpu_us_per_token=load.cpu_s * 1e6 / num_tokens if num_tokens else None,
        cpu_share=share,
        loop_lag_p99_ms=lag.p99 if lag else None,
        loop_lag_max_ms=lag.max if lag else None,
        start_delay_p99_ms=delay.p99 if delay else None,
        limited=share > BUSY_SHARE or (lag is not None and itl is not None and lag.p99 > bearable_ms),
    )
