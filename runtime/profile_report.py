"""A recording as tables: phases, operators by role, operators by type; for steps of each kind."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from castline.plugins.cpu.operator_profile import OperatorRun, Role
from castline.runtime.step_profile import Phase, Span, StepRecord

NOT_OPERATORS = "between operators"


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A step, and the forward pass of its executor phase; None where the step failed before one was complete."""

    record: StepRecord
    run: OperatorRun | None


def join_runs(records: Sequence[StepRecord], runs: Sequence[OperatorRun]) -> list[ProfiledStep]:
    """Each step with the run whose middle lies in its executor phase; both in order of time. Other runs are dropped."""
    steps: list[ProfiledStep] = []
    position = 0
    for record in records:
        executor = executor_span(record)
        found: OperatorRun | None = None
        if executor is not None:
            while position < len(runs) and _middle(runs[position]) < executor.start_ns:
                position += 1
            if position < len(runs) and _middle(runs[position]) <= executor.end_ns:
                found = runs[position]
        steps.append(ProfiledStep(record, found))
    return steps


def executor_span(record: StepRecord) -> Span | None:
    return next((span for span in record.spans if span.phase is Phase.EXECUTOR), None)


def _middle(run: OperatorRun) -> int:
    return run.start_ns + run.duration_ns // 2


def table(steps: Sequence[ProfiledStep]) -> str:
    """Mean microseconds a step and shares. Idle time is no part of a step, and operators' shares are of all of it."""
    decodes = [step for step in steps if step.record.decodes_only]
    prompts = [step for step in steps if not step.record.decodes_only]
    kinds = {"decode steps": decodes, "steps with prompts": prompts}
    return "\n\n".join(_kind_table(name, part) for name, part in kinds.items() if part)


def _kind_table(name: str, steps: Sequence[ProfiledStep]) -> str:
    phases = _sum((str(s.phase), s.end_ns - s.start_ns) for step in steps for s in step.record.step_spans)
    runs = [step.run for step in steps if step.run is not None]
    operators = [operator for run in runs for operator in run.operators]
    roles = _sum((str(operator.role), operator.duration_ns) for operator in operators)
    types = _sum((operator.op_type, operator.duration_ns) for operator in operators)
    between = {NOT_OPERATORS: sum(run.duration_ns for run in runs) - roles.total()} if runs else {}
    total = phases.total()
    count = len(steps)
    sequences = sum(step.record.num_sequences for step in steps) / count
    tokens = sum(step.record.num_tokens for step in steps) / count
    outside = 1 - phases[Phase.EXECUTOR] / total
    lines = [
        f"{name}: {count}, {sequences:.1f} sequences and {tokens:.1f} tokens each, mean {total / count / 1e6:.3f} ms, "
        f"{outside:.1%} of it outside the executor",
        f"  {'':<36}{'µs a step':>12}{'share':>9}{'calls':>8}",
        *_rows("phases of the engine loop", {phase: phases[phase] for phase in Phase if phases[phase]}, count, total),
        *_rows("executor by role", {role: roles[role] for role in Role if roles[role]} | between, count, total),
        *_rows("executor by operator", dict(types.most_common()), count, total, Counter(o.op_type for o in operators)),
    ]
    return "\n".join(lines)


def _rows(
    title: str, parts: Mapping[str, int], count: int, total: int, calls: Mapping[str, int] | None = None
) -> list[str]:
    if not parts:
        return []
    lines = [f"  {title}"]
    for name, duration in parts.items():
        times = "" if calls is None else f"{calls[name] / count:.0f}"
        lines.append(f"    {name:<34}{duration / count / 1e3:>12.1f}{duration / total:>9.1%}{times:>8}".rstrip())
    return lines


def _sum(parts: Iterable[tuple[str, int]]) -> "Counter[str]":
    total: Counter[str] = Counter()
    for name, value in parts:
        total[name] += value
    return total
