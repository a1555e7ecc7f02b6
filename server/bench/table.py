"""The figures as aligned tables of at most 100 columns: rules and colour on a terminal, plain text elsewhere."""

from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from castline.server.bench.results import Distribution, PointSummary, Report, TokenCounts
from castline.server.bench.settings import Mode

PLAIN_WIDTH = 100
TITLES: dict[Mode, str] = {
    "closed": "Closed loop: so many requests in flight at all times",
    "open": "Open loop: so many requests a second, whatever the server does",
}


def print_report(report: Report, stream: TextIO) -> None:
    """Tables of each sweep, then failures and notes."""
    is_terminal = stream.isatty()
    console = Console(file=stream, width=None if is_terminal else PLAIN_WIDTH, highlight=False)
    settings = report.settings
    heading = f"{report.model} at {settings.url}, {settings.endpoint}"
    console.print(Text(f"{settings.title}: {heading}" if settings.title else heading), style="bold")
    modes: tuple[Mode, ...] = ("closed", "open")
    for mode in modes:
        if summaries := report.summaries(mode):
            console.print()
            console.print(Text(TITLES[mode]))
            console.print(throughput_table(summaries, is_terminal))
            console.print()
            console.print(Text("Latency in ms"))
            console.print(latency_table(summaries, is_terminal))
    for line in _failures(report):
        console.print(Text(f"failed: {line}"), style="red")
    for note in report.notes:
        console.print(Text(f"note: {note}"), style="yellow")


def throughput_table(summaries: Sequence[PointSummary], is_terminal: bool) -> Table:
    """A row for each point: rates in 1/s, lengths as mean tokens, ``peak`` the most in flight at once."""
    is_open = summaries[0].mode == "open"
    has_goodput = any(summary.goodput is not None for summary in summaries)
    columns = ["rate", "offered"] if is_open else ["concurrency"]
    columns += ["done", "failed", "seconds", "req/s", "out tok/s", "all tok/s", "prompt", "output"]
    columns += ["peak"] if is_open else []
    columns += ["goodput"] if has_goodput else []
    table = _table(columns, is_terminal)
    for summary in summaries:
        cells = [f"{summary.load:g}"]
        cells += [_number(summary.offered_rate, 2)] if is_open else []
        cells += [
            str(summary.completed),
            str(summary.failed),
            f"{summary.duration_s:.1f}",
            f"{summary.request_throughput:.2f}",
            f"{summary.output_token_throughput:.1f}",
            _number(summary.total_token_throughput, 1),
            _mean(summary.prompt_tokens),
            _mean(summary.output_tokens),
        ]
        cells += [str(summary.peak_in_flight)] if is_open else []
        cells += [_number(summary.goodput, 2)] if has_goodput else []
        table.add_row(*cells)
    return table


def latency_table(summaries: Sequence[PointSummary], is_terminal: bool) -> Table:
    """Four rows for each point."""
    first = "rate" if summaries[0].mode == "open" else "concurrency"
    table = _table([first, "", "mean", "P50", "P90", "P99", "max", "samples"], is_terminal)
    for summary in summaries:
        rows = {"TTFT": summary.ttft_ms, "ITL": summary.itl_ms, "TPOT": summary.tpot_ms, "E2E": summary.e2e_ms}
        for position, (name, latency) in enumerate(rows.items()):
            load = f"{summary.load:g}" if position == 0 else ""
            table.add_row(load, name, *_latency_cells(latency), end_section=position == len(rows) - 1)
    return table


def _table(columns: Sequence[str], is_terminal: bool) -> Table:
    table = Table(box=SIMPLE if is_terminal else None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _latency_cells(latency: Distribution | None) -> list[str]:
    if latency is None:
        return ["–"] * 5 + ["0"]
    values = (latency.mean, latency.p50, latency.p90, latency.p99, latency.max)
    return [f"{value:.1f}" for value in values] + [str(latency.count)]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _mean(counts: TokenCounts | None) -> str:
    return "–" if counts is None else f"{counts.mean:.0f}"


def _failures(report: Report) -> list[str]:
    return [
        f"{failure.count} × {failure.kind}: {failure.example}"
        for point in report.points
        for failure in point.summary.failures
    ]
