"""Tables, figures and labels of the document, in words. Pure."""

from collections.abc import Iterable, Sequence

from benchmarks.comparison import Metric, Spread
from benchmarks.quality import Quality
from benchmarks.results import SystemReport

NOT_MEASURED = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three significant digits, whole above a hundred."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread_text(spread: Spread | None, rounds: int) -> str:
    """Median, the extremes behind it, and the rounds where they are fewer than the run's."""
    if spread is None:
        return NOT_MEASURED
    if spread.rounds == 1:
        return number(spread.median) + (" (1 round)" if rounds > 1 else "")
    short = f", {spread.rounds} rounds" if spread.rounds < rounds else ""
    return f"{number(spread.median)} ({number(spread.low)}…{number(spread.high)}{short})"


def share_text(spread: Spread) -> str:
    """In percent, with the extremes behind it."""
    extremes = f" ({spread.low:.0%}…{spread.high:.0%})" if spread.rounds > 1 else ""
    return f"{spread.median:.0%}{extremes}"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def over_rounds(rounds: int) -> str:
    """What a figure of so many rounds is: the median of two is their mean."""
    if rounds == 1:
        return "of 1 round"
    what = "mean" if rounds == 2 else "median"
    return f"the {what} of {rounds} rounds, with the lowest and the highest; fewer rounds are named"


def kl_text(quality: Quality) -> str:
    """With the perplexity where that is all there is to judge by."""
    return quality_text(quality) if quality.mean_kl is None else f"KL {quality.mean_kl:.4f}"


def quality_text(quality: Quality) -> str:
    """With the perplexity too, where it is known."""
    kl = "KL not measured" if quality.mean_kl is None else f"KL {quality.mean_kl:.4f}"
    return kl + ("" if quality.perplexity is None else f", perplexity {quality.perplexity:.2f}")


def label_with_kl(report: SystemReport) -> str:
    """Of a speed: it has to be read with the quality of its numbers."""
    return f"{report.label} ({kl_text(report.quality)})"


def label_with_quality(report: SystemReport) -> str:
    return f"{report.label} ({quality_text(report.quality)})"


def titled(metric: Metric) -> str:
    return f"{metric.label}, {metric.unit}" if metric.unit else metric.label
