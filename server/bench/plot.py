"""The curve of a run as a picture: throughput, TTFT and ITL against the load, a column for each kind of loop."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from castline.server.bench.results import Distribution, PointSummary, Report
from castline.server.bench.settings import Mode, Settings

THROUGHPUT, TAIL, MEDIAN = "#1f6f8b", "#c0392b", "#e59866"
HEADROOM = 1.08
WIDE_RANGE = 8
"""Loads that span more than this factor get a logarithmic axis."""
LOAD_LABELS: dict[Mode, str] = {"closed": "concurrency (requests in flight)", "open": "request rate asked for (1/s)"}


def draw(path: Path, report: Report) -> None:
    """Writes the picture to *path*, .png or .svg."""
    figure = figure_of(report)
    figure.savefig(path, dpi=140)


def figure_of(report: Report) -> Figure:
    modes: tuple[Mode, ...] = ("closed", "open")
    columns = [(mode, summaries) for mode in modes if (summaries := report.summaries(mode))]
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.12)
    figure = Figure(figsize=(1.5 + 5.6 * len(columns), 8.2), layout=layout)
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(3, len(columns), sharex="col", squeeze=False)
    for column, (mode, summaries) in enumerate(columns):
        _throughput_panel(panels[0][column], summaries)
        _latency_panel(panels[1][column], summaries, "time to first token (ms)", lambda s: s.ttft_ms)
        _latency_panel(panels[2][column], summaries, "inter-token latency (ms)", lambda s: s.itl_ms)
        panels[0][column].set_title(f"{mode} loop", fontsize=11)
        panels[2][column].set_xlabel(LOAD_LABELS[mode])
        for row in range(3):
            _dress(panels[row][column], [summary.load for summary in summaries])
    figure.suptitle(_title(report), fontsize=13)
    figure.supxlabel(_caption(report.settings), fontsize=8.5, color="#555555")
    return figure


def _throughput_panel(axis: Any, summaries: Sequence[PointSummary]) -> None:
    loads = [summary.load for summary in summaries]
    values = [summary.output_token_throughput for summary in summaries]
    axis.plot(loads, values, marker="o", color=THROUGHPUT, label="output tokens")
    axis.set_ylabel("throughput (tok/s)")
    _annotate(axis, loads, values, THROUGHPUT)


def _latency_panel(
    axis: Any, summaries: Sequence[PointSummary], label: str, of: Callable[[PointSummary], Distribution | None]
) -> None:
    """P99 and P50; logarithmic where the tail is far from the median."""
    measured = [(summary.load, latency) for summary in summaries if (latency := of(summary)) is not None]
    axis.set_ylabel(label)
    if not measured:
        axis.text(0.5, 0.5, "nothing measured", transform=axis.transAxes, ha="center", color="#888888")
        return
    loads = [load for load, _ in measured]
    tails = [latency.p99 for _, latency in measured]
    medians = [latency.p50 for _, latency in measured]
    axis.plot(loads, tails, marker="o", color=TAIL, label="P99")
    axis.plot(loads, medians, marker="o", markersize=4, linestyle="--", color=MEDIAN, label="P50")
    _annotate(axis, loads, tails, TAIL)
    axis.legend(frameon=False, loc="best", fontsize=9)


def _annotate(axis: Any, loads: Sequence[float], values: Sequence[float], color: str) -> None:
    for load, value in zip(loads, values, strict=True):
        text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        axis.annotate(
            text, (load, value), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8.5, color=color
        )


def _dress(axis: Any, loads: Sequence[float]) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.08)
    axis.set_ylim(0, HEADROOM * axis.get_ylim()[1])
    if max(loads) > WIDE_RANGE * min(loads):
        axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(sorted(set(loads))))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda load, _: f"{load:g}"))


def _title(report: Report) -> str:
    return report.settings.title or f"castline bench: {report.model}"


def _caption(settings: Settings) -> str:
    """What was asked, so that the picture can be read alone."""
    if settings.dataset is not None:
        prompts = f"prompts from {Path(settings.dataset).name}"
    else:
        prompts = f"prompts {_length(settings.prompt_tokens, settings.prompt_spread)} tokens"
        if settings.shared_prefix_tokens:
            prompts += f" after a shared prefix of {settings.shared_prefix_tokens}"
    output = f"{_length(settings.output_tokens, settings.output_spread)} output tokens"
    return f"{settings.url}, {settings.endpoint}; {prompts}, {output}, seed {settings.seed}"


def _length(tokens: int, spread: int) -> str:
    return f"{tokens} ± {spread}" if spread else str(tokens)
