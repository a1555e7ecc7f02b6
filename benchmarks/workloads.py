"""What is asked of every system, as plain data. Lengths are in tokens; outputs have a fixed length; decoding is greedy.

A cell is one point of a workload (``W3@32``). Its job is a function of (seed, round, cell): all systems get the same
tokens, and no round finds an earlier one's prompts in a prefix cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from benchmarks.prompts import Vocabulary

Need = Literal["batching", "prefix_cache", "castline"]
"""``batching``: requests join a running batch. ``castline``: castline's own extras, without peers."""
Door = Literal["http", "grpc"]

CONCURRENCIES = (1, 4, 8, 16, 32, 64)
SHARED_TOKENS = 1000
LONG_TOKENS = 4000
PREFILL_TOKENS = 2048
SAMPLING = (0.8, 0.95)
"""Temperature and top-p."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A closed loop of *concurrency* over the requests, in order.

    With ``late``: that request starts, beside the others, once each of them has ``late_after`` tokens. ``door`` and
    ``sampled`` are for castline's own cells: what is measured beside peers goes over HTTP, and is greedy.
    """

    requests: tuple[Request, ...]
    concurrency: int
    late: Request | None = None
    late_after: int = 0
    door: Door = "http"
    sampled: bool = False
    """As SAMPLING says; over HTTP only."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a job's randomness comes from. *texts* are tokenised passages of English, for what words would distort."""

    vocabulary: Vocabulary
    texts: tuple[tuple[int, ...], ...]
    seed: int
    round: int
    quick: bool = False

    def rng(self, stream: str) -> Random:
        """Another stream in each round."""
        return Random(f"castline benchmarks {self.seed} {self.round} {stream}")

    def lengths_rng(self, stream: str) -> Random:
        """The same stream in each round, so that every round is equal work."""
        return Random(f"castline benchmarks {self.seed} lengths {stream}")

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    workload: str
    title: str
    job: Callable[[Draw], Job] | None = None
    """None: measured beside the jobs, when a system starts (W7), after W1 (W8) or while it has none (X4)."""
    needs: frozenset[Need] = frozenset()


def same_length(draw: Draw, stream: str, count: int, prompt_tokens: int, output_tokens: int) -> tuple[Request, ...]:
    rng = draw.rng(stream)
    return tuple(Request(draw.vocabulary.prompt(prompt_tokens, rng), output_tokens) for _ in range(count))


def one_stream(draw: Draw) -> Job:
    return Job(same_length(draw, "W1", draw.count(3, 1), 128, draw.count(128, 32)), concurrency=1)


def mixed_lengths(draw: Draw) -> Job:
    lengths, rng = draw.lengths_rng("W2"), draw.rng("W2")
    sizes = [(lengths.randint(64, 192), lengths.randint(64, 192)) for _ in range(draw.count(64, 8))]
    requests = tuple(Request(draw.vocabulary.prompt(prompt, rng), output) for prompt, output in sizes)
    return Job(requests, concurrency=draw.count(32, 4))


def sweep_point(concurrency: int) -> Callable[[Draw], Job]:
    def job(draw: Draw) -> Job:
        count = 2 * concurrency if concurrency < 16 and not draw.quick else concurrency
        requests = same_length(draw, f"W3@{concurrency}", count, 30, draw.count(128, 16))
        return Job(requests, concurrency)

    return job


def long_beside_streams(draw: Draw) -> Job:
    streams = same_length(draw, "W4", 8, 30, draw.count(320, 64))
    late = Request(draw.vocabulary.prompt(draw.count(LONG_TOKENS, 500), draw.rng("W4 long")), 8)
    return Job(streams, concurrency=8, late=late, late_after=16)


def sharing(part: Literal["unshared", "cold", "warm"]) -> Callable[[Draw], Job]:
    """``cold`` and ``warm`` have the same prefix, and each request a tail of its own; ``unshared`` is the control."""

    def job(draw: Draw) -> Job:
        count = draw.count(16, 4) if part == "unshared" else draw.count(32, 8)
        prefix = draw.vocabulary.prompt(draw.count(SHARED_TOKENS, 200), draw.rng("W5 prefix"))
        tails = same_length(draw, f"W5 {part}", count, 30, 32)
        if part == "unshared":
            return Job(same_length(draw, "W5 unshared", count, len(prefix) + 30, 32), concurrency=count)
        return Job(tuple(Request(prefix + tail.prompt, tail.max_tokens) for tail in tails), concurrency=count)

    return job


def prefill(draw: Draw) -> Job:
    return Job(same_length(draw, "W6", draw.count(2, 1), PREFILL_TOKENS, 1), concurrency=1)


