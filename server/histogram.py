"""A Prometheus histogram of one process and one label set: an observation costs a binary search and two additions.

prometheus_client's own takes a lock for each of several values, which shows at thousands of tokens a second. All
observations come from the event loop, and so does the scrape.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    def __init__(self, name: str, text: str, labels: dict[str, str], bounds: Sequence[float]) -> None:
        """*bounds* are the buckets' inclusive upper ones, rising; +Inf is added."""
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = [*bounds, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """*value*, *count* times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
