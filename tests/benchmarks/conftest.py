"""Results as a run would leave them, made by hand."""

from collections.abc import Callable

import pytest

from benchmarks.bandwidth import LARGE_BYTES, SMALL_BYTES, Bandwidth, Roofline
from benchmarks.machine import Machine
from benchmarks.quality import Quality
from benchmarks.results import Results, Sample, SystemReport

MakeResults = Callable[..., Results]


@pytest.fixture
def machine() -> Machine:
    return Machine("a processor", 2, ("avx2",), {"L2 unified": "2048K"}, 16.0, "a system", "3.11")


@pytest.fixture
def make_results(machine: Machine) -> MakeResults:
    """Results of systems {name: mean KL} with figures {(cell, system): [values of each round]} by metric key."""

    def make(
        qualities: dict[str, float | None], figures: dict[tuple[str, str, str], list[float]], rounds: int = 3
    ) -> Results:
        systems = [
            SystemReport(
                name, f"{name}'s label", name, quality=Quality(kl, 0.9, 14.0, 100, "by hand"), answer="Paris", sane=True
            )
            for name, kl in qualities.items()
        ]
        merged: dict[tuple[int, str, str], dict[str, float]] = {}
        for (cell, system, metric), values in figures.items():
            for number, value in enumerate(values):
                merged.setdefault((number, system, cell), {})[metric] = value
        samples = [Sample(number, system, cell, values, 1.0) for (number, system, cell), values in merged.items()]
        bandwidths = [Bandwidth(2, SMALL_BYTES, 100.0), Bandwidth(2, LARGE_BYTES, 20.0)]
        return Results(
            "2026-01-01",
            rounds,
            0,
            False,
            machine,
            systems,
            bandwidths,
            Roofline(90_000_000, 5_000_000, 10_000_000),
            0.0,
            60.0,
            samples,
        )

    return make
