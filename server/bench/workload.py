"""The requests of each point: endless, and a function of the seed alone."""

from collections.abc import Iterator
from itertools import cycle
from random import Random

from castline.server.bench.dataset import Row
from castline.server.bench.prompts import Calibration, words
from castline.server.bench.protocol import RequestSpec
from castline.server.bench.settings import Settings

WARMUP = "warmup"


class Workload:
    """Every point draws from a random stream of its own, so that no point finds another's prompts in a prefix cache."""

    def __init__(self, settings: Settings, calibration: Calibration, rows: list[Row] | None = None) -> None:
        self._settings = settings
        self._calibration = calibration
        self._rows = rows
        self._prefix = words(calibration.words_in(settings.shared_prefix_tokens), self._rng("prefix"))

    def requests(self, point: str) -> Iterator[RequestSpec]:
        """The requests of the point of that label. A dataset is read in order, from its start for each point."""
        if self._rows is not None:
            return self._from_rows(self._rows)
        return self._synthetic(self._rng(f"prompts {point}"))

    def arrival_rng(self, point: str) -> Random:
        """The random stream of a point's arrival times."""
        return self._rng(f"arrivals {point}")

    def _rng(self, stream: str) -> Random:
        return Random(f"castline bench {self._settings.seed} {stream}")

    def _synthetic(self, rng: Random) -> Iterator[RequestSpec]:
        settings = self._settings
        while True:
            num_tokens = _spread(settings.prompt_tokens, settings.prompt_spread, rng)
            text = words(self._calibration.words_for(num_tokens), rng)
            yield RequestSpec(
                max_tokens=_spread(settings.output_tokens, settings.output_spread, rng),
                prompt=f"{self._prefix} {text}" if self._prefix else text,
            )

    def _from_rows(self, rows: list[Row]) -> Iterator[RequestSpec]:
        for row in cycle(rows):
            yield RequestSpec(
                max_tokens=row.max_tokens or self._settings.output_tokens,
                prompt=row.prompt or "",
                messages=row.messages or (),
            )


def _spread(center: int, spread: int, rng: Random) -> int:
    """Uniform over center ± spread, at least 1."""
    return max(1, rng.randint(center - spread, center + spread)) if spread else center
