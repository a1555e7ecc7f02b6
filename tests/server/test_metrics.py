"""C52: the Prometheus series, from before the first request to idle again."""

import re
from typing import Any

import grpc
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.client import Output, PromptInfo, Stats
from castline.runtime.events import FinishReason
from castline.server.histogram import Histogram
from castline.server.metrics import TTFT_BUCKETS, Metrics, RequestMeter

COUNTERS = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "engine_busy_seconds_total",
    "executor_seconds_total",
]
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "request_queue_time_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
]


def series(text: str) -> dict[str, float]:
    """Every castline sample of an exposition, by name and labels other than model_name."""
    found = {}
    for name, labels, value in re.findall(r"^castline:(\w+)\{(.*?)\} (\S+)$", text, re.M):
        others = ",".join(label for label in labels.split(",") if not label.startswith("model_name="))
        found[name + (f"{{{others}}}" if others else "")] = float(value)
    return found


def scrape(app: Any) -> dict[str, float]:
    reply = app.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return series(reply.text)


def test_every_series_exists_at_zero_before_use(app: Any) -> None:
    """Prevents rates and alerts that start with a gap."""
    found = scrape(app)
    for name in COUNTERS + GAUGES:
        assert found[name] == 0
    for reason in FinishReason:
        assert found[f'request_success_total{{finished_reason="{reason}"}}'] == 0
    for code in ErrorCode:
        assert found[f'request_errors_total{{code="{code}"}}'] == 0
    for name in HISTOGRAMS:
        assert found[f"{name}_count"] == found[f"{name}_sum"] == 0
        assert found[f'{name}_bucket{{le="+Inf"}}'] == 0
    assert found["stream_interval_tokens"] == app.engine.stream_interval()
    always = ("kv_blocks_total", "stream_interval_tokens")
    assert not any(value for name, value in found.items() if name not in always)


def test_series_do_not_appear_later_and_counters_only_grow(app: Any) -> None:
    """Prevents series that come into being with their first event."""
    before = scrape(app)
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    app.http.post("/v1/chat/completions", json=chat)
    app.http.post("/v1/chat/completions", json={**chat, "n": 0})
    app.engine.wait_for_live(0)
    after = scrape(app)
    assert set(after) == set(before)
    for name, value in after.items():
        if name.split("{")[0].endswith(("_total", "_count", "_sum", "_bucket")):
            assert value >= before[name]
    for name in GAUGES:
        assert after[name] == 0
    tokens = sum(len(choice.encode()) + 1 for choice in ("Paris, naïve 🙂.", "Paris, naïve 🙂.1"))
    assert after["generation_tokens_total"] == tokens
    assert after['request_success_total{finished_reason="stop"}'] == 2
    assert after['request_errors_total{code="invalid_value"}'] == 1
    assert after["time_to_first_token_seconds_count"] == 2
    assert after["inter_token_latency_seconds_count"] == tokens - 2
    assert after["request_generation_tokens_sum"] == tokens
    assert after["request_prompt_tokens_count"] == 1


def test_the_engines_time_is_told() -> None:
    """Prevents two series that are always there and always 0."""
    metrics = Metrics(lambda: Stats(busy_s=12.5, executor_s=12.25), lambda: 1, "m")
    found = series(generate_latest(metrics.registry).decode())
    assert (found["engine_busy_seconds_total"], found["executor_seconds_total"]) == (12.5, 12.25)


def test_both_transports_are_counted(app: Any) -> None:
    """Prevents a dashboard that sees one door only."""
    from castline.server.proto import castline_pb2 as pb

    list(app.inference.Generate(pb.GenerateRequest(prompt="a")))
    app.http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert scrape(app)["e2e_request_latency_seconds_count"] == 3


def test_what_the_transports_refuse_is_counted_once(app: Any) -> None:
    """Prevents error rates that miss the requests which never reach the engine, or count the others twice."""
    from castline.server.proto import castline_pb2 as pb

    for body in ({"prompt": "a", "model": "x"}, {"prompt": "a", "suffix": "x"}, {"prompt": "a", "n": 0}, {"what": 1}):
        assert app.http.post("/v1/completions", json=body).status_code in (400, 404)
    for request in (pb.GenerateRequest(prompt="a", model="x"), pb.GenerateRequest()):
        with pytest.raises(grpc.RpcError):
            list(app.inference.Generate(request))
    found = scrape(app)
    assert found['request_errors_total{code="model_not_found"}'] == 2
    assert found['request_errors_total{code="unsupported"}'] == 1
    assert found['request_errors_total{code="invalid_value"}'] == 3


