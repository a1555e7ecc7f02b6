"""The rounds, over systems without processes: order, what is repeated, and what becomes of failures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bandwidth import Bandwidth
from benchmarks.errors import JobFailed, Unavailable
from benchmarks.figures import Outcome
from benchmarks.machine import Machine
from benchmarks.model import SourceModel
from benchmarks.preparation import Prepared, prepare_all
from benchmarks.prompts import Vocabulary
from benchmarks.quality import Quality
from benchmarks.results import Results, SystemReport
from benchmarks.runner import Runner
from benchmarks.sessions import Session
from benchmarks.settings import Settings
from benchmarks.systems.base import Context, System
from benchmarks.systems.catalogue import FULL, OURS, STATIC, Entry
from benchmarks.workloads import CELLS, Draw, Job, Need
from castline.server.bench.client import RequestRecord

Diary = list[tuple[str, str]]


@dataclass
class FakeGroup:
    """Writes down what is done to it."""

    name: str
    diary: Diary
    log: Path
    alive: bool = True

    def suspend(self) -> None:
        self.diary.append((self.name, "suspend"))

    def resume(self) -> None:
        self.diary.append((self.name, "resume"))

    def stop(self) -> None:
        self.diary.append((self.name, "stop"))
        self.alive = False

    def cpu_seconds(self) -> float:
        return 0.0

    def memory_bytes(self) -> int:
        return 300 << 20


class FakeSession(Session):
    """Answers at *speed* tokens a second, on a clock of its own; fails where the job has a prompt of *fatal* tokens."""

    def __init__(self, group: Any, speed: float, fatal: int | None) -> None:
        super().__init__(group)
        self.fake: FakeGroup = group
        self.started_in = 1.0
        self.speed = speed
        self.fatal = fatal

    def run(self, job: Job, limit_s: float) -> Outcome:
        self.fake.diary.append((self.fake.name, f"run {len(job.requests)}"))
        if any(len(request.prompt) == self.fatal for request in job.requests):
            self.fake.alive = False
            raise JobFailed("the process ended: killed")
        gap = 1 / self.speed
        records = tuple(
            RequestRecord(
                index=index,
                scheduled=0.0,
                started=0.0,
                ended=gap * request.max_tokens,
                first_token=gap,
                gaps=(gap,) * (request.max_tokens - 1),
                prompt_tokens=len(request.prompt),
                output_tokens=request.max_tokens,
            )
            for index, request in enumerate(job.requests)
        )
        return Outcome(0.0, records)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> str:
        return "Paris it is"


@dataclass(slots=True)
class FakeSystem(System):
    diary: Diary = field(default_factory=list)
    speed: float = 100.0
    fatal: int | None = None
    starts: bool = True

    def prepare(self) -> None:
        if not self.starts:
            raise RuntimeError("a surprise")

    def start(self) -> FakeSession:
        if not self.starts:
            raise Unavailable("does not start: no model")
        group = FakeGroup(self.name, self.diary, self.context.log(self.name))
        group.log.parent.mkdir(parents=True, exist_ok=True)
        group.log.write_text("KV cache: 100 MiB")
        self.diary.append((self.name, "start"))
        return FakeSession(group, self.speed, self.fatal)

    def measure_quality(self) -> Quality:
        return Quality(mean_kl=0.01)

    def kv_pool_bytes(self, log: str) -> int | None:
        return 100 << 20 if "KV cache" in log else None


MakeRunner = Callable[..., Runner]


@pytest.fixture
def diary() -> Diary:
    return []


@pytest.fixture
def make_runner(tmp_path: Path, machine: Machine, diary: Diary) -> MakeRunner:
    def make(systems: dict[str, dict[str, Any]], cells: Sequence[str], rounds: int = 2) -> Runner:
        settings = Settings(tuple(systems), (), rounds=rounds, work=tmp_path)
        context = Context(settings, SourceModel(tmp_path, tmp_path))
        prepared, reports = [], []
        for name, options in systems.items():
            can: frozenset[Need] = options.pop("can", OURS if name.startswith("castline") else FULL)
            report = SystemReport(name, name, name, quality=options.pop("quality", Quality(mean_kl=0.01)))
            system = FakeSystem(name, name, name, "", context, can, diary=diary, **options)
            prepared.append(Prepared(system, report))
            reports.append(report)
        results = Results("now", rounds, 0, False, machine, reports)
        draw = Draw(Vocabulary(tuple(range(100, 600))), (tuple(range(200)),), 0, 0)
        return Runner(settings, prepared, [cell for cell in CELLS if cell.name in cells], results, draw)

    return make


def order_of(runner: Runner, cell: str) -> list[tuple[int, str]]:
    return [(sample.round, sample.system) for sample in runner.results.samples if sample.cell == cell]


def test_rounds_interleave_and_rotate(make_runner: MakeRunner) -> None:
    """A system that was always first, or ran all of its cells in a row, would have another machine than its rivals."""
    runner = make_runner({"castline": {}, "a": {}, "b": {}}, ["W1", "W6"])
    runner.run()
    assert order_of(runner, "W1") == [(0, "castline"), (0, "a"), (0, "b"), (1, "a"), (1, "b"), (1, "castline")]
    cells = [sample.cell for sample in runner.results.samples if sample.round == 0]
    assert cells == ["W1"] * 3 + ["W6"] * 3


def test_only_the_measured_system_runs(make_runner: MakeRunner, diary: Diary) -> None:
    """At every run all others are suspended, and in the end everything is stopped."""
    make_runner({"castline": {}, "a": {}}, ["W7", "W1", "W8", "W2"]).run()
    running: set[str] = set()
    for name, event in diary:
        if event in ("start", "resume"):
            running.add(name)
        elif event in ("suspend", "stop"):
            running.discard(name)
        else:
            assert running == {name}
    assert running == set()


def test_bandwidth_is_read_beside_our_first_workload(make_runner: MakeRunner, diary: Diary) -> None:
    """Right before and after castline's W1, in every round, with nothing running; the faster reading is kept."""
    rates = iter([20.0, 30.0, 50.0, 40.0])
    running: set[str] = set()

    def read() -> list[Bandwidth]:
        for name, event in diary:
            (running.add if event in ("start", "resume") else running.discard)(name)
        assert running == set()
        diary.append(("bandwidth", "read"))
        return [Bandwidth(2, 1 << 30, next(rates))]

    runner = make_runner({"castline": {}, "a": {}}, ["W1", "W2"])
    runner.read_bandwidth = read
    runner.run()
    beside = {(s.round, s.system, s.cell): s.bandwidths for s in runner.results.samples if s.bandwidths}
    assert beside == {
        (0, "castline", "W1"): (Bandwidth(2, 1 << 30, 30.0),),
        (1, "castline", "W1"): (Bandwidth(2, 1 << 30, 50.0),),
    }
    first = diary.index(("bandwidth", "read"))
    assert [event for _, event in diary[first : first + 5]] == ["read", "resume", "run 3", "suspend", "read"]


