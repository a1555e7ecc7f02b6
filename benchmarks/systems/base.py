"""What the runner asks of a system."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.drivers.protocol import CHUNK_SIZES
from benchmarks.environments import Environment
from benchmarks.model import SourceModel
from benchmarks.quality import Quality, compare
from benchmarks.sessions import DriverSession, Session
from benchmarks.settings import Settings, num_threads
from benchmarks.workloads import Need

PIECES = f"fed in pieces of {min(CHUNK_SIZES)} to {max(CHUNK_SIZES)} tokens"
"""How drivers read the parity text."""


@dataclass(frozen=True, slots=True)
class Context:
    """What systems share: options, and the weights they are made from."""

    settings: Settings
    source: SourceModel

    def log(self, name: str) -> Path:
        return self.settings.logs / f"{name}.log"

    def model(self, name: str) -> Path:
        """Where converted weights of that name are kept."""
        return (self.settings.models / name).resolve()


@dataclass(slots=True)
class System(ABC):
    """One row of the tables."""

    name: str
    family: str
    label: str
    variant: str
    """Which weights; of castline, whether it guesses ahead."""
    context: Context
    can: frozenset[Need]
    settings: dict[str, str] = field(default_factory=dict)
    """What was chosen for it, in words: for the document."""

    @abstractmethod
    def prepare(self) -> None:
        """Installs and converts what is not there yet. Raises Unavailable."""

    @abstractmethod
    def start(self) -> Session:
        """A fresh process. Raises Unavailable."""

    @abstractmethod
    def measure_quality(self) -> Quality:
        """Raises Unavailable or JobFailed."""

    def versions(self) -> dict[str, str]:
        """Of the packages that matter."""
        return {}

    def model_files(self) -> list[Path]:
        """What a start reads, so that it can be brought into the page cache before."""
        return []

    def kv_pool_bytes(self, log: str) -> int | None:
        """Resident bytes of the KV pool, from what the process has said; None where it does not say."""
        return None

    def environment(self) -> Environment:
        """The family's."""
        return Environment((self.context.settings.work / "peers" / self.family).resolve())

    def log(self, what: str) -> Path:
        return self.context.log(f"{self.name}-{what}")

    def quality_through_driver(self, session: DriverSession, how: str) -> Quality:
        """Asks a driver for the logits of the parity text."""
        path = self.context.model(f"logits-{self.name}.npy")
        try:
            session.call("logits", passages=self.context.source.passages, path=str(path))
            return compare(path, self.context.source.reference_logits, self.context.source.passages, how)
        finally:
            path.unlink(missing_ok=True)


def driver_command(python: str, module: str, *arguments: str) -> list[str]:
    return [python, "-m", f"benchmarks.drivers.{module}", *arguments]


def thread_environment() -> dict[str, str]:
    """For libraries that size their pools by the environment."""
    return {"OMP_NUM_THREADS": str(num_threads()), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
