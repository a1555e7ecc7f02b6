"""The JSON document of a run: everything that docs/performance.md is made of, so that it can be made again."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.bandwidth import Bandwidth, Roofline
from benchmarks.comparison import Spread
from benchmarks.machine import Machine
from benchmarks.quality import Quality

SCHEMA_VERSION = 2
OLDEST_SCHEMA = 1
"""Without the command line, systems that were not asked for, bandwidths beside samples, and huge pages: these have
defaults, and the document says what it does not know."""


@dataclass(slots=True)
class SystemReport:
    """One system: what it is, how it was set, how good its numbers are."""

    name: str
    label: str
    family: str
    settings: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    quality: Quality = field(default_factory=Quality)
    answer: str | None = None
    """To the question every system is asked."""
    sane: bool | None = None
    """The answer contains what it should."""
    unavailable: str | None = None
    """Why it took no part."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One cell of one system in one round. ``values`` by metric key; empty where ``failure`` says why."""

    round: int
    system: str
    cell: str
    values: dict[str, float]
    seconds: float
    others_share: float = 0.0
    """Of the processors' time, taken by others meanwhile."""
    failure: str | None = None
    bandwidths: tuple[Bandwidth, ...] = ()
    """Of castline's W1: read right before and after it, by as many threads; of each buffer the faster of the two."""


@dataclass(slots=True)
class Results:
    created: str
    rounds: int
    seed: int
    quick: bool
    machine: Machine
    systems: list[SystemReport]
    """All that the catalogue knows."""
    bandwidths: list[Bandwidth] = field(default_factory=list)
    """Before the first round, with one thread and with all."""
    roofline: Roofline | None = None
    noise_before: float = 0.0
    """Share of the processors' time that others took before the first round."""
    seconds: float = 0.0
    """Of the measured rounds."""
    samples: list[Sample] = field(default_factory=list)
    command: str = ""
    """The command line, without where things are kept; empty where it is not known."""
    schema_version: int = SCHEMA_VERSION

    def system(self, name: str) -> SystemReport:
        return next(system for system in self.systems if system.name == name)

    def spreads(self, cell: str, metric: str) -> dict[str, Spread]:
        """By system, over its rounds; without those that have no such figure."""
        values: dict[str, list[float]] = {}
        for sample in self.samples:
            if sample.cell == cell and metric in sample.values:
                values.setdefault(sample.system, []).append(sample.values[metric])
        return {name: Spread.of(figures) for name, figures in values.items()}

    def failure(self, cell: str, system: str) -> str | None:
        """Why a system has no figure in a cell; None where it has one, or was not asked."""
        own = [sample for sample in self.samples if sample.cell == cell and sample.system == system]
        if any(sample.values for sample in own):
            return None
        return next((sample.failure for sample in own if sample.failure), None)

    @property
    def cells(self) -> list[str]:
        """Those that have a sample."""
        return list(dict.fromkeys(sample.cell for sample in self.samples))

    @property
    def qualities(self) -> dict[str, Quality]:
        return {system.name: system.quality for system in self.systems}


def write_results(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """Raises ValueError where the file is of another schema or no results."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} has no results of a run: {error}") from None
    if not OLDEST_SCHEMA <= results.schema_version <= SCHEMA_VERSION:
        known = f"{OLDEST_SCHEMA} to {SCHEMA_VERSION}"
        raise ValueError(f"{path} has schema {results.schema_version}, this reads {known}: run again")
    return results
