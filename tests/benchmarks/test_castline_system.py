"""castline's own adapter against the real server: what the runner does to every system."""

import time
from pathlib import Path

import pytest

from benchmarks.comparison import METRICS
from benchmarks.errors import JobFailed
from benchmarks.figures import figures_of, require_complete
from benchmarks.model import SourceModel
from benchmarks.prompts import Vocabulary
from benchmarks.roofline import roofline_of
from benchmarks.sessions import TINY
from benchmarks.settings import Settings
from benchmarks.systems.base import Context
from benchmarks.systems.castline import Castline
from benchmarks.systems.catalogue import CASTLINE, NAMES, entries_of, systems_of_peers
from benchmarks.workloads import CELLS, Draw, Job, Request, cells_of

pytestmark = pytest.mark.slow


@pytest.fixture
def castline(default_engine: Path, tmp_path: Path) -> Castline:
    """The adapter over an engine that the shared fixture built."""
    settings = Settings((CASTLINE,), ("W1",), work=tmp_path)
    context = Context(settings, SourceModel(tmp_path, tmp_path / "none.gguf"))
    (entry,) = entries_of([CASTLINE])
    system = entry.make(context)
    assert isinstance(system, Castline)
    settings.models.mkdir(parents=True)
    system.repository.symlink_to(default_engine, target_is_directory=True)
    return system


def test_adapter_runs_jobs(castline: Castline) -> None:
    """Start, jobs of both shapes, suspend and resume, an answer, memory: everything a round does."""
    vocabulary = Vocabulary.read(castline.bundle / "tokenizer.json")
    draw = Draw(vocabulary, (vocabulary.word_ids[:200],), 0, 0, quick=True)
    session = castline.start()
    try:
        assert 0 < session.started_in < 60
        for name in ("W1", "W3@4", "W4", "W5 warm"):
            cell = next(cell for cell in CELLS if cell.name == name)
            assert cell.job is not None
            job = cell.job(draw)
            session.group.suspend()
            session.group.resume()
            outcome = session.run(job, 120)
            require_complete(outcome, [request.max_tokens for request in job.requests])
            assert [record.prompt_tokens for record in outcome.records if record.index == 0] == [
                len(job.requests[0].prompt)
            ]
            assert (outcome.late is not None) == (job.late is not None)
            assert all(value > 0 for value in figures_of(cell, outcome).values())
        assert session.answer(TINY.prompt, 4)
        assert session.group.memory_bytes() > 100 << 20
    finally:
        session.stop()
    assert not session.group.alive


def test_costs_are_read_behind_both_doors(castline: Castline) -> None:
    """Every token arrives over either, and the engine, which multiplies matrices, takes more than what serves it."""
    vocabulary = Vocabulary.read(castline.bundle / "tokenizer.json")
    draw = Draw(vocabulary, (vocabulary.word_ids[:200],), 0, 0, quick=True)
    session = castline.start()
    try:
        for cell in cells_of(["X3", "X5"]):
            assert cell.job is not None
            job = cell.job(draw)
            before = time.monotonic()
            outcome = session.run(job, 60)
            require_complete(outcome, [request.max_tokens for request in job.requests])
            assert outcome.cpu is not None
            assert outcome.engine is not None
            if cell.workload == "X3":
                assert outcome.cpu.engine > 2 * outcome.cpu.serving
            assert 0 < outcome.engine.executor < outcome.engine.busy < time.monotonic() - before
            assert figures_of(cell, outcome).keys() == {metric.key for metric in METRICS[cell.workload]}
        refused = Job((Request((10**6,), 1),), concurrency=1, door="grpc")
        with pytest.raises(JobFailed, match="INVALID_ARGUMENT"):
            session.run(refused, 60)
    finally:
        session.stop()


def test_adapter_knows_its_bundle(castline: Castline) -> None:
    """Quality is the bundle's own measured parity; a step reads most of the weights file and no more than it."""
    quality = castline.measure_quality()
    assert quality.mean_kl is not None
    assert 0 < quality.mean_kl < 0.1
    assert quality.num_tokens > 1000
    roofline = roofline_of(castline.bundle, castline.manifest, 192)
    weights = sum(path.stat().st_size for path in castline.model_files())
    assert 0.5 * weights < roofline.weight_bytes <= weights
    assert castline.versions()["castline"]


def test_catalogue_names_are_unique() -> None:
    """--systems takes a name each; vLLM comes only when asked for."""
    assert len(set(NAMES)) == len(NAMES)
    assert "vllm-bf16" not in systems_of_peers(["openvino"])
    assert systems_of_peers(["vllm"])[-1] == "vllm-bf16"
    assert all(callable(entry.make) for entry in entries_of(NAMES))
    with pytest.raises(KeyError):
        entries_of(["unheard-of"])
