"""docs/performance.png: the sweep as curves, the other workloads as bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.comparison import Spread
from benchmarks.results import Results, SystemReport
from benchmarks.systems.catalogue import SPECULATIVE
from benchmarks.wording import kl_text
from benchmarks.workloads import CONCURRENCIES

COLORS = ("#c0392b", "#e59866", "#1f6f8b", "#6fb1c7", "#9b59b6", "#2e7d4f", "#7f8c8d", "#b8860b", "#34495e", "#95a5a6")
BARS: tuple[tuple[str, str, str], ...] = (
    ("W1", "decode_tok_s", "W1 one stream: decode tok/s (more is better)"),
    ("W1", "ttft_ms", "W1 one stream: TTFT ms (less is better)"),
    ("W2", "output_tok_s", "W2 mixed, 32 at a time: output tok/s (more)"),
    ("W4", "long_ttft_s", "W4 4,000 tokens beside 8 streams: TTFT s (less)"),
    ("W4", "stream_tok_s", "W4 a stream meanwhile: tok/s (more)"),
    ("W5 cold", "output_tok_s", "W5 shared prefix, cold: output tok/s (more)"),
    ("W6", "prompt_tok_s", "W6 prefill of 2,048: tok/s (more)"),
    ("W7", "start_s", "W7 start to first token: s (less)"),
    ("W8", "resident_mib", "W8 resident memory: MiB (less)"),
)
COLUMNS = 3


def draw_picture(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(results).savefig(path, dpi=130)


def figure_of(results: Results) -> Figure:
    systems = [report for report in results.systems if report.name != SPECULATIVE and not report.unavailable]
    bars = [bar for bar in BARS if results.spreads(bar[0], bar[1])]
    rows = 1 + -(-len(bars) // COLUMNS)
    figure = Figure(figsize=(5.2 * COLUMNS, 3.6 * rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, COLUMNS)
    _curves(
        figure.add_subplot(grid[0, 0]), results, systems, "output_tok_s", "W3 30 → 128: output tok/s (more is better)"
    )
    _curves(figure.add_subplot(grid[0, 1]), results, systems, "ttft_ms", "W3 30 → 128: TTFT p50 ms (less)", log=True)
    _legend(figure.add_subplot(grid[0, 2]), systems)
    for position, (cell, metric, title) in enumerate(bars):
        axis = figure.add_subplot(grid[1 + position // COLUMNS, position % COLUMNS])
        _bars(axis, systems, results.spreads(cell, metric), title)
    figure.suptitle(f"castline and what a user would run instead: {results.machine.cpu}, {results.machine.cores} cores")
    return figure


def _curves(
    axis: Any, results: Results, systems: Sequence[SystemReport], metric: str, title: str, *, log: bool = False
) -> None:
    for index, report in enumerate(systems):
        points = [
            (n, s[report.name]) for n in CONCURRENCIES if report.name in (s := results.spreads(f"W3@{n}", metric))
        ]
        if not points:
            continue
        loads, values = [n for n, _ in points], [spread.median for _, spread in points]
        low, high = [spread.low for _, spread in points], [spread.high for _, spread in points]
        axis.plot(loads, values, marker="o", markersize=4, color=_color(index), linewidth=2.2 if index == 0 else 1.4)
        axis.fill_between(loads, low, high, color=_color(index), alpha=0.15, linewidth=0)
    axis.set_title(title, fontsize=10)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("requests in flight", fontsize=9)
    axis.xaxis.set_major_locator(FixedLocator(list(CONCURRENCIES)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    _dress(axis)


def _bars(axis: Any, systems: Sequence[SystemReport], spreads: Mapping[str, Spread], title: str) -> None:
    shown = [(index, report) for index, report in enumerate(systems) if report.name in spreads]
    for line, (index, report) in enumerate(shown):
        spread = spreads[report.name]
        error = [[spread.median - spread.low], [spread.high - spread.median]]
        axis.barh(line, spread.median, xerr=error, color=_color(index), height=0.7, error_kw={"linewidth": 0.8})
        axis.annotate(
            f" {spread.median:.3g}" if spread.median < 100 else f" {spread.median:,.0f}",
            (spread.high, line),
            va="center",
            fontsize=8,
        )
    axis.set_yticks(range(len(shown)), [report.label for _, report in shown], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_title(title, fontsize=10)
    _dress(axis)


def _legend(axis: Any, systems: Sequence[SystemReport]) -> None:
    """Names, and below each the quality that a speed has to be read with."""
    axis.axis("off")
    step = min(0.18, 1 / len(systems))
    for line, report in enumerate(systems):
        text = f"{report.label}\n({kl_text(report.quality)})"
        y = 0.95 - step * line
        axis.text(0.02, y, "●", color=_color(line), fontsize=13, va="center", transform=axis.transAxes)
        axis.text(0.09, y, text, fontsize=8, va="center", transform=axis.transAxes)


def _dress(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]
