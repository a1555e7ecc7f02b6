"""The plots of the build report, as inline SVG drawn by matplotlib.

Ink becomes ``currentColor``, so that the page's theme colours text and axes; the other colours read on light and dark.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from castline.builder.progress import StageRecord

INK = "#010203"
"""Replaced by currentColor once drawn."""
ACCENT = "#3b82c4"
SECOND = "#d9822b"
MUTED = "#8a94a0"

WIDTH = 7.2
"""Inches; the page scales the drawing."""

TimingRow = tuple[str, str, list[tuple[str, float, bool]]]
"""(thing, step, [(candidate, microseconds, chosen)])."""


def draw_sizes(sizes: Mapping[str, tuple[int, int]]) -> str:
    """Bars of each part: bytes in fp32 and in the engine."""

    def draw(axes: Axes) -> None:
        places = np.arange(len(sizes))
        before, after = (np.array([pair[i] for pair in sizes.values()]) / 2**20 for i in (0, 1))
        axes.barh(places - 0.2, before, 0.36, color=MUTED, label="fp32")
        axes.barh(places + 0.2, after, 0.36, color=ACCENT, label="engine")
        for place, old, new in zip(places, before, after, strict=True):
            axes.text(old, place - 0.2, f" {old:,.1f}", va="center", fontsize=8, color=INK)
            axes.text(new, place + 0.2, f" {new:,.1f}", va="center", fontsize=8, color=INK)
        axes.set_yticks(places, list(sizes))
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("MiB")
        _legend(axes)

    return _svg("sizes", draw, height=0.55 * len(sizes) + 0.9)


def draw_stages(stages: Sequence[StageRecord]) -> str:
    """Seconds of each stage."""

    def draw(axes: Axes) -> None:
        names, seconds = [stage.name for stage in stages], [stage.seconds for stage in stages]
        axes.barh(names, seconds, 0.6, color=ACCENT)
        for place, value in enumerate(seconds):
            axes.text(value, place, f" {value:.1f}", va="center", fontsize=8, color=INK)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("seconds")

    return _svg("stages", draw, height=0.3 * len(stages) + 0.7)


def draw_fusions(names: Sequence[str], nodes: Sequence[int]) -> str:
    """Nodes of the graph as exported and after each pass; *nodes* has one entry more than there are passes."""

    def draw(axes: Axes) -> None:
        labels = ["exported", *names]
        colors = [MUTED] + [ACCENT if after < before else MUTED for before, after in pairwise(nodes)]
        axes.bar(labels, nodes, 0.6, color=colors)
        for place, count in enumerate(nodes):
            axes.text(place, count, f"{count:,}", ha="center", va="bottom", fontsize=8, color=INK)
        axes.set_ylabel("nodes")
        axes.margins(y=0.12)
        axes.set_xticks(range(len(labels)), labels, rotation=35, ha="right")

    return _svg("fusions", draw, height=3.2)


def draw_tuning(rows: Sequence[TimingRow]) -> str:
    """Each candidate's time over the fastest at that step; the choice filled."""

    def draw(axes: Axes) -> None:
        for place, (_, _, times) in enumerate(rows):
            fastest = min(us for _, us, _ in times)
            for _, us, chosen in times:
                style = {"color": ACCENT, "zorder": 3} if chosen else {"facecolors": "none", "edgecolors": SECOND}
                axes.scatter([us / fastest], [place], s=34 if chosen else 26, **style)
        axes.set_yticks(range(len(rows)), [f"{thing}, {_step(step)}" for thing, step, _ in rows], fontsize=8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.axvline(1, color=MUTED, linewidth=0.8)
        axes.set_xlabel("time over the fastest candidate (filled: chosen)")
        axes.grid(axis="x", color=MUTED, alpha=0.25, linewidth=0.6)

    return _svg("tuning", draw, height=0.21 * len(rows) + 0.8)


def draw_kl_positions(kl: Sequence[float], tolerance: float, mean: float) -> str:
    """Divergence of each position, in the order measured, with the mean and its tolerance."""

    def draw(axes: Axes) -> None:
        axes.scatter(range(len(kl)), np.maximum(kl, KL_FLOOR), s=5, color=ACCENT, linewidths=0)
        axes.axhline(max(mean, KL_FLOOR), color=INK, linewidth=1, label=f"mean {mean:.3g}")
        axes.axhline(tolerance, color=SECOND, linewidth=1, linestyle="--", label=f"tolerance of the mean {tolerance:g}")
        axes.set_yscale("log")
        axes.set_xlabel("token")
        axes.set_ylabel("KL, nats")
        _legend(axes)

    return _svg("kl_positions", draw, height=2.9)


def draw_kl_distribution(kl: Sequence[float], tolerance: float) -> str:
    """Share of positions below each divergence."""

    def draw(axes: Axes) -> None:
        ordered = np.sort(np.maximum(kl, KL_FLOOR))
        axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=ACCENT)
        axes.axvline(tolerance, color=SECOND, linewidth=1, linestyle="--", label=f"tolerance of the mean {tolerance:g}")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("KL, nats")
        axes.set_ylabel("share of tokens below")
        axes.grid(color=MUTED, alpha=0.25, linewidth=0.6)
        _legend(axes)

    return _svg("kl_distribution", draw, height=2.9)


KL_FLOOR = 1e-14
"""Shown in place of smaller divergences, which a logarithmic axis cannot place."""


def _svg(name: str, draw: Callable[[Axes], None], height: float) -> str:
    """One drawing as an ``<svg>`` element. *name* keeps its ids apart from those of the page's other drawings."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def _legend(axes: Axes) -> None:
    """Above the drawing, where nothing lies under it."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8)


def _step(step: str) -> str:
    if not step.isdigit():
        return step
    return f"{step} row{'' if step == '1' else 's'}"


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}
