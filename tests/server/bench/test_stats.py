"""From records to figures: every number asserted can be worked out by hand."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from castline.server.bench.client import Failure, RequestRecord
from castline.server.bench.errors import BenchError
from castline.server.bench.loops import Trace
from castline.server.bench.monitor import ClientLoad
from castline.server.bench.notes import notes
from castline.server.bench.plot import draw, figure_of
from castline.server.bench.prompts import Calibration
from castline.server.bench.results import PointResult, PointSummary, Report, document, write_report
from castline.server.bench.settings import Point, Settings
from castline.server.bench.slo import Slo
from castline.server.bench.stats import distribution_ms, summarise
from castline.server.bench.status import progress_text
from castline.server.bench.table import print_report

CLOSED = Point("closed", 2, 3, None)
IDLE = ClientLoad(wall_s=10.0, cpu_s=0.1, lags_s=(0.0, 0.001))


def record(index: int, start: float, ttft: float, gaps: tuple[float, ...], **fields: object) -> RequestRecord:
    """A completed request whose stream ends with its last token."""
    first = start + ttft
    base = RequestRecord(
        index, start, start, first + sum(gaps), first, gaps, 10, None, 1 + len(gaps), True, "length", None
    )
    return replace(base, **fields)  # type: ignore[arg-type]


def trace_of(*records: RequestRecord, begun: float = 100.0, extra_started: int = 0) -> Trace:
    return Trace(begun, len(records) + extra_started, 2, list(records))


FAILED = RequestRecord(2, 103.0, 103.0, 104.0, failure=Failure("http 503", "no room"))
TRACE = trace_of(record(0, 100.0, 0.5, (0.1, 0.3)), record(1, 101.0, 1.5, (0.5,)), FAILED)


def test_percentiles() -> None:
    """Linear between samples: the P99 of 101 evenly spaced samples is the hundredth."""
    latency = distribution_ms(value / 1e3 for value in range(101))
    assert latency is not None
    assert (latency.count, latency.mean, latency.p50, latency.p90, latency.p99, latency.max) == pytest.approx(
        (101, 50, 50, 90, 99, 100)
    )
    assert distribution_ms([]) is None


def test_summary() -> None:
    """Failed requests take part in time and counts, never in throughput or latency."""
    summary = summarise(CLOSED, TRACE, IDLE)
    assert (summary.started, summary.completed, summary.failed, summary.unfinished) == (3, 2, 1, 0)
    assert summary.duration_s == pytest.approx(4.0), "to the end of the last request, though it failed"
    assert summary.request_throughput == pytest.approx(2 / 4)
    assert summary.output_token_throughput == pytest.approx(5 / 4)
    assert summary.total_token_throughput == pytest.approx(25 / 4)
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.count, summary.ttft_ms.p50, summary.ttft_ms.max) == pytest.approx((2, 1000, 1500))
    assert summary.itl_ms is not None
    assert (summary.itl_ms.count, summary.itl_ms.mean) == pytest.approx((3, 300))
    assert summary.tpot_ms is not None
    assert (summary.tpot_ms.count, summary.tpot_ms.mean) == pytest.approx((2, (200 + 500) / 2))
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.max == pytest.approx(2000)
    assert [(f.kind, f.count, f.example) for f in summary.failures] == [("http 503", 1, "no room")]
    assert summary.prompt_tokens is not None
    assert (summary.prompt_tokens.total, summary.tokens_per_chunk) == (20, 1.0)
    assert summary.offered_rate is None


def test_open_loop_latency_counts_from_the_schedule() -> None:
    """A request sent 2 s late has a latency 2 s longer; the delay is reported too."""
    late = replace(record(0, 102.0, 0.5, (0.5,)), scheduled=100.0)
    summary = summarise(Point("open", 0.5, 1, None), trace_of(late, record(1, 104.0, 0.5, (0.5,))), IDLE)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.max == pytest.approx(2500)
    assert summary.client.start_delay_p99_ms == pytest.approx(2000, rel=0.02)
    assert summary.offered_rate == pytest.approx(0.5)


def test_interrupted_point() -> None:
    """Ctrl-C: the requests under way are neither done nor failed, and time runs until now."""
    summary = summarise(CLOSED, trace_of(record(0, 100.0, 0.5, ()), extra_started=2), IDLE)
    assert (summary.completed, summary.failed, summary.unfinished) == (1, 0, 2)
    assert summary.request_throughput == pytest.approx(1 / 10)


def test_nothing_measured() -> None:
    """An interrupt before the first answer must not divide by zero."""
    summary = summarise(CLOSED, trace_of(extra_started=2), ClientLoad(0.0, 0.0, ()))
    assert (summary.request_throughput, summary.ttft_ms, summary.output_tokens) == (0.0, None, None)
    assert summary.client.cpu_us_per_token is None


def test_chunks_instead_of_usage() -> None:
    """Without usage there are no token counts to add to a total; the reader is told."""
    summary = summarise(CLOSED, trace_of(record(0, 100.0, 0.5, (0.5,), prompt_tokens=None, counted=False)), IDLE)
    assert (summary.total_token_throughput, summary.prompt_tokens, summary.output_tokens_counted) == (None, None, False)
    assert any("no usage" in note for note in notes(Settings(), [summary]))


def test_single_token_has_no_tpot() -> None:
    """One token has no token after the first."""
    summary = summarise(CLOSED, trace_of(record(0, 100.0, 0.5, ())), IDLE)
    assert (summary.tpot_ms, summary.itl_ms) == (None, None)


def test_client_cost() -> None:
    """0.1 s of CPU for 5 tokens is 20 ms each; a busy or a late client is named, each with its own cure."""
    calm, busy, late = (
        summarise(CLOSED, TRACE, load)
        for load in (IDLE, ClientLoad(10.0, 6.0, (0.0,)), ClientLoad(10.0, 0.1, (0.2,) * 9))
    )
    assert calm.client.cpu_us_per_token == pytest.approx(20_000)
    assert [s.client.limited for s in (calm, busy, late)] == [False, True, True]
    assert not notes(Settings(), [calm])
    assert "a bottleneck (60% of a core)" in notes(Settings(), [busy])[0]
    assert "kept waiting for a CPU, up to 200.0 ms" in notes(Settings(), [late])[0]


def test_notes_name_their_loads() -> None:
    """A note that holds for some loads says for which."""
    stopped = trace_of(record(0, 100.0, 0.5, (), finish_reason="stop"))
    one = summarise(replace(CLOSED, load=1), TRACE, IDLE)
    two = summarise(CLOSED, stopped, IDLE)
    assert notes(Settings(), [one, two]) == [
        "at concurrency 2: 1 answer(s) ended before the length asked for, although ignore_eos was sent"
    ]
    assert notes(Settings(ignore_eos=False), [two]) == []


def test_note_on_chunks_of_several_tokens() -> None:
    """ITL between chunks of four tokens is not a latency between tokens."""
    summary = summarise(CLOSED, trace_of(record(0, 100.0, 0.5, (0.5,), output_tokens=8)), IDLE)
    assert "4.00 tokens" in notes(Settings(), [summary])[0]


def test_note_on_a_warm_prefix_cache() -> None:
    """Prompts the server has seen before measure its cache; a shared prefix that was asked for is no surprise."""
    summary = summarise(CLOSED, trace_of(record(0, 100.0, 0.5, (), cached_tokens=8)), IDLE)
    assert "80% of the prompt tokens" in notes(Settings(), [summary])[0]
    assert notes(Settings(shared_prefix_tokens=8), [summary]) == []


def test_note_on_too_few_requests() -> None:
    """A concurrency that was never reached is no measurement of it."""
    summary = summarise(replace(CLOSED, load=8), TRACE, IDLE)
    assert any("never reached" in note for note in notes(Settings(), [summary]))


def test_goodput() -> None:
    """Requests a second that met every limit; a failed one met none."""
    for text, met in (("ttft:600", 1), ("ttft:2000", 2), ("itl:400", 1), ("tpot:200.1,ttft:600", 1), ("e2e:1", 0)):
        assert summarise(CLOSED, TRACE, IDLE, Slo.parse(text)).goodput == pytest.approx(met / 4), text


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "p99:3", "ttft:1,,itl:2"])
def test_bad_slo(text: str) -> None:
    """Named before the run."""
    with pytest.raises(BenchError, match="--slo"):
        Slo.parse(text)


def report_of(*summaries: PointSummary, **settings: object) -> Report:
    points = tuple(PointResult(summary, TRACE.begun, tuple(TRACE.records)) for summary in summaries)
    options = Settings(**settings)  # type: ignore[arg-type]
    found = tuple(notes(options, summaries))
    return Report("2026-01-01T00:00:00+00:00", False, options, "tiny", Calibration(), {"castline": "0"}, points, found)


OPEN = Point("open", 0.5, 3, None)


def test_json_document(tmp_path: Path) -> None:
    """The file is what the docstring says, with requests only where asked for, times from the start of the point."""
    report = report_of(summarise(CLOSED, TRACE, IDLE), title="t")
    write_report(tmp_path / "plain.json", report, with_requests=False)
    plain = json.loads((tmp_path / "plain.json").read_text())
    assert plain["schema_version"] == 1
    assert (plain["title"], plain["model"], plain["interrupted"]) == ("t", "tiny", False)
    assert plain["settings"]["prompt_tokens"] == 128
    assert plain["points"][0]["ttft_ms"]["p50"] == pytest.approx(1000)
    assert "requests" not in plain["points"][0]
    rows = document(report, with_requests=True)["points"][0]["requests"]
    assert [row["scheduled_s"] for row in rows] == [0.0, 1.0, 3.0]
    assert (rows[0]["first_token_s"], list(rows[0]["gaps_ms"])) == (0.5, pytest.approx([100, 300]))
    assert rows[2]["failure"] == {"kind": "http 503", "message": "no room"}


def test_tables_are_plain_and_narrow() -> None:
    """Redirected to a file: no escape codes, nothing cut off, at most 100 columns, units and all figures there."""
    stream = StringIO()
    slo = Slo.parse("ttft:600")
    huge = replace(
        summarise(OPEN, TRACE, IDLE, slo), output_token_throughput=123456.7, total_token_throughput=9876543.2
    )
    print_report(report_of(summarise(CLOSED, TRACE, IDLE, slo), huge, title="my run", slo="ttft:600"), stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "my run: tiny at http://127.0.0.1:8000, completions" in text
    for cell in (
        "TTFT",
        "ITL",
        "TPOT",
        "E2E",
        "1000.0",
        "123456.7",
        "9876543.2",
        "goodput",
        "failed: 1 × http 503: no room",
    ):
        assert cell in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["2"]]
    assert rows[0] == ["2", "2", "1", "4.0", "0.50", "1.2", "6.2", "10", "2", "0.25"]


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_picture(tmp_path: Path, name: str) -> None:
    """Written in the format that the name asks for, also with a point that measured nothing."""
    nothing = summarise(replace(CLOSED, load=4), trace_of(FAILED), IDLE)
    report = report_of(summarise(CLOSED, TRACE, IDLE), nothing, summarise(OPEN, TRACE, IDLE))
    draw(tmp_path / name, report)
    head = (tmp_path / name).read_bytes()[:200]
    assert head.startswith(b"\x89PNG") or b"<?xml" in head


def test_picture_shows_what_was_measured() -> None:
    """The curves are the points' figures; each axis has its unit."""
    one = summarise(replace(CLOSED, load=1), TRACE, IDLE)
    figure = figure_of(report_of(one, summarise(replace(CLOSED, load=16), TRACE, IDLE), title="named"))
    throughput, ttft, itl = figure.axes
    assert list(throughput.lines[0].get_xdata()) == [1, 16]
    assert list(throughput.lines[0].get_ydata()) == pytest.approx([1.25, 1.25])
    assert one.ttft_ms is not None
    assert list(ttft.lines[0].get_ydata()) == pytest.approx([one.ttft_ms.p99] * 2)
    assert [axis.get_ylabel() for axis in (throughput, ttft, itl)] == [
        "throughput (tok/s)",
        "time to first token (ms)",
        "inter-token latency (ms)",
    ]
    assert itl.get_xlabel() == "concurrency (requests in flight)"
    assert figure.get_suptitle() == "named"


def test_progress_text() -> None:
    """What a person sees while a point runs."""
    text = progress_text(CLOSED, trace_of(*TRACE.records, extra_started=1), 110.0)
    assert text == "concurrency 2: 3/3 requests, 1 failed, 1 in flight, 10 s, 0 tok/s"