def queue(concurrency: int) -> Callable[[Draw], Job]:
    """The same 256 requests, *concurrency* of them sent at a time: what a long queue costs."""

    def job(draw: Draw) -> Job:
        requests = same_length(draw, f"X1@{concurrency}", draw.count(256, 64), 30, draw.count(64, 8))
        return Job(requests, concurrency)

    return job


def text_stream(draw: Draw) -> Job:
    """English text instead of random words: guesses from the prompt are neither hopeless nor trivial on it."""
    start = draw.round % len(draw.texts)
    texts = (draw.texts[start:] + draw.texts[:start])[: draw.count(3, 1)]
    return Job(tuple(Request(text[:128], draw.count(128, 32)) for text in texts), concurrency=1)


def many_streams(door: Door) -> Callable[[Draw], Job]:
    """Enough tokens for what serving takes to be counted in hundredths of a second."""

    def job(draw: Draw) -> Job:
        count = draw.count(64, 8)
        return Job(same_length(draw, f"X3 {door}", count, 30, draw.count(160, 32)), concurrency=count, door=door)

    return job


def text_streams(concurrency: int, *, sampled: bool) -> Callable[[Draw], Job]:
    """English text, whose next tokens are as likely as those that users draw from; drawn or not, the same prompts."""

    def job(draw: Draw) -> Job:
        rng, requests = draw.rng(f"X5@{concurrency}"), list[Request]()
        for _ in range(max(concurrency, draw.count(3, 1))):
            text = rng.choice(draw.texts)
            begin = rng.randrange(len(text) - 30)
            requests.append(Request(text[begin : begin + 30], draw.count(160, 32)))
        return Job(tuple(requests), concurrency, sampled=sampled)

    return job


BATCHING: frozenset[Need] = frozenset({"batching"})
PREFIX: frozenset[Need] = frozenset({"prefix_cache"})
CASTLINE: frozenset[Need] = frozenset({"castline"})

CELLS: tuple[Cell, ...] = (
    Cell("W7", "W7", "start to first token"),
    Cell("W1", "W1", "one stream, 128 → 128", one_stream),
    Cell("W8", "W8", "resident memory after W1"),
    Cell("W2", "W2", "64 requests, 128±64 → 128±64, 32 at a time", mixed_lengths),
    *(Cell(f"W3@{n}", "W3", f"30 → 128, {n} at a time", sweep_point(n)) for n in CONCURRENCIES),
    Cell("W4", "W4", f"a prompt of {LONG_TOKENS:,} beside 8 streams", long_beside_streams, BATCHING),
    Cell("W5 unshared", "W5", f"16 prompts of {SHARED_TOKENS + 30:,} → 32, nothing shared", sharing("unshared")),
    Cell("W5 cold", "W5", f"32 requests sharing {SHARED_TOKENS:,}, sent together", sharing("cold"), PREFIX),
    Cell("W5 warm", "W5", f"32 more on the same {SHARED_TOKENS:,}", sharing("warm"), PREFIX),
    Cell("W6", "W6", f"prefill of {PREFILL_TOKENS:,}", prefill),
    Cell("X1@64", "X1", "256 requests, 64 at a time", queue(64), CASTLINE),
    Cell("X1@256", "X1", "256 requests, all sent at once", queue(256), CASTLINE),
    Cell("X2", "X2", "one stream of English text, 128 → 128", text_stream, CASTLINE),
    Cell("X3 HTTP", "X3", "64 streams, 30 → 160: what serving costs over HTTP", many_streams("http"), CASTLINE),
    Cell("X3 gRPC", "X3", "64 streams, 30 → 160: what serving costs over gRPC", many_streams("grpc"), CASTLINE),
    Cell("X4", "X4", "an idle server, after X3", needs=CASTLINE),
    *(
        Cell(
            f"X5@{n} {how}",
            "X5",
            f"30 → 160, {n} at a time, {how}: what steps are beside their forward passes",
            text_streams(n, sampled=how == "sampled"),
            CASTLINE,
        )
        for n in (1, 32)
        for how in ("greedy", "sampled")
    ),
)
AFTER = {"W8": "W1", "X4": "X3"}
"""What is measured of a system that has done some work, and that work."""
WORKLOADS = tuple(dict.fromkeys(sorted(cell.workload for cell in CELLS)))


def cells_of(workloads: Sequence[str]) -> list[Cell]:
    """In the order they are run. What is measured after another workload brings that along."""
    wanted = set(workloads) | {AFTER[name] for name in workloads if name in AFTER}
    return [cell for cell in CELLS if cell.workload in wanted]
