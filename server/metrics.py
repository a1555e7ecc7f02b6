"""Prometheus series, named after vLLM's where it has the same thing (``vllm:x`` is ``castline:x``).

Every series exists, at zero, from the start. What the engine counts is read from its statistics at scrape time; what
only the edge can time (first token, between tokens, end to end) is recorded by ``RequestMeter``, one a request.
"""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import Output, Stats
from castline.runtime.events import FinishReason
from castline.server.histogram import Histogram

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
ITL_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
LENGTH_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

_CLIENT_ENDED = (ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED)

_COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    ("num_preemptions", "Sequences whose KV blocks were taken back, to be computed again.", lambda s: s.preemptions),
    ("engine_steps", "Forward passes.", lambda s: s.steps),
    ("spec_drafted_tokens", "Tokens guessed ahead and put to the model.", lambda s: s.spec_drafted_tokens),
    ("spec_accepted_tokens", "Guessed tokens that the model chose too.", lambda s: s.spec_accepted_tokens),
    ("engine_busy_seconds", "Time in which the engine had work.", lambda s: s.busy_s),
    ("executor_seconds", "Time of forward passes, within engine_busy_seconds.", lambda s: s.executor_s),
)
_GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("num_requests_running", "Sequences in the running batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences waiting for their first or next step.", lambda s: s.num_waiting),
    ("kv_blocks_used", "KV blocks held by live sequences.", lambda s: s.kv_blocks_used),
    ("kv_blocks_total", "KV blocks of the pool.", lambda s: s.kv_blocks_total),
    (
        "kv_cache_usage_perc",
        "Share of the KV blocks held by live sequences; 1 is all of them.",
        lambda s: s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else 0.0,
    ),
)


class _StatsCollector(Collector):
    """The engine's own counters and gauges, read when scraped."""

    def __init__(self, stats: Callable[[], Stats], stream_interval: Callable[[], int], model_name: str) -> None:
        self._stats = stats
        self._stream_interval = stream_interval
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"castline:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], read(stats))
            yield counter
        for name, text, read in _GAUGES:
            yield self._gauge(name, text, read(stats))
        yield self._gauge("stream_interval_tokens", "Tokens of a streamed message now.", self._stream_interval())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"castline:{name}", text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge


class Metrics:
    """The series of one served model, in a registry of their own."""

    def __init__(self, stats: Callable[[], Stats], stream_interval: Callable[[], int], model_name: str) -> None:
        # A creation time for every series would double their number, and gauges would not be 0 when idle.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(_StatsCollector(stats, stream_interval, model_name))
        ProcessCollector(registry=self.registry)
        self._model_name = model_name
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step that computes the prompt.", TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a continuation.", ITL_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a continuation's tokens but the first.", ITL_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a continuation.", E2E_BUCKETS
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Length of a prompt.", LENGTH_BUCKETS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens of a finished continuation.", LENGTH_BUCKETS
        )
        self.finished = self._counters(
            "request_success", "Continuations ended, by reason.", "finished_reason", [str(r) for r in FinishReason]
        )
        self.errors = self._counters(
            "request_errors", "Requests refused or ended with an error, by code.", "code", [str(c) for c in ErrorCode]
        )
        self.counting_refusals = _CountingRefusals(self.errors)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"castline:{name}", text, {"model_name": self._model_name}, buckets)
        self.registry.register(histogram)
        return histogram

    def _counters(self, name: str, text: str, label: str, values: list[str]) -> dict[str, Counter]:
        counter = Counter(f"castline:{name}", text, ["model_name", label], registry=self.registry)
        return {value: counter.labels(self._model_name, value) for value in values}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that an Accept header prefers."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class _CountingRefusals:
    """Counts what a transport refuses before the engine is asked; later errors are a RequestMeter's."""

    def __init__(self, errors: Mapping[str, Counter]) -> None:
        self._errors = errors

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RequestError):
            self._errors[error.code].inc()


class _Continuation:
    """Times of one of a request's continuations, in seconds on the meter's clock."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.first = 0.0
        self.last = 0.0


class RequestMeter:
    """Records one request: ``observe`` every output, then exactly one ``close``."""

    __slots__ = ("_arrival", "_clock", "_continuations", "_metrics", "_n", "_num_finished", "_started")

    def __init__(self, metrics: Metrics, n: int, clock: Callable[[], float] = monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrival = clock()
        self._n = n
        self._num_finished = 0
        self._continuations: dict[int, _Continuation] = {}
        self._started = False

    def observe(self, output: Output) -> None:
        now = self._clock()
        self._started = True
        if output.prompt is not None:
            self._metrics.request_prompt_tokens.observe(len(output.prompt.prompt_token_ids))
            self._metrics.queue_time.observe(output.prompt.queue_s)
        continuation = self._continuations.get(output.index)
        if continuation is None:
            continuation = self._continuations[output.index] = _Continuation()
        if output.token_ids:
            self._observe_tokens(continuation, len(output.token_ids), now)
        if output.finish_reason is not None:
            self._finish(continuation, output.finish_reason, now)

    def _observe_tokens(self, continuation: _Continuation, count: int, now: float) -> None:
        """Tokens that arrive together share the time since the last, so that there is one interval a token."""
        if continuation.tokens == 0:
            continuation.first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        else:
            self._metrics.inter_token_latency.observe((now - continuation.last) / count, count)
        continuation.tokens += count
        continuation.last = now

    def _finish(self, continuation: _Continuation, reason: FinishReason, now: float) -> None:
        self._num_finished += 1
        self._metrics.finished[reason].inc()
        self._metrics.e2e_latency.observe(now - self._arrival)
        self._metrics.request_generation_tokens.observe(continuation.tokens)
        if continuation.tokens > 1:
            mean = (continuation.last - continuation.first) / (continuation.tokens - 1)
            self._metrics.time_per_output_token.observe(mean)

    def close(self, error: BaseException | None) -> None:
        """The request is over: *error* ended it, or None when its last output was taken or its consumer left."""
        code: ErrorCode | None = None
        if isinstance(error, Exception):
            code = error.code if isinstance(error, RequestError) else ErrorCode.ENGINE_FAILED
            self._metrics.errors[code].inc()
            if not self._started:
                return
        reason = FinishReason.ABORT if code is None or code in _CLIENT_ENDED else FinishReason.ERROR
        num_begun = self._n if self._started else 1
        self._metrics.finished[reason].inc(num_begun - self._num_finished)
