"""The recorder of phases, and what is made of its records: with made-up clocks and runs."""

import json
from collections.abc import Iterator
from itertools import count, pairwise

import pytest

from castline.plugins.cpu.operator_profile import Operator, OperatorRun, Role
from castline.runtime.decodes import Decodes
from castline.runtime.plan import ScheduledSequence, StepPlan
from castline.runtime.profile_report import join_runs, table
from castline.runtime.profile_trace import trace_json
from castline.runtime.step_profile import Phase, StepRecord, StepRecorder

STEP = (Phase.RECEIVE, Phase.SCHEDULE, Phase.BATCH, Phase.EXECUTOR, Phase.SAMPLE, Phase.COMMIT, Phase.SEND)


@pytest.fixture
def clock() -> Iterator[int]:
    """0, 1000, 2000, … nanoseconds."""
    return count(0, 1000)


def plan(*lens: int) -> StepPlan:
    return StepPlan(tuple(ScheduledSequence(i, (1,) * n, 0, (i,), True) for i, n in enumerate(lens)))


def step(recorder: StepRecorder, *lens: int) -> None:
    recorder.mark(Phase.RECEIVE)
    recorder.scheduled(plan(*lens))
    for phase in STEP[2:]:
        recorder.mark(phase)
    recorder.step_done()


def run(start_us: int, duration_us: int) -> OperatorRun:
    """One matmul, then attention, in a pass with 1 µs around and between them."""
    half = (duration_us - 3) // 2
    operators = (
        Operator("a", "Linear", Role.QKV, (start_us + 1) * 1000, half * 1000),
        Operator("b", "PagedAttention", Role.ATTENTION, (start_us + 2 + half) * 1000, half * 1000),
    )
    return OperatorRun(start_us * 1000, duration_us * 1000, operators)


def test_phases_follow_each_other_without_gaps(clock: Iterator[int]) -> None:
    """Time that belongs to no phase would be a cost that nobody sees."""
    recorder = StepRecorder(5, lambda: next(clock))
    step(recorder, 1, 1)
    step(recorder, 1, 7)
    spans = [span for record in recorder.records for span in record.spans]
    assert [span.phase for span in spans] == [*STEP, *STEP]
    assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))
    assert spans[0].start_ns == 0
    assert [(r.num_sequences, r.num_tokens, r.decodes_only) for r in recorder.records] == [(2, 2, True), (2, 8, False)]


def test_decodes_by_columns_are_counted_too(clock: Iterator[int]) -> None:
    """Prevents steps of a large batch that a profile shows as empty, or as prompts."""
    recorder = StepRecorder(5, lambda: next(clock))
    recorder.scheduled(StepPlan(Decodes((4, 7), [1, 2], [9, 3], [9, 7], [(0, 1, 2), (1,)])))
    recorder.step_done()
    assert [(r.num_sequences, r.num_tokens, r.decodes_only) for r in recorder.records] == [(2, 2, True)]


def test_guesses_make_no_prompt(clock: Iterator[int]) -> None:
    """A decode with guesses computes several tokens, and would be shown among the prompts."""
    recorder = StepRecorder(5, lambda: next(clock))
    for num_drafts in (3, 2):
        recorder.scheduled(StepPlan((ScheduledSequence(0, (1,) * 4, 9, (0,), True, num_drafts=num_drafts),)))
        recorder.step_done()
    assert [record.decodes_only for record in recorder.records] == [True, False]


def test_an_idle_engine_records_nothing_more(clock: Iterator[int]) -> None:
    """A recording that waits for a step must not grow, however often commands wake the loop."""
    recorder = StepRecorder(5, lambda: next(clock))
    for _ in range(1000):
        recorder.mark(Phase.IDLE)
    step(recorder, 1)
    (record,) = recorder.records
    assert [span.phase for span in record.spans] == [Phase.IDLE, *STEP]
    assert record.spans[0].end_ns == 1000 * 1000
    assert [span.phase for span in record.step_spans] == list(STEP)


def test_a_recording_is_bounded(clock: Iterator[int]) -> None:
    """A server that runs for weeks under --profile must not fill the memory."""
    recorder = StepRecorder(2, lambda: next(clock))
    for _ in range(5):
        assert recorder.complete == (len(recorder.records) == 2)
        step(recorder, 1)
    assert len(recorder.records) == 2


def two_steps(clock: Iterator[int]) -> list[StepRecord]:
    """Executor phases 3 .. 4 µs and 10 .. 11 µs (each mark takes one)."""
    recorder = StepRecorder(9, lambda: next(clock))
    step(recorder, 1)
    step(recorder, 1)
    return recorder.records


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_without_a_run_does_not_take_its_neighbours(clock: Iterator[int], missing: int) -> None:
    """A step that fails leaves no run: pairing by number would shift every later step's operators. Warm-ups go."""
    runs = [OperatorRun(-9000, 50, ()), OperatorRun(3100, 800, ()), OperatorRun(10100, 800, ())]
    expected = [runs[1], runs[2]]
    expected[missing] = None  # type: ignore[call-overload]
    del runs[1 + missing]
    assert [step.run for step in join_runs(two_steps(clock), runs)] == expected


def test_the_table_adds_up() -> None:
    """Shares of another whole, or time that is lost between operators, would point at the wrong part."""
    times = iter([0, 10_000, 20_000, 40_000, 840_000, 900_000, 950_000, 1_000_000])
    recorder = StepRecorder(1, lambda: next(times))
    step(recorder, 1, 1, 1)
    lines = table(join_runs(recorder.records, [run(100, 703)])).splitlines()
    cells = {line[4:38].strip(): line[38:].split() for line in lines if line.startswith("    ")}
    assert lines[0] == (
        "decode steps: 1, 3.0 sequences and 3.0 tokens each, mean 1.000 ms, 20.0% of it outside the executor"
    )
    assert cells["executor"] == ["800.0", "80.0%"]
    assert cells["receive"] == ["10.0", "1.0%"]
    assert cells["qkv"] == cells["attention"] == ["350.0", "35.0%"]
    assert cells["between operators"] == ["3.0", "0.3%"]
    assert cells["Linear"] == ["350.0", "35.0%", "1"]


def test_steps_of_each_kind_have_a_table(clock: Iterator[int]) -> None:
    """One prompt among a hundred decodes would hide in their mean."""
    recorder = StepRecorder(9, lambda: next(clock))
    step(recorder, 1)
    step(recorder, 1, 30)
    titles = [line for line in table(join_runs(recorder.records, [])).splitlines() if line and line[0] != " "]
    assert [title.split(":")[0] for title in titles] == ["decode steps", "steps with prompts"]


def test_what_sticks_out_of_its_parent_is_cut(clock: Iterator[int]) -> None:
    """Perfetto drops slices that overlap without nesting; two clocks never agree to the nanosecond."""
    steps = join_runs(two_steps(clock), [OperatorRun(2900, 1000, (Operator("a", "Add", Role.OTHER, 2800, 1300),))])
    events = json.loads(trace_json(steps))["traceEvents"]
    slices = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert slices["forward pass"] == (3.0, 0.9)
    assert slices["Add"] == (3.0, 0.9)
