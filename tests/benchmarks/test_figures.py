"""From arrivals to figures, on hand-made records."""

import pytest

from benchmarks.errors import JobFailed
from benchmarks.figures import CpuUse, EngineTime, Outcome, figures_of, long_prompt_figures, require_complete
from benchmarks.workloads import CELLS
from castline.server.bench.client import Failure, RequestRecord

BY_NAME = {cell.name: cell for cell in CELLS}


def record(index: int, started: float, first: float, gaps: tuple[float, ...], prompt: int = 128) -> RequestRecord:
    return RequestRecord(
        index=index,
        scheduled=started,
        started=started,
        ended=first + sum(gaps),
        first_token=first,
        gaps=gaps,
        prompt_tokens=prompt,
        output_tokens=1 + len(gaps),
        counted=True,
    )


def test_stream_rate_leaves_the_first_token_out() -> None:
    """Prefill is TTFT's; a rate that counted it would punish long prompts twice."""
    outcome = Outcome(0.0, (record(0, 0.0, 0.5, (0.1,) * 10),))
    assert figures_of(BY_NAME["W1"], outcome) == pytest.approx({"decode_tok_s": 10.0, "ttft_ms": 500.0})


def test_throughput_is_over_the_whole_run() -> None:
    """From the first request to the end of the last one, waits and all."""
    outcome = Outcome(0.0, (record(0, 0.0, 1.0, (0.1,) * 9), record(1, 0.0, 3.0, (0.1,) * 9)))
    figures = figures_of(BY_NAME["W3@8"], outcome)
    assert figures["output_tok_s"] == pytest.approx(20 / 3.9)
    assert figures["ttft_ms"] == pytest.approx(2000)


def test_prefill_rate_is_prompt_over_first_token() -> None:
    outcome = Outcome(0.0, (record(0, 0.0, 2.0, (), 2048), record(1, 2.0, 4.0, (), 2048)))
    assert figures_of(BY_NAME["W6"], outcome) == {"prompt_tok_s": 1024.0}


def test_serving_costs_a_token_and_against_the_engine() -> None:
    """What prompts cost is in it: a user pays for it, too."""
    records = (record(0, 0.0, 1.0, (0.1,) * 9), record(1, 0.0, 1.0, (0.1,) * 9))
    figures = figures_of(BY_NAME["X3 gRPC"], Outcome(0.0, records, cpu=CpuUse(serving=0.004, engine=0.1)))
    assert figures == pytest.approx({"serving_us": 200.0, "serving_percent": 4.0})


def test_serving_cost_needs_the_engine_process() -> None:
    """Were both one process, the share would be of nothing."""
    outcome = Outcome(0.0, (record(0, 0.0, 1.0, (0.1,)),), cpu=CpuUse(serving=0.1, engine=0.0))
    with pytest.raises(JobFailed, match="engine process is not known"):
        figures_of(BY_NAME["X3 HTTP"], outcome)


def test_time_outside_the_executor_is_a_share_of_all_that_the_engine_worked() -> None:
    records = (record(0, 0.0, 1.0, (0.1,)),)
    figures = figures_of(BY_NAME["X5@32 greedy"], Outcome(0.0, records, engine=EngineTime(busy=2.0, executor=1.95)))
    assert figures == pytest.approx({"outside_percent": 2.5})
    for nothing in (None, EngineTime(0.0, 0.0)):
        with pytest.raises(JobFailed, match="engine had work is not known"):
            figures_of(BY_NAME["X5@1 sampled"], Outcome(0.0, records, engine=nothing))


def test_long_prompt_sees_only_its_window() -> None:
    """Gaps before the long prompt came, or after its first token, say nothing about what it did to the streams."""
    stream = record(0, 0.0, 0.0, (0.1,) * 10 + (0.5,) * 4 + (2.0,))  # ten quick ones, four slow ones, one after
    late = record(8, 1.0, 3.0, (0.1,), 4000)
    figures = long_prompt_figures(Outcome(0.0, (stream,), late))
    assert figures["long_ttft_s"] == pytest.approx(2.0)
    assert figures["stream_tok_s"] == pytest.approx(2.0)
    assert figures["gap_p50_ms"] == pytest.approx(500)
    assert figures["gap_max_ms"] == pytest.approx(500)
    assert figures["gap_ratio"] == pytest.approx(1)
    assert figures["gap_alone_p50_ms"] == pytest.approx(100)
    assert figures["gap_alone_ratio"] == pytest.approx(5)


def test_gaps_before_and_after_are_one_kind() -> None:
    """Prevents a slow end from counting for the window, or from being left out of what is normal."""
    stream = record(0, 0.0, 0.0, (0.1,) * 9 + (2.0,) + (0.3,) * 12)
    figures = long_prompt_figures(Outcome(0.0, (stream,), record(8, 1.0, 2.5, (), 4000)))
    assert figures["gap_max_ms"] == pytest.approx(2000)
    assert figures["gap_alone_p50_ms"] == pytest.approx(300)
    assert figures["gap_alone_ratio"] == pytest.approx(2.0 / 0.3)


@pytest.mark.parametrize("before", [(), (0.0, 0.0, 0.0)])
def test_no_usual_gap_no_ratio_to_it(before: tuple[float, ...]) -> None:
    """A stream may have no gap outside the window, or messages that came in one piece: its other figures stand."""
    stream = record(0, 0.0, 0.0, (*before, 1.0, 1.0))
    figures = long_prompt_figures(Outcome(0.0, (stream,), record(8, 0.5, 1.5, (), 4000)))
    assert figures["gap_ratio"] == 1
    assert not figures.keys() & {"gap_alone_ratio", "gap_alone_p50_ms"}


def test_a_gap_that_spans_the_window_counts() -> None:
    """A server that freezes its streams for the whole prefill has no arrival inside the window, and the worst gap."""
    stream = record(0, 0.0, 0.0, (0.1,) * 9 + (3.0, 0.1))
    late = record(8, 1.0, 3.5, (), 4000)
    figures = long_prompt_figures(Outcome(0.0, (stream,), late))
    assert figures["gap_max_ms"] == pytest.approx(3000)
    assert figures["stream_tok_s"] == 0


@pytest.mark.parametrize(
    ("late", "reason"),
    [
        (None, "never sent"),
        (record(8, 9.0, 10.0, ()), "ended before the long prompt began"),
        (record(8, 0.5, 10.0, ()), "nothing was decoded beside it"),
    ],
)
def test_no_figure_without_streams_beside(late: RequestRecord | None, reason: str) -> None:
    """A long prompt that ran alone would look wonderfully fast."""
    with pytest.raises(JobFailed, match=reason):
        long_prompt_figures(Outcome(0.0, (record(0, 0.0, 0.1, (0.1,) * 9),), late))


def test_failed_requests_make_no_figure() -> None:
    """Ninety answers of a hundred in less time is not speed."""
    failed = RequestRecord(1, 0.0, 0.0, 1.0, failure=Failure("http 500", "out of memory"))
    with pytest.raises(JobFailed, match=r"1 of 2 requests failed \(http 500\): out of memory"):
        require_complete(Outcome(0.0, (record(0, 0.0, 0.1, (0.1,)), failed)), [2, 2])


def test_short_answers_make_no_figure() -> None:
    """A system that stops at the end of the text does less work than was asked."""
    with pytest.raises(JobFailed, match="another length than asked"):
        require_complete(Outcome(0.0, (record(0, 0.0, 0.1, (0.1,)),)), [3])