def test_gauges_show_what_runs(app: Any) -> None:
    """Prevents gauges that are always 0."""
    from castline.server.proto import castline_pb2 as pb

    app.engine.hold_after = 1
    call = app.inference.Generate(pb.GenerateRequest(prompt="a"))
    next(call)
    assert scrape(app)["num_requests_running"] == 1
    assert scrape(app)["kv_cache_usage_perc"] == 1 / 256
    call.cancel()
    app.engine.wait_for_live(0)
    found = scrape(app)
    assert found["num_requests_running"] == found["kv_cache_usage_perc"] == 0
    assert found['request_success_total{finished_reason="abort"}'] == 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Stats, lambda: 1, "tiny")


def values(metrics: Metrics) -> dict[str, float]:
    return series(metrics.render("")[0].decode())


def output(index: int, count: int, reason: FinishReason | None = None, prompt: PromptInfo | None = None) -> Output:
    return Output(index, "x", (1,) * count, None, reason, None, prompt)


def test_times_are_taken_per_continuation(metrics: Metrics) -> None:
    """Prevents intervals between tokens of different continuations, and a first token counted as an interval."""
    clock = Clock()
    meter = RequestMeter(metrics, 2, clock)
    for after, part in (
        (2.0, output(0, 1, prompt=PromptInfo((1, 2, 3), 0, None))),
        (1.0, output(1, 1)),
        (1.0, output(0, 2)),
        (1.0, output(1, 1, FinishReason.STOP)),
        (1.0, output(0, 1, FinishReason.LENGTH)),
    ):
        clock.now += after
        meter.observe(part)
    meter.close(None)
    found = values(metrics)
    assert found["time_to_first_token_seconds_sum"] == 2 + 3
    assert found["inter_token_latency_seconds_count"] == 4
    assert found["inter_token_latency_seconds_sum"] == (2 + 2) + 2
    assert found["request_time_per_output_token_seconds_sum"] == 4 / 3 + 2
    assert found["e2e_request_latency_seconds_sum"] == 5 + 6
    assert found["request_prompt_tokens_sum"] == 3


@pytest.mark.parametrize(
    ("error", "reason", "count"),
    [
        (None, "abort", 2),
        (GeneratorExit(), "abort", 2),
        (RequestError("late", code=ErrorCode.DEADLINE_EXCEEDED), "abort", 2),
        (RequestError("bye", code=ErrorCode.SHUTTING_DOWN), "error", 2),
        (ValueError("bug"), "error", 2),
    ],
)
def test_what_did_not_finish_is_counted_once(
    metrics: Metrics, error: BaseException | None, reason: str, count: int
) -> None:
    """Prevents continuations that vanish from the counts."""
    meter = RequestMeter(metrics, 3, Clock())
    meter.observe(output(0, 1, FinishReason.STOP))
    meter.observe(output(1, 1))
    meter.close(error)
    found = values(metrics)
    assert found[f'request_success_total{{finished_reason="{reason}"}}'] == count
    assert sum(v for k, v in found.items() if k.startswith("request_success_total")) == 3


def test_a_refused_request_counts_as_an_error_only(metrics: Metrics) -> None:
    """Prevents a refused n of a billion from counting a billion endings."""
    RequestMeter(metrics, 10**9, Clock()).close(RequestError("n is too large", field="n"))
    found = values(metrics)
    assert found['request_errors_total{code="invalid_value"}'] == 1
    assert sum(v for k, v in found.items() if k.startswith("request_success_total")) == 0


def test_the_histogram_equals_prometheus_own() -> None:
    """Written anew for speed: bounds are inclusive, buckets add up, and their names are the ones that queries know."""
    theirs = prometheus_client.Histogram("castline:h", "H", ["model_name"], buckets=TTFT_BUCKETS, registry=None)
    mine = Histogram("castline:h", "H", {"model_name": "m"}, TTFT_BUCKETS)
    for value in (0.0, 0.004, 0.005, 0.0051, 1, 640, 641, 3.5):
        theirs.labels("m").observe(value)
        mine.observe(value)
    mine.observe(0.03, 3)
    for _ in range(3):
        theirs.labels("m").observe(0.03)
    registries = [CollectorRegistry(), CollectorRegistry()]
    registries[0].register(theirs)
    registries[1].register(mine)
    expected, found = (series(generate_latest(registry).decode()) for registry in registries)
    assert found == {name: value for name, value in expected.items() if not name.startswith("h_created")}
    assert len(found) == len(TTFT_BUCKETS) + 3
