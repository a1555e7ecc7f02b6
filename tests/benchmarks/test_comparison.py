"""Medians, ratios, and which peer castline is held against."""

import pytest

from benchmarks.comparison import (
    METRICS,
    TARGETS,
    Metric,
    Spread,
    Target,
    best,
    best_peer,
    of_equal_quality,
    worth_repeating,
)
from benchmarks.quality import Quality
from benchmarks.workloads import CELLS

RATE = Metric("output_tok_s", "output", "tok/s", True)
WAIT = Metric("ttft_ms", "TTFT", "ms", False)


def spread(value: float) -> Spread:
    return Spread.of([value])


def test_spread_is_of_all_rounds() -> None:
    """A mean, or a spread of the first and last round only, would hide a noisy round or be pulled by it."""
    assert Spread.of([5.0, 100.0, 4.0]) == Spread(5.0, 4.0, 100.0, 3)


@pytest.mark.parametrize(("metric", "expected"), [(RATE, "fast"), (WAIT, "slow")])
def test_best_follows_the_metric(metric: Metric, expected: str) -> None:
    """A wait whose highest figure was called best would make every ratio of it flattering."""
    assert best(metric, {"slow": spread(10), "fast": spread(20)}) == expected


def test_ratio_is_ours_over_theirs() -> None:
    """Both for rates and for waits, as the targets are written; the peer is the best, not the first."""
    peers = {"slow": spread(10), "fast": spread(20)}
    versus = best_peer(RATE, spread(40), peers)
    assert versus is not None
    assert (versus.peer, versus.ratio) == ("fast", 2.0)
    versus = best_peer(WAIT, spread(5), peers)
    assert versus is not None
    assert (versus.peer, versus.ratio) == ("slow", 0.5)


@pytest.mark.parametrize("peers", [{}, {"broken": spread(0)}])
def test_no_peer_no_ratio(peers: dict[str, Spread]) -> None:
    """A ratio to nothing, or to a figure of zero, must not end the run that measured everything else."""
    assert best_peer(RATE, spread(1), peers) is None


def test_equal_quality_goes_by_divergence() -> None:
    """A faster peer with worse numbers is no peer of equal quality; a tenth more is within the measure's own error."""
    ours = Quality(mean_kl=0.010, perplexity=14.7)
    qualities = {
        "better": Quality(mean_kl=0.001, perplexity=20.0),
        "as good": Quality(mean_kl=0.0109, perplexity=14.7),
        "worse": Quality(mean_kl=0.02, perplexity=14.0),
        "unknown": Quality(),
    }
    assert of_equal_quality([*qualities, "not even listed"], qualities, ours) == {"better", "as good"}


def test_equal_quality_by_perplexity_where_there_are_no_logits() -> None:
    """A server without logits is compared by what it does give, instead of dropping out of the comparison."""
    ours = Quality(mean_kl=0.01, perplexity=14.70)
    qualities = {"near": Quality(perplexity=14.71), "far": Quality(perplexity=15.5)}
    assert of_equal_quality(qualities, qualities, ours) == {"near"}


def test_nothing_equals_unmeasured_quality() -> None:
    """castline without a parity check must not be called the equal of everything."""
    assert of_equal_quality(["peer"], {"peer": Quality(mean_kl=0.1)}, Quality()) == set()


def test_repeats_what_may_still_be_best() -> None:
    """The leader and those near it are repeated; one far behind, and slow to measure, is not."""
    first = {"leader": 100.0, "near": 70.0, "far": 20.0}
    wanted = {name for name in first if worth_repeating(RATE, name, first, 60.0, set())}
    assert wanted == {"leader", "near"}
    assert worth_repeating(RATE, "far", first, 1.0, set())
    assert not worth_repeating(RATE, "failed", first, 1.0, set())


def test_repeats_the_best_of_equal_quality() -> None:
    """It decides the ratio that must hold, however far it is behind faster peers with worse numbers."""
    first = {"coarse": 100.0, "fine": 30.0, "fine too": 10.0}
    assert worth_repeating(RATE, "fine", first, 60.0, {"fine", "fine too"})
    assert not worth_repeating(RATE, "fine too", first, 60.0, {"fine", "fine too"})


def test_repeats_short_waits() -> None:
    """For a wait, being near means being low."""
    first = {"short": 1.0, "long": 9.0}
    assert worth_repeating(WAIT, "short", first, 60.0, set())
    assert not worth_repeating(WAIT, "long", first, 60.0, set())


@pytest.mark.parametrize(
    ("target", "ratio", "held"),
    [
        (Target("W1", "x", 1.5, True), 1.5, True),
        (Target("W1", "x", 1.5, True), 1.49, False),
        (Target("W1", "x", 0.7, False), 0.7, True),
        (Target("W1", "x", 0.7, False), 0.71, False),
    ],
)
def test_target_reads_its_direction(target: Target, ratio: float, held: bool) -> None:
    """A limit read the wrong way round would call every failure a success."""
    assert target.held_by(ratio) is held


def test_targets_and_cells_fit() -> None:
    """A target that names a cell or figure which nothing measures would silently drop out of the table."""
    cells = {cell.name: cell.workload for cell in CELLS}
    for target in TARGETS:
        keys = {metric.key: metric for metric in METRICS[cells[target.cell]]}
        assert keys[target.metric].higher is target.at_least
