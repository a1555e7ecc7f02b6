"""Before the rounds: every system installed, converted, asked a question, and its quality measured. None is fatal."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.errors import JobFailed, Unavailable
from benchmarks.model import ANSWER
from benchmarks.quality import Quality
from benchmarks.results import SystemReport
from benchmarks.systems.base import Context, System
from benchmarks.systems.catalogue import Entry
from benchmarks.wording import quality_text

ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prepared:
    """A system that can run, and what is known of it."""

    system: System
    report: SystemReport


def prepare_all(entries: Sequence[Entry], context: Context) -> tuple[list[Prepared], list[SystemReport]]:
    """Those that can run; and the reports of all, in order."""
    ready, reports = [], []
    for entry in entries:
        print(f"{entry.label}", file=sys.stderr, flush=True)
        system, report = entry.make(context), SystemReport(entry.name, entry.label, entry.family)
        reports.append(report)
        try:
            prepare(system, report, context)
        except Exception as error:  # whatever a peer does, the others are measured
            known = isinstance(error, (Unavailable, JobFailed))
            report.unavailable = str(error) if known else f"{type(error).__name__}: {error}"
            print(f"  left out: {report.unavailable}", file=sys.stderr, flush=True)
            continue
        ready.append(Prepared(system, report))
    return ready, reports


def prepare(system: System, report: SystemReport, context: Context) -> None:
    system.prepare()
    report.settings, report.versions = system.settings, system.versions()
    _ask(system, report, context)
    report.quality = _quality(system, report, context)
    print(f"  {quality_text(report.quality)}", file=sys.stderr, flush=True)


def _ask(system: System, report: SystemReport, context: Context) -> None:
    """The sanity check: its answer is kept, right or wrong."""
    session = system.start()
    try:
        answer = session.answer(context.source.sanity_prompt, ANSWER_TOKENS)
    finally:
        session.stop()
    report.answer = (answer if isinstance(answer, str) else context.source.decode(answer)).strip()
    report.sane = ANSWER in report.answer
    print(f"  answers {report.answer!r}", file=sys.stderr, flush=True)


def _quality(system: System, report: SystemReport, context: Context) -> Quality:
    """Measured once for each state of a system: its versions and settings are the key."""
    kept = context.settings.work / "quality" / f"{system.name}.json"
    key = msgspec.json.encode([report.versions, report.settings]).decode()
    if (quality := _read_kept(kept, key)) is not None:
        return quality
    try:
        quality = system.measure_quality()
    except (Unavailable, JobFailed) as error:
        print(f"  quality not measured: {error}", file=sys.stderr, flush=True)
        return Quality(how=f"not measured: {error}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(msgspec.json.encode({"key": key, "quality": quality}))
    return quality


def _read_kept(path: Path, key: str) -> Quality | None:
    if not path.exists():
        return None
    kept = msgspec.json.decode(path.read_bytes())
    return msgspec.convert(kept["quality"], Quality) if kept["key"] == key else None