def test_start_and_memory_are_measured_each_round(make_runner: MakeRunner) -> None:
    """W7 of every fresh process, W8 with and without the KV pool that the process reports."""
    runner = make_runner({"castline": {}, "a": {}}, ["W7", "W1", "W8"])
    runner.run()
    assert runner.results.spreads("W7", "start_s")["a"].rounds == 2
    assert runner.results.spreads("W8", "resident_mib")["a"].median == 300
    assert runner.results.spreads("W8", "without_kv_mib")["a"].median == 200


def test_what_is_far_behind_is_not_repeated(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """castline and the leader are measured in every round; a peer at a tenth of the leader in the first only."""
    monkeypatch.setattr("benchmarks.comparison.ALWAYS_REPEAT_S", -1.0)
    systems = {"castline": {"speed": 1.0}, "fast": {}, "slow": {"speed": 10.0, "quality": Quality(mean_kl=1.0)}}
    runner = make_runner(systems, ["W2"], rounds=3)
    runner.run()
    rounds = {name: spread.rounds for name, spread in runner.results.spreads("W2", "output_tok_s").items()}
    assert rounds == {"castline": 3, "fast": 3, "slow": 1}


def test_an_interrupted_run_counts_whole_rounds(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document would claim rounds that were never measured."""
    runner = make_runner({"castline": {}}, ["W2"], rounds=3)
    whole = Runner._round

    def interrupted(runner: Runner, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        whole(runner, number)

    monkeypatch.setattr(Runner, "_round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert runner.results.rounds == 2


def test_a_dead_system_is_out_for_the_round(make_runner: MakeRunner) -> None:
    """Why it ended is kept, and why its other cells are empty; the others go on."""
    runner = make_runner({"castline": {}, "a": {"fatal": 128}}, ["W1", "W2"])
    runner.run()
    assert runner.results.failure("W1", "a") == "the process ended: killed"
    assert runner.results.spreads("W2", "output_tok_s")["castline"].rounds == 2
    assert runner.results.failure("W2", "a") == "not run: it ended in W1"


def test_a_system_that_does_not_start_is_reported(make_runner: MakeRunner) -> None:
    """Words in the table, and figures for everyone else."""
    runner = make_runner({"castline": {}, "a": {"starts": False}}, ["W7", "W1"])
    runner.run()
    assert runner.results.failure("W7", "a") == "does not start: no model"
    assert runner.results.failure("W1", "a") == "not run: does not start: no model"
    assert runner.results.spreads("W1", "decode_tok_s").keys() == {"castline"}


def test_needs_are_respected(make_runner: MakeRunner) -> None:
    """Static batches have no W4 and say why; castline's extras are not asked of peers; guessing has its own cells."""
    systems = {"castline": {}, "castline-speculation": {}, "static": {"can": STATIC}}
    runner = make_runner(systems, ["W5 cold", "W5 unshared", "X1@64", "X2"], rounds=1)
    runner.run()
    assert runner.results.failure("W5 cold", "static") == "keeps no prefix between requests: as unshared"
    assert runner.results.spreads("W5 unshared", "output_tok_s").keys() == {"castline", "static"}
    assert runner.results.spreads("X1@64", "output_tok_s").keys() == {"castline"}
    assert runner.results.spreads("X2", "decode_tok_s").keys() == {"castline", "castline-speculation"}


def test_idleness_is_castlines_own_and_timed(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time of the idle seconds alone, in per cent of one core; what was used before them is not counted."""
    monkeypatch.setattr("benchmarks.runner.IDLE_S", 0.02)
    used = iter([7.0, 7.001])
    runner = make_runner({"castline": {}, "a": {}}, ["X4"], rounds=1)
    start = runner._start

    def start_and_count(*arguments: Any) -> None:
        start(*arguments)
        for session in runner._sessions.values():
            session.group.cpu_seconds = lambda: next(used)  # type: ignore[method-assign]

    monkeypatch.setattr(Runner, "_start", lambda _, *arguments: start_and_count(*arguments))
    runner.run()
    spreads = runner.results.spreads("X4", "idle_percent")
    assert spreads.keys() == {"castline"}
    assert spreads["castline"].median == pytest.approx(5.0)


def test_a_surprise_while_preparing_is_not_fatal(tmp_path: Path) -> None:
    """An adapter's own error leaves its system out, in words, and the run goes on."""

    class Surprising(FakeSystem):
        def prepare(self) -> None:
            raise RuntimeError("a surprise")

    context = Context(Settings((), (), work=tmp_path), SourceModel(tmp_path, tmp_path))
    ready, reports = prepare_all([Entry("a", "a", "A", Surprising, "", FULL)], context)
    assert ready == []
    assert reports[0].unavailable == "RuntimeError: a surprise"
