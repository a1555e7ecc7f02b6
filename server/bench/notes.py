"""What a reader of the figures should know: one sentence for each thing found."""

from collections.abc import Iterator, Sequence

from castline.server.bench.results import PointSummary
from castline.server.bench.settings import Settings, load_label

CHUNKED = 1.05
"""Tokens a chunk above which gaps between chunks are not gaps between tokens."""
CACHED_BY_CHANCE = 0.05


def notes(settings: Settings, summaries: Sequence[PointSummary]) -> list[str]:
    """Across all points, without repeats."""
    found = [note for summary in summaries for note in _notes(settings, summary)]
    return list(dict.fromkeys(found))


def _notes(settings: Settings, summary: PointSummary) -> Iterator[str]:
    at = f"at {load_label(summary.mode, summary.load)}"
    if summary.client.limited:
        yield _client_note(at, summary)
    if summary.mode == "closed" and not summary.unfinished and summary.peak_in_flight < summary.load:
        yield (
            f"{at} only {summary.peak_in_flight} requests were ever in flight: "
            "raise --num-requests to the concurrency or above"
        )
    if not summary.completed:
        return
    if not summary.output_tokens_counted:
        yield "the server reports no usage: output tokens are counted as chunks, and prompt lengths are unknown"
    elif summary.tokens_per_chunk is not None and summary.tokens_per_chunk > CHUNKED:
        carried = f"{summary.tokens_per_chunk:.1f} tokens on average"
        yield f"{at} a chunk carried {carried}: ITL is between chunks, TPOT is by token"
    if settings.ignore_eos and (stopped := summary.finish_reasons.get("stop", 0)):
        yield f"{at} {stopped} answers ended before the length asked for, although ignore_eos was sent"
    if _cached_share(summary) > _expected_share(settings, summary) + CACHED_BY_CHANCE:
        yield (
            f"{at} {_cached_share(summary):.0%} of the prompt tokens came from the server's prefix cache: "
            "it has seen these prompts before; another --seed makes new ones"
        )


def _client_note(at: str, summary: PointSummary) -> str:
    client = summary.client
    lag = "" if client.loop_lag_p99_ms is None else f", its event loop was {client.loop_lag_p99_ms:.1f} ms late (P99)"
    return (
        f"{at} the client itself was a bottleneck: it took {client.cpu_share:.0%} of a core{lag}; "
        "run it on another machine, or read these latencies as upper bounds"
    )


def _cached_share(summary: PointSummary) -> float:
    if summary.cached_prompt_tokens is None or summary.prompt_tokens is None or not summary.prompt_tokens.total:
        return 0.0
    return summary.cached_prompt_tokens / summary.prompt_tokens.total


def _expected_share(settings: Settings, summary: PointSummary) -> float:
    if summary.prompt_tokens is None:
        return 0.0
    return min(1.0, settings.shared_prefix_tokens / summary.prompt_tokens.mean)
