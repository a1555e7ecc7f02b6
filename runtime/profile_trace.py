"""A recording as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

One track: a step, in it its phases, in the executor phase the forward pass with its operators (what lies before the
pass is the binding of its inputs). Two counters: sequences and tokens of each step.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from castline.plugins.cpu.operator_profile import OperatorRun
from castline.runtime.profile_report import ProfiledStep
from castline.runtime.step_profile import Phase, Span

PROCESS: Final = 1
LOOP: Final = 1
RUN: Final = "forward pass"


def trace_json(steps: Sequence[ProfiledStep]) -> bytes:
    """*steps* as a complete file; its clock starts with the first span."""
    origin = steps[0].record.spans[0].start_ns
    events = [
        _name("process_name", "castline engine"),
        _name("thread_name", "engine loop"),
        *(event for number, step in enumerate(steps) for event in _step_events(number, step, origin)),
    ]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _name(kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": LOOP, "ts": 0, "args": {"name": name}}


def _step_events(number: int, step: ProfiledStep, origin: int) -> Iterator[dict[str, Any]]:
    record = step.record
    spans = record.step_spans
    for span in record.spans[: -len(spans)]:
        yield _slice(span.phase, "engine", span.start_ns, span.end_ns, origin)
    start, end = spans[0].start_ns, spans[-1].end_ns
    counts = {"sequences": record.num_sequences, "tokens": record.num_tokens}
    yield _slice("step", "engine", start, end, origin, step=number, **counts)
    for name, value in counts.items():
        yield {"ph": "C", "name": name, "pid": PROCESS, "tid": LOOP, "ts": _us(start - origin), "args": {name: value}}
    for span in spans:
        yield _slice(span.phase, "engine", span.start_ns, span.end_ns, origin)
        if span.phase is Phase.EXECUTOR and step.run is not None:
            yield from _run_events(step.run, span, origin)


def _run_events(run: OperatorRun, inside: Span, origin: int) -> Iterator[dict[str, Any]]:
    """The two clocks differ by microseconds: what would stick out of its parent is cut."""
    start, end = _cut(run.start_ns, run.start_ns + run.duration_ns, inside.start_ns, inside.end_ns)
    yield _slice(RUN, "executor", start, end, origin)
    for operator in run.operators:
        first, last = _cut(operator.start_ns, operator.start_ns + operator.duration_ns, start, end)
        args = {"node": operator.name, "role": str(operator.role)}
        yield _slice(operator.op_type, "operator", first, last, origin, **args)


def _cut(start: int, end: int, lowest: int, highest: int) -> tuple[int, int]:
    return min(max(start, lowest), highest), min(max(end, lowest), highest)


def _slice(name: str, category: str, start: int, end: int, origin: int, **args: Any) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "cat": category, "pid": PROCESS, "tid": LOOP}
    return event | {"ts": _us(start - origin), "dur": _us(end - start), "args": args}


def _us(ns: int) -> float:
    return ns / 1000
