"""Medians, spreads, ratios; the best peer, and the best of equal or better quality. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.quality import Quality, equal_or_better

REPEAT_WITHIN = 1.5
"""A peer's cell whose first figure is farther than this factor from the best peer's is not repeated …"""
ALWAYS_REPEAT_S = 4.0
"""… unless it takes no longer than this."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a cell. ``higher``: more is better."""

    key: str
    label: str
    unit: str
    higher: bool


METRICS: dict[str, tuple[Metric, ...]] = {
    "W1": (Metric("decode_tok_s", "decode", "tok/s", True), Metric("ttft_ms", "TTFT", "ms", False)),
    "W2": (Metric("output_tok_s", "output", "tok/s", True), Metric("ttft_ms", "TTFT p50", "ms", False)),
    "W3": (Metric("output_tok_s", "output", "tok/s", True), Metric("ttft_ms", "TTFT p50", "ms", False)),
    "W4": (
        Metric("long_ttft_s", "TTFT of the long prompt", "s", False),
        Metric("stream_tok_s", "a stream meanwhile", "tok/s", True),
        Metric("gap_max_ms", "worst gap between messages meanwhile", "ms", False),
        Metric("gap_p50_ms", "median gap meanwhile", "ms", False),
        Metric("gap_ratio", "worst gap ÷ median gap meanwhile", "", False),
        Metric("gap_alone_p50_ms", "median gap before and after", "ms", False),
        Metric("gap_alone_ratio", "worst gap ÷ median gap before and after", "", False),
    ),
    "W5": (Metric("output_tok_s", "output", "tok/s", True), Metric("ttft_ms", "TTFT p50", "ms", False)),
    "W6": (Metric("prompt_tok_s", "prompt", "tok/s", True),),
    "W7": (Metric("start_s", "start to first token", "s", False),),
    "W8": (
        Metric("resident_mib", "resident", "MiB", False),
        Metric("without_kv_mib", "less the KV pool", "MiB", False),
    ),
    "X1": (Metric("output_tok_s", "output", "tok/s", True), Metric("ttft_ms", "TTFT p50", "ms", False)),
    "X2": (Metric("decode_tok_s", "decode", "tok/s", True), Metric("ttft_ms", "TTFT", "ms", False)),
    "X3": (
        Metric("serving_us", "serving process, a token", "µs of a core", False),
        Metric("serving_percent", "serving process ÷ engine process, CPU time", "%", False),
    ),
    "X4": (Metric("idle_percent", "both processes, of a core", "%", False),),
    "X5": (Metric("outside_percent", "outside the executor", "%", False),),
}
"""Of each workload; by the first, guessing ahead is shown."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """*values*: one of each round."""
        return cls(median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Versus:
    """castline against one peer. ``ratio`` is castline ÷ peer: above 1 is ours where more is better, below 1 else."""

    peer: str
    theirs: Spread
    ratio: float


@dataclass(frozen=True, slots=True)
class Target:
    """What must hold of castline ÷ the best peer of equal or better quality."""

    cell: str
    metric: str
    limit: float
    at_least: bool

    def held_by(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit


TARGETS = (
    Target("W1", "decode_tok_s", 1.5, True),
    Target("W1", "ttft_ms", 0.7, False),
    Target("W2", "output_tok_s", 2.0, True),
    *(Target(f"W3@{n}", "output_tok_s", 1.0, True) for n in (1, 4)),
    *(Target(f"W3@{n}", "output_tok_s", 2.0, True) for n in (8, 16, 32, 64)),
    *(Target(f"W3@{n}", "ttft_ms", 0.5, False) for n in (32, 64)),
    Target("W4", "long_ttft_s", 0.7, False),
    Target("W4", "stream_tok_s", 1.0, True),
    Target("W5 unshared", "output_tok_s", 1.0, True),
    Target("W5 cold", "output_tok_s", 2.0, True),
    Target("W5 warm", "output_tok_s", 2.0, True),
    Target("W6", "prompt_tok_s", 1.3, True),
    Target("W7", "start_s", 0.3, False),
    Target("W8", "resident_mib", 0.5, False),
)
GAP_LIMIT = 3.0
"""castline's own worst gap beside a long prompt, as a multiple of its median."""
ROOFLINE_SHARE = 0.8
QUEUE_COST = 0.05
SERVING_PERCENT = 5.0
"""Of the engine's processor time: the serving process's, at 64 streams."""
OUTSIDE_PERCENT = {32: 3.0, 1: 5.0}
"""Of the engine's time: what may pass outside the executor, by the sequences that decode at a time."""


def better(metric: Metric, one: float, other: float) -> bool:
    return one > other if metric.higher else one < other


def best(metric: Metric, figures: Mapping[str, Spread]) -> str | None:
    """The name with the best median; None where there is none."""
    choose = max if metric.higher else min
    return choose(figures, key=lambda name: figures[name].median) if figures else None


def best_peer(metric: Metric, ours: Spread, peers: Mapping[str, Spread]) -> Versus | None:
    """castline against the peer with the best median; None where no peer was measured."""
    name = best(metric, peers)
    if name is None or peers[name].median == 0:
        return None
    return Versus(name, peers[name], ours.median / peers[name].median)


def of_equal_quality(names: Iterable[str], qualities: Mapping[str, Quality], ours: Quality) -> set[str]:
    """Those whose numbers are measured, and as near to the reference as ours."""
    return {name for name in names if name in qualities and equal_or_better(qualities[name], ours)}


def worth_repeating(metric: Metric, name: str, first: Mapping[str, float], seconds: float, equal: set[str]) -> bool:
    """Whether a peer's cell is measured again after the first round.

    *first* has the first round's figure of every peer, *equal* the peers of equal quality: near to the best of either
    is worth it. What is far behind stays so, and would take most of the run's time.
    """
    if name not in first:
        return False
    if seconds <= ALWAYS_REPEAT_S:
        return True
    rivals = [set(first)] + ([equal & set(first)] if name in equal else [])
    for group in rivals:
        leader = max(first[n] for n in group) if metric.higher else min(first[n] for n in group)
        factor = leader / first[name] if metric.higher else first[name] / leader
        if factor <= REPEAT_WITHIN:
            return True
    return False
