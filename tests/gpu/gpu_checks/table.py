"""The one table of a run, as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLUMNS = ("kernel", "case", "max error", "tolerance", "µs", "GB/s", "% of copy", "pass")


@dataclass(frozen=True)
class Row:
    """One check, one timing, or both. What was not run says why."""

    kernel: str
    case: str
    error: float | None = None
    tolerance: float | None = None
    microseconds: float | None = None
    num_bytes: int = 0
    """That the launch must move at least; 0 where no roofline is of interest."""
    not_run: str = ""

    @property
    def failed(self) -> bool:
        """NaN is no pass."""
        return self.error is not None and self.tolerance is not None and not self.error <= self.tolerance

    @property
    def gb_per_s(self) -> float | None:
        if self.microseconds is None or not self.num_bytes:
            return None
        return self.num_bytes / self.microseconds / 1e3

    def cells(self, copy_gb_per_s: float) -> tuple[str, ...]:
        rate = self.gb_per_s
        share = None if rate is None or not copy_gb_per_s else 100 * rate / copy_gb_per_s
        verdict = f"not run: {self.not_run}" if self.not_run else "FAIL" if self.failed else "yes"
        if self.error is None and not self.not_run:
            verdict = "timed"
        return (
            self.kernel,
            self.case,
            _number(self.error, ".2g"),
            _number(self.tolerance, ".2g"),
            _number(self.microseconds, ",.1f"),
            _number(rate, ",.0f"),
            _number(share, ".0f"),
            verdict,
        )


def render(facts: Mapping[str, str], rows: Sequence[Row], copy_gb_per_s: float) -> str:
    """Facts of the machine, the table, and what failed."""
    lines = ["# GPU checks", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * 5 + "---|"]
    lines += [f"| {' | '.join(_plain(cell) for cell in row.cells(copy_gb_per_s))} |" for row in rows]
    checked = [row for row in rows if row.error is not None]
    failed = [row for row in checked if row.failed]
    skipped = [row for row in rows if row.not_run]
    lines += ["", f"{len(checked) - len(failed)} of {len(checked)} checks passed, {len(skipped)} not run."]
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
