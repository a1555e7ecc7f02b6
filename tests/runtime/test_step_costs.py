"""The cost of a token more, from the times of steps."""

import random

import pytest

from castline.runtime.step_costs import StepCosts


def fed(cost, sizes, rounds=40, noise=0.0) -> StepCosts:
    rng = random.Random(2)
    costs = StepCosts()
    for _ in range(rounds):
        for size in sizes:
            costs.observe(size, cost(size) * (1 + noise * rng.random()))
    return costs


def cpu(num_tokens: int) -> float:
    return 0.004 + 0.0006 * num_tokens


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 20, 32, 64, 100, 300, 512])
def test_the_slope_of_a_line_is_found_between_and_at_the_sizes_seen(num_tokens):
    """Interpolation that is off by a size class would call tokens free, or twice their price."""
    costs = fed(cpu, [1, 8, 32, 128, 512, 1024], noise=0.05)
    slope = costs.relative_slope(num_tokens, num_tokens + 7)
    assert slope == pytest.approx(0.0006 / cpu(num_tokens), rel=0.25)


def test_tokens_are_cheap_beside_few_and_dear_beside_many():
    """The decision rests on this: at batch 1 more tokens are almost free, at batch 64 they cost their share."""
    costs = fed(cpu, [1, 8, 32])
    assert 1 * costs.relative_slope(1, 8) < 0.15
    assert 64 * costs.relative_slope(64, 71) > 0.8


def test_before_any_step_a_token_more_costs_something_and_less_than_a_step():
    """The first decision must be neither every guess nor none."""
    assert 0 < StepCosts().relative_slope(1, 8) < 0.2
    assert 0.5 < 64 * StepCosts().relative_slope(64, 71) < 1


def test_one_size_alone_says_nothing_of_the_others():
    """An engine that has only decoded one stream must not conclude that eight tokens cost what one does."""
    costs = fed(cpu, [1])
    assert costs.relative_slope(1, 8) == pytest.approx(StepCosts().relative_slope(1, 8))


def test_a_step_that_was_kept_from_running_counts_little():
    """One pause of a second must not turn guesses off for the next hundred steps."""
    costs = fed(cpu, [1, 8, 32])
    before = costs.relative_slope(1, 8)
    costs.observe(8, 1.0)
    assert costs.relative_slope(1, 8) < 2.5 * before


def test_it_follows_a_change():
    """The other half of the machine's cores may have been given away."""
    costs = fed(cpu, [1, 8, 32])
    for _ in range(60):
        for size in (1, 8, 32):
            costs.observe(size, 0.004 + 0.006 * size)
    assert costs.relative_slope(1, 8) == pytest.approx(0.006 / 0.010, rel=0.1)


def test_a_longer_step_is_never_cheaper():
    """Averages of different times may say so; a negative price would buy every guess."""
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(8, 0.006)
    assert costs.relative_slope(1, 7) == 0
    costs.observe(32, 0.020)
    assert costs.relative_slope(8, 24) > 0


def test_a_clock_that_stands_still_teaches_nothing():
    """A time of zero would make every step free."""
    costs = fed(cpu, [1, 8, 32])
    before = costs.relative_slope(1, 8)
    costs.observe(1, 0.0)
    assert costs.relative_slope(1, 8) == before
