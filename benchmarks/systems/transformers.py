"""transformers itself, in process, in static batches."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality import Quality
from benchmarks.sessions import DriverSession
from benchmarks.settings import num_threads
from benchmarks.systems.base import PIECES, System, driver_command, thread_environment

PACKAGES = ("transformers>=5", "torch==2.13.0")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(slots=True)
class Transformers(System):
    """``variant``: the weights."""

    def prepare(self) -> None:
        self.environment().install(PACKAGES, self.context.log("transformers-install"))
        self.settings = {
            "weights": f"{self.variant}, from the given file",
            "run by": "generate() in process, static batches, SDPA attention, eager",
            "KV": self.variant,
        }

    def start(self) -> DriverSession:
        return DriverSession.start(self._command(), log=self.log("driver"), environment=thread_environment())

    def measure_quality(self) -> Quality:
        session = DriverSession.open(self._command(), log=self.log("logits"), environment=thread_environment())
        try:
            return self.quality_through_driver(session, f"the model's logits, {PIECES}")
        finally:
            session.stop()

    def versions(self) -> dict[str, str]:
        return self.environment().versions(["transformers", "torch"])

    def model_files(self) -> list[Path]:
        libraries = self.environment().path.glob("lib/python*/site-packages/torch/lib/*.so*")
        return [*self.context.source.hf.iterdir(), *libraries]

    def _command(self) -> list[str]:
        arguments = (str(self.context.source.hf), DTYPES[self.variant], str(num_threads()))
        return driver_command(self.environment().python, "transformers", *arguments)
