"""Service-level objectives, for goodput: requests a second that met every objective."""

from dataclasses import dataclass

from castline.server.bench.client import RequestRecord
from castline.server.bench.errors import BenchError

METRICS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds by metric. ``itl`` is met where the longest gap of the request is within the limit."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From ``ttft:500,itl:80`` in milliseconds. Raises BenchError naming the part that is wrong."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            if name not in METRICS:
                raise BenchError(
                    f"--slo {part.strip()!r}: name one of {', '.join(METRICS)}, as in ttft:500,itl:80 (ms)"
                )
            try:
                limit_ms = float(value)
            except ValueError:
                limit_ms = 0.0
            if not 0 < limit_ms < float("inf"):
                raise BenchError(f"--slo {part.strip()!r}: the limit is a number of milliseconds above 0")
            limits[name] = limit_ms / 1e3
        return cls(limits)

    def met_by(self, record: RequestRecord) -> bool:
        """False for a failed request, and for one without a first token where one is asked for."""
        if record.failure is not None:
            return False
        measured = {
            "ttft": record.ttft,
            "itl": max(record.gaps, default=0.0),
            "tpot": record.tpot if record.tpot is not None else 0.0,
            "e2e": record.e2e,
        }
        return all((value := measured[name]) is not None and value <= limit for name, limit in self.limits.items())
