"""The options of one run, checked, and the points of its sweep. Defaults live here."""

from dataclasses import dataclass
from typing import Literal

Endpoint = Literal["completions", "chat"]
Mode = Literal["closed", "open"]

DEFAULT_CONCURRENCIES = (1, 4, 8, 16)
MIN_REQUESTS = 16
REQUESTS_PER_WORKER = 8
OPEN_LOOP_SECONDS = 30.0


def load_label(mode: Mode, load: float) -> str:
    return f"concurrency {load:g}" if mode == "closed" else f"{load:g} req/s"


@dataclass(frozen=True, slots=True)
class Point:
    """One load of the sweep: so many workers (closed loop), or so many requests a second (open loop)."""

    mode: Mode
    load: float
    num_requests: int | None
    duration_s: float | None
    """Requests start for so long; those under way at the end are waited for."""

    @property
    def label(self) -> str:
        return load_label(self.mode, self.load)


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. Lengths are in tokens of the server's tokenizer, times in seconds."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """None: the first of /v1/models."""
    endpoint: Endpoint = "completions"
    concurrencies: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    burstiness: float = 1.0
    num_requests: int | None = None
    """Of each point; None scales with the load."""
    duration_s: float | None = None
    prompt_tokens: int = 128
    prompt_spread: int = 0
    output_tokens: int = 128
    output_spread: int = 0
    shared_prefix_tokens: int = 0
    dataset: str | None = None
    seed: int = 0
    warmup: int = 2
    timeout_s: float = 600.0
    ignore_eos: bool = True
    temperature: float = 0.0
    slo: str | None = None
    title: str | None = None

    def points(self) -> list[Point]:
        """Closed loops first; where neither list is given, the default concurrencies."""
        concurrencies = self.concurrencies or (() if self.rates else DEFAULT_CONCURRENCIES)
        closed = [self._point("closed", c, max(MIN_REQUESTS, REQUESTS_PER_WORKER * c)) for c in concurrencies]
        opened = [self._point("open", r, max(MIN_REQUESTS, round(r * OPEN_LOOP_SECONDS))) for r in self.rates]
        return closed + opened

    def _point(self, mode: Mode, load: float, default_requests: int) -> Point:
        if self.duration_s is not None:
            return Point(mode, load, None, self.duration_s)
        return Point(mode, load, self.num_requests or default_requests, None)
