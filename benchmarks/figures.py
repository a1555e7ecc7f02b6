"""From what a system did to the figures of a cell. Pure. Keys of figures are the `Metric` keys of `comparison`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from benchmarks.errors import JobFailed
from benchmarks.workloads import Cell
from castline.server.bench.client import RequestRecord

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Seconds of processors that castline's serving process and its engine process took."""

    serving: float
    engine: float


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Seconds in which castline's engine had work, and those of them that were forward passes."""

    busy: float
    executor: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job. Times are seconds of one clock."""

    begun: float
    records: tuple[RequestRecord, ...]
    late: RequestRecord | None = None
    cpu: CpuUse | None = None
    """Of castline alone, as is the next."""
    engine: EngineTime | None = None

    @property
    def seconds(self) -> float:
        return max(record.ended for record in self.records) - self.begun


def require_complete(outcome: Outcome, expected_tokens: Sequence[int]) -> None:
    """Raises JobFailed where a request failed or had another length than asked: the figures would not compare."""
    everyone = [*outcome.records, *([outcome.late] if outcome.late else [])]
    failures = [record.failure for record in everyone if record.failure is not None]
    if failures:
        raise JobFailed(
            f"{len(failures)} of {len(everyone)} requests failed ({failures[0].kind}): {failures[0].message}"
        )
    wrong = [r for r in outcome.records if r.output_tokens != expected_tokens[r.index]]
    if wrong:
        wanted = expected_tokens[wrong[0].index]
        raise JobFailed(f"{len(wrong)} answers had another length than asked ({wrong[0].output_tokens}, not {wanted})")


def arrivals(record: RequestRecord) -> list[float]:
    """When each piece of the answer came."""
    if record.first_token is None:
        return []
    return list(accumulate(record.gaps, initial=record.first_token))


def stream_figures(outcome: Outcome) -> Figures:
    """Decode rate and time to first token of requests sent one at a time."""
    per_token = [record.tpot for record in outcome.records if record.tpot]
    figures = {"ttft_ms": _ttft_p50(outcome) * 1e3}
    if per_token:
        figures["decode_tok_s"] = 1.0 / median(per_token)
    return figures


def throughput_figures(outcome: Outcome) -> Figures:
    tokens = sum(record.output_tokens for record in outcome.records)
    return {"output_tok_s": tokens / outcome.seconds, "ttft_ms": _ttft_p50(outcome) * 1e3}


def prefill_figures(outcome: Outcome) -> Figures:
    """Prompt tokens a second, from the time to the first and only token."""
    sizes = [record.prompt_tokens for record in outcome.records if record.prompt_tokens]
    return {"prompt_tok_s": median(sizes) / _ttft_p50(outcome)}


def long_prompt_figures(outcome: Outcome) -> Figures:
    """The long prompt's own wait, and what the streams felt between its start and its first token.

    A gap is between two messages of a stream, which may carry several tokens. It lies in that window where any part of
    it does; all others are of the streams alone. The rate is a stream's own, the median over the streams.
    """
    late = outcome.late
    if late is None or late.first_token is None:
        raise JobFailed("the long prompt was never sent: the streams had ended before")
    begin, end = late.started, late.first_token
    rates, gaps, alone = list[float](), list[float](), list[float]()
    for record in outcome.records:
        times = arrivals(record)
        per_arrival = record.output_tokens / len(times)
        rates.append(sum(begin < time <= end for time in times) * per_arrival / (end - begin))
        for earlier, later in pairwise(times):
            (gaps if later > begin and earlier < end else alone).append(later - earlier)
    if not gaps:
        raise JobFailed("the streams had ended before the long prompt began")
    if max(arrivals(record)[-1] for record in outcome.records) < end:
        raise JobFailed("the streams ended before the long prompt had its first token: nothing was decoded beside it")
    figures = {
        "long_ttft_s": end - begin,
        "stream_tok_s": median(rates),
        "gap_max_ms": max(gaps) * 1e3,
    }
    for name, some in (("gap", gaps), ("gap_alone", alone)):
        typical = median(some) if some else 0.0
        if typical > 0:  # messages that come in one piece have no gap between them
            figures |= {f"{name}_p50_ms": typical * 1e3, f"{name}_ratio": max(gaps) / typical}
    return figures


def serving_figures(outcome: Outcome) -> Figures:
    """What serving costs: of a core a token, and in per cent of what the engine takes."""
    if outcome.cpu is None or outcome.cpu.engine <= 0:
        raise JobFailed("the processor time of its engine process is not known")
    tokens = sum(record.output_tokens for record in outcome.records)
    return {
        "serving_us": outcome.cpu.serving / tokens * 1e6,
        "serving_percent": outcome.cpu.serving / outcome.cpu.engine * 100,
    }


def step_figures(outcome: Outcome) -> Figures:
    """Of the engine's time, prompts' steps among it, what was not spent in forward passes."""
    if outcome.engine is None or outcome.engine.busy <= 0:
        raise JobFailed("the time that its engine had work is not known")
    return {"outside_percent": (1 - outcome.engine.executor / outcome.engine.busy) * 100}


BY_WORKLOAD: dict[str, Callable[[Outcome], Figures]] = {
    "W1": stream_figures,
    "W2": throughput_figures,
    "W3": throughput_figures,
    "W4": long_prompt_figures,
    "W5": throughput_figures,
    "W6": prefill_figures,
    "X1": throughput_figures,
    "X2": stream_figures,
    "X3": serving_figures,
    "X5": step_figures,
}


def figures_of(cell: Cell, outcome: Outcome) -> Figures:
    return BY_WORKLOAD[cell.workload](outcome)


def _ttft_p50(outcome: Outcome) -> float:
    return median(record.ttft for record in outcome.records if record.ttft is not None)
