"""What a person sees while a build runs: one line a stage, bars on long stages where stderr is a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STAGE_COLUMN = 11


@dataclass(slots=True)
class StageRecord:
    """One finished stage, for the report."""

    name: str
    summary: str = ""
    seconds: float = 0.0


@dataclass(slots=True)
class BuildLog:
    """Writes to stderr; keeps the stages for the report."""

    verbose: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    clock: Callable[[], float] = time.perf_counter
    stages: list[StageRecord] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[StageRecord]:
        """Times a stage; prints its line on success. The caller fills ``summary``."""
        record = StageRecord(name)
        started = self.clock()
        with self._spinner(name):
            yield record
        record.seconds = self.clock() - started
        self.stages.append(record)
        self._print(f"{name:<{STAGE_COLUMN}} {record.summary}  ({record.seconds:.1f} s)")

    def detail(self, text: str) -> None:
        """Printed with --verbose only."""
        if self.verbose:
            self._print(f"{'':<{STAGE_COLUMN}} {text}")

    def warn(self, text: str) -> None:
        self._print(f"{'warning':<{STAGE_COLUMN}} {text}")

    @contextmanager
    def bar(self, description: str, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar of *total* steps; yields the function that advances it by one. Silent off a terminal."""
        if not self.console.is_terminal:
            yield lambda: None
            return
        columns = (
            TextColumn(f"{'':<{STAGE_COLUMN}} {{task.description}}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(description, total=total)
            yield lambda: progress.advance(task)

    @contextmanager
    def _spinner(self, name: str) -> Iterator[None]:
        """Shows that a stage without steps of its own is alive."""
        if not self.console.is_terminal or name in STAGES_WITH_BARS:
            yield
            return
        columns = (SpinnerColumn(), TextColumn(name), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(name, total=None)
            yield

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)


STAGES_WITH_BARS = frozenset({"autotune", "verify"})
"""rich draws one live display at a time, so these draw a bar and no spinner."""
