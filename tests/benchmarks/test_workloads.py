"""What is asked of every system: equal for all of them, another text in each round."""

from itertools import pairwise

import pytest

from benchmarks.prompts import Vocabulary
from benchmarks.workloads import CELLS, WORKLOADS, Cell, Draw, Job, cells_of

VOCABULARY = Vocabulary(tuple(range(100, 600)))
TEXTS = tuple(tuple(range(start, start + 200)) for start in (0, 1000, 2000, 3000))
JOBS = [cell for cell in CELLS if cell.job is not None]


def draw(number: int = 0, *, quick: bool = False) -> Draw:
    return Draw(VOCABULARY, TEXTS, 0, number, quick)


def job_of(name: str, number: int = 0) -> Job:
    cell = next(cell for cell in CELLS if cell.name == name)
    assert cell.job is not None
    return cell.job(draw(number))


@pytest.mark.parametrize("cell", JOBS, ids=lambda cell: cell.name)
@pytest.mark.parametrize("quick", [False, True])
def test_jobs_are_a_function_of_seed_and_round(cell: Cell, quick: bool) -> None:
    """Systems would be given other prompts than their rivals if a job drew from anything else."""
    assert cell.job is not None
    assert cell.job(draw(quick=quick)) == cell.job(draw(quick=quick))


@pytest.mark.parametrize("cell", JOBS, ids=lambda cell: cell.name)
def test_rounds_are_equal_work_on_new_text(cell: Cell) -> None:
    """Lengths that changed would be noise; prompts that did not would be answered from a prefix cache."""
    assert cell.job is not None
    jobs = [cell.job(draw(number)) for number in (0, 1)]
    sizes = [[(len(r.prompt), r.max_tokens) for r in job.requests] for job in jobs]
    assert sizes[0] == sizes[1]
    assert jobs[0].requests[0].prompt != jobs[1].requests[0].prompt


@pytest.mark.parametrize("cell", JOBS, ids=lambda cell: cell.name)
def test_a_cell_does_not_begin_its_prompts_alike(cell: Cell) -> None:
    """Prompts that shared a beginning would be read from the cache, except where sharing is what is measured."""
    assert cell.job is not None
    prompts = sorted(request.prompt for request in cell.job(draw()).requests)
    shared = max((common(a, b) for a, b in pairwise(prompts)), default=0)
    assert shared >= 1000 if cell.name in ("W5 cold", "W5 warm") else shared < 16


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_warm_prefix_is_the_cold_one() -> None:
    """A warm run on another prefix would be a second cold one; its tails must be new all the same."""
    cold, warm, unshared = (job_of(f"W5 {part}") for part in ("cold", "warm", "unshared"))
    assert cold.requests[0].prompt[:1000] == warm.requests[0].prompt[:1000]
    assert cold.requests[0].prompt[1000:] != warm.requests[0].prompt[1000:]
    assert common(cold.requests[0].prompt, unshared.requests[0].prompt) < 16


def test_mixed_lengths_spread_over_their_range() -> None:
    """W2 is about uneven requests: lengths all alike would make it another W3."""
    job = job_of("W2")
    for sizes in ([len(r.prompt) for r in job.requests], [r.max_tokens for r in job.requests]):
        assert 64 <= min(sizes) < 90
        assert 166 < max(sizes) <= 192
        assert 110 < sum(sizes) / len(sizes) < 146
    assert job.concurrency == 32


def test_long_prompt_fits_the_model() -> None:
    """Prompt and answer together stay under the 8,192 positions of the model, and under the peers' 4,608 a slot."""
    job = job_of("W4")
    assert job.late is not None
    assert len(job.late.prompt) + job.late.max_tokens <= 4608
    assert len(job.requests) == job.concurrency == 8
    assert all(request.max_tokens > job.late_after for request in job.requests)


def test_queue_cells_are_the_same_amount_of_work() -> None:
    """Only the number waiting may differ, or the cost of waiting is not what is measured."""
    few, many = job_of("X1@64"), job_of("X1@256")
    assert [(len(r.prompt), r.max_tokens) for r in few.requests] == [
        (len(r.prompt), r.max_tokens) for r in many.requests
    ]
    assert (few.concurrency, many.concurrency) == (64, 256)


def test_doors_are_given_the_same_amount_of_work() -> None:
    """Only the door may differ, or it is not the door's cost."""
    http, grpc = job_of("X3 HTTP"), job_of("X3 gRPC")
    assert [(len(r.prompt), r.max_tokens) for r in http.requests] == [
        (len(r.prompt), r.max_tokens) for r in grpc.requests
    ]
    assert (http.door, http.concurrency) == ("http", 64)
    assert (grpc.door, grpc.concurrency) == ("grpc", 64)


@pytest.mark.parametrize("cell", [cell for cell in JOBS if "castline" not in cell.needs], ids=lambda cell: cell.name)
def test_peers_are_asked_over_http_and_greedily(cell: Cell) -> None:
    """Only castline has the other door, and drivers know no sampling."""
    assert job_of(cell.name).door == "http"
    assert not job_of(cell.name).sampled


@pytest.mark.parametrize("count", [1, 32])
def test_drawn_or_not_the_prompts_are_the_same(count: int) -> None:
    greedy, sampled = job_of(f"X5@{count} greedy"), job_of(f"X5@{count} sampled")
    assert greedy.requests == sampled.requests
    assert greedy.concurrency == sampled.concurrency == count
    assert (greedy.sampled, sampled.sampled) == (False, True)
    assert all(len(request.prompt) == 30 for request in greedy.requests)


def test_cells_of_a_workload() -> None:
    """W8 weighs a system after W1: alone it would weigh one that has done nothing. An idle one has been busy, too."""
    assert [cell.name for cell in cells_of(["W8"])] == ["W1", "W8"]
    assert [cell.name for cell in cells_of(["X4"])] == ["X3 HTTP", "X3 gRPC", "X4"]
    assert [cell.name for cell in cells_of(["W6"])] == ["W6"]
    both = ["X5@1 greedy", "X5@1 sampled", "X5@32 greedy", "X5@32 sampled"]
    assert [cell.name for cell in cells_of(["X5"])] == both
    assert cells_of(WORKLOADS) == list(CELLS)
