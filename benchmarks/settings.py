"""The options of one run. Defaults live here."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The source tree."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run, and where things are kept."""

    systems: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int = 3
    seed: int = 0
    quick: bool = False
    """Few and short requests: shows that everything works, not how fast it is."""
    repeat_all: bool = False
    """Also cells that the first round showed to be far behind."""
    job_timeout_s: float = 150.0
    work: Path = Path(".benchmarks")
    docs: Path = ROOT / "docs"

    @property
    def models(self) -> Path:
        """Converted weights."""
        return self.work / "models"

    @property
    def logs(self) -> Path:
        return self.work / "logs"


def num_threads() -> int:
    """Processors that this process may use; every system is given as many compute threads."""
    return len(os.sched_getaffinity(0))
