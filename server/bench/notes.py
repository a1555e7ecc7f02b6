"""What a reader of the figures should know: one sentence for each thing found, naming the loads where it was found."""

from collections.abc import Callable, Sequence

from castline.server.bench.results import PointSummary
from castline.server.bench.settings import Settings
from castline.server.bench.stats import BUSY_SHARE

CHUNKED = 1.05
"""Tokens a chunk above which gaps between chunks are not gaps between tokens."""
CACHED_BY_CHANCE = 0.05


def notes(settings: Settings, summaries: Sequence[PointSummary]) -> list[str]:
    """Across all points."""
    completed = [summary for summary in summaries if summary.completed]
    found = [
        _note(summaries, is_client_busy, _client_busy),
        _note(summaries, is_client_late, _client_late),
        _note(summaries, _never_reached, lambda _: "the concurrency was never reached: raise --num-requests above it"),
        _note(completed, lambda s: not s.output_tokens_counted, lambda _: NO_USAGE),
        _note(completed, _is_chunked, _chunked),
        _note(completed, lambda s: bool(s.drafted_tokens), _guessed),
        _note(completed, lambda s: _is_short(settings, s), _short),
        _note(completed, lambda s: _is_cached(settings, s), _cached),
    ]
    return [note for note in found if note is not None]


def _note(
    summaries: Sequence[PointSummary],
    applies: Callable[[PointSummary], bool],
    sentence: Callable[[Sequence[PointSummary]], str],
) -> str | None:
    concerned = [summary for summary in summaries if applies(summary)]
    if not concerned:
        return None
    where = "" if len(concerned) == len(summaries) else f"at {_loads(concerned)}: "
    return where + sentence(concerned)


def _loads(summaries: Sequence[PointSummary]) -> str:
    closed = ", ".join(f"{summary.load:g}" for summary in summaries if summary.mode == "closed")
    opened = ", ".join(f"{summary.load:g}" for summary in summaries if summary.mode == "open")
    return " and ".join(([f"concurrency {closed}"] if closed else []) + ([f"{opened} req/s"] if opened else []))


NO_USAGE = "the server reports no usage, so output tokens are counted as chunks and prompt lengths are unknown"


def is_client_busy(summary: PointSummary) -> bool:
    return summary.client.cpu_share > BUSY_SHARE


def is_client_late(summary: PointSummary) -> bool:
    """Kept from running, while it asked for little."""
    return summary.client.limited and not is_client_busy(summary)


def _client_busy(summaries: Sequence[PointSummary]) -> str:
    share = max(summary.client.cpu_share for summary in summaries)
    return (
        f"the client itself was a bottleneck ({share:.0%} of a core): these figures are partly its own; "
        "run it on another machine, or load the server less"
    )


def _client_late(summaries: Sequence[PointSummary]) -> str:
    lag = max(summary.client.loop_lag_p99_ms or 0.0 for summary in summaries)
    return (
        f"the client was kept waiting for a CPU, up to {lag:.1f} ms (P99): latencies include that; "
        "give it a core of its own, or another machine"
    )


def _never_reached(summary: PointSummary) -> bool:
    return summary.mode == "closed" and not summary.unfinished and summary.peak_in_flight < summary.load


def _is_chunked(summary: PointSummary) -> bool:
    per_chunk = summary.tokens_per_chunk
    return summary.output_tokens_counted and per_chunk is not None and per_chunk > CHUNKED


def _chunked(summaries: Sequence[PointSummary]) -> str:
    most = max(summary.tokens_per_chunk or 0.0 for summary in summaries)
    return f"a chunk carried up to {most:.2f} tokens on average, so ITL is between chunks; TPOT is by token"


def _guessed(summaries: Sequence[PointSummary]) -> str:
    drafted = sum(summary.drafted_tokens or 0 for summary in summaries)
    accepted = sum(summary.accepted_draft_tokens or 0 for summary in summaries)
    output = sum(summary.output_tokens.total for summary in summaries if summary.output_tokens)
    return (
        f"the server guessed {drafted} tokens ahead (speculation) and {accepted / drafted:.0%} were right, "
        f"{accepted / output:.0%} of the output: these figures hold for texts that repeat themselves as much"
    )


def _is_short(settings: Settings, summary: PointSummary) -> bool:
    return settings.ignore_eos and summary.finish_reasons.get("stop", 0) > 0


def _short(summaries: Sequence[PointSummary]) -> str:
    count = sum(summary.finish_reasons["stop"] for summary in summaries)
    return f"{count} answer(s) ended before the length asked for, although ignore_eos was sent"


def _is_cached(settings: Settings, summary: PointSummary) -> bool:
    if summary.prompt_tokens is None or summary.cached_prompt_tokens is None:
        return False
    expected = min(1.0, settings.shared_prefix_tokens / summary.prompt_tokens.mean)
    return summary.cached_prompt_tokens / summary.prompt_tokens.total > expected + CACHED_BY_CHANCE


def _cached(summaries: Sequence[PointSummary]) -> str:
    cached = sum(summary.cached_prompt_tokens or 0 for summary in summaries)
    total = sum(summary.prompt_tokens.total for summary in summaries if summary.prompt_tokens)
    return (
        f"{cached / total:.0%} of the prompt tokens came from the server's prefix cache: "
        "it has seen these prompts before; another --seed makes new ones"
    )
