"""What runs inside a peer's environment: the loops, on scripted engines, and that it needs no castline."""

import ast
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drivers.loops import OutOfTime, run_continuous, run_static
from benchmarks.drivers.protocol import Request, chunks, serve

DRIVERS = Path(__file__).parents[2] / "benchmarks" / "drivers"


def job(sizes: list[tuple[int, int]], concurrency: int, **fields: Any) -> dict[str, Any]:
    requests = [[list(range(prompt)), output] for prompt, output in sizes]
    return {"requests": requests, "concurrency": concurrency, "late": None, "late_after": 0, "limit_s": 60, **fields}


class OneTokenAStep:
    """Every running request gets one token in each step."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most = 0
        self.added: list[tuple[int, dict[int, int]]] = []

    def add(self, key: int, request: Request) -> None:
        self.added.append((key, dict(self.left)))
        self.left[key] = request.max_tokens

    def step(self) -> Iterator[tuple[int, int, bool]]:
        self.most = max(self.most, len(self.left))
        for key in list(self.left):
            self.left[key] -= 1
            ended = self.left[key] == 0
            if ended:
                del self.left[key]
            yield key, 1, ended


def test_continuous_loop_keeps_its_concurrency() -> None:
    """So many under way, a new one as soon as one ends, and every request gets all of its tokens."""
    engine = OneTokenAStep()
    done = run_continuous(engine, job([(4, n) for n in (1, 2, 3, 4, 5)], concurrency=2))
    assert [track["tokens"] for track in done["requests"]] == [1, 2, 3, 4, 5]
    assert engine.most == 2
    for track in done["requests"]:
        assert len(track["arrivals"]) == track["tokens"]
        assert done["begun"] <= track["started"] <= track["arrivals"][0] <= track["ended"]


def test_late_request_waits_for_every_stream() -> None:
    """The long prompt joins when all streams decode, and its record is apart from theirs."""
    engine = OneTokenAStep()
    done = run_continuous(engine, job([(4, 10), (4, 10)], 2, late=[[1, 2, 3], 2], late_after=3))
    key, left = engine.added[-1]
    assert (key, left) == (2, {0: 7, 1: 7})
    assert done["late"]["tokens"] == 2
    assert len(done["requests"]) == 2


def test_static_batches_wait_for_the_longest() -> None:
    """A request counts its own tokens only, and the next batch starts when the last is over."""
    seen: list[list[int]] = []

    def generate(batch: list[Request], on_step: Any) -> None:
        seen.append([len(request.prompt) for request in batch])
        for _ in range(max(request.max_tokens for request in batch)):
            on_step()

    done = run_static(generate, job([(3, 2), (5, 4), (7, 1)], concurrency=2))
    assert seen == [[3, 5], [7]]
    assert [track["tokens"] for track in done["requests"]] == [2, 4, 1]
    assert done["requests"][2]["due"] >= done["requests"][1]["ended"]


def test_a_job_ends_at_its_limit() -> None:
    """A hopeless combination must not take the run with it."""
    with pytest.raises(OutOfTime):
        run_continuous(OneTokenAStep(), job([(1, 1000)], 1, limit_s=-1))
    with pytest.raises(OutOfTime):
        run_static(lambda batch, on_step: on_step(), job([(1, 1000)], 1, limit_s=-1))


def test_chunks_are_the_passage() -> None:
    """Every token once, in order, in uneven pieces that cross the sizes kernels switch at."""
    pieces = chunks(list(range(400)))
    assert [token for piece in pieces for token in piece] == list(range(400))
    assert {len(piece) for piece in pieces} >= {1, 7, 64}


def test_serve_answers_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is an answer like another, after which the next line is served."""
    lines = [{"do": "double", "n": 2}, {"do": "double", "n": "a" * 3}, {"do": "unknown"}]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    channel = io.StringIO()
    serve(channel, {"double": lambda n: {"n": 2 // 1 * n - 0}})
    answers = [json.loads(line) for line in channel.getvalue().splitlines()]
    assert answers[0] == {"n": 4}
    assert "error" in answers[1]
    assert answers[2] == {"error": "KeyError: 'unknown'"}


@pytest.mark.parametrize("path", sorted(DRIVERS.glob("*.py")), ids=lambda path: path.stem)
def test_drivers_need_no_castline(path: Path) -> None:
    """A peer's environment has the peer and the standard library; castline is not in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            assert module.split(".")[0] != "castline"
            assert not module.startswith("benchmarks") or module.startswith("benchmarks.drivers")
