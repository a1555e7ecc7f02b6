"""``python -m benchmarks``: options, then preparation, rounds, and the document."""

import shlex
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from benchmarks import bandwidth, model
from benchmarks.bandwidth import Bandwidth
from benchmarks.document import write_document
from benchmarks.errors import Unavailable
from benchmarks.machine import QUIET_SHARE, Machine, noise
from benchmarks.picture import draw_picture
from benchmarks.preparation import Prepared, prepare_all
from benchmarks.results import Results, SystemReport, read_results, write_results
from benchmarks.roofline import roofline_of
from benchmarks.runner import Runner
from benchmarks.settings import Settings, num_threads
from benchmarks.systems.base import Context
from benchmarks.systems.castline import Castline
from benchmarks.systems.catalogue import DEFAULT_PEERS, ENTRIES, NAMES, PEERS, entries_of, systems_of_peers
from benchmarks.workloads import WORKLOADS, Draw, cells_of

W1_MEAN_CONTEXT = 128 + 64
PLACES = ("work", "docs")
"""Options that say where things are kept: no figure depends on them."""
NOT_ASKED = "not asked for"


def _names(text: str | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Of a comma-separated list; all that are known without one."""
    if text is None:
        return known
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return names


def command_line(context: click.Context) -> str:
    """What was given, without PLACES."""
    words = ["python", "-m", "benchmarks"]
    for option in context.command.params:
        name = option.name or ""
        if name in PLACES or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)


def not_asked(chosen: tuple[str, ...]) -> list[SystemReport]:
    """Of the systems that the catalogue knows besides."""
    usual = systems_of_peers(DEFAULT_PEERS)
    return [
        SystemReport(
            entry.name,
            entry.label,
            entry.family,
            unavailable=f"{NOT_ASKED}, though the default run has it" if entry.name in usual else NOT_ASKED,
        )
        for entry in ENTRIES
        if entry.name not in chosen
    ]


@click.command(context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.option("--peers", metavar="NAME,…", help=f"Of {', '.join(PEERS)}.  [default: all but vllm]")
@click.option("--systems", metavar="NAME,…", help=f"Instead of --peers, exactly these of {', '.join(NAMES)}.")
@click.option("--workloads", metavar="W1,…", help=f"Of {', '.join(WORKLOADS)}.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and lengths.")
@click.option("--quick", is_flag=True, help="One round of few, short requests: shows that it works, not how fast.")
@click.option("--repeat-all", is_flag=True, help="Also repeat what the first round showed to be far behind.")
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".benchmarks"),
    show_default=True,
    help="Environments, converted weights, logs: kept between runs.",
)
@click.option(
    "--docs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="Gets performance.md, performance.png and performance.json.",
)
@click.option("--prepare", "only_prepare", is_flag=True, help="Install, convert and check; measure nothing.")
@click.option("--render", "only_render", is_flag=True, help="Make the document again from its performance.json.")
@click.pass_context
def main(
    invocation: click.Context,
    peers: str | None,
    systems: str | None,
    workloads: str | None,
    rounds: int,
    seed: int,
    quick: bool,
    repeat_all: bool,
    work: Path,
    docs: Path,
    only_prepare: bool,
    only_render: bool,
) -> None:
    """Measure castline beside what a user would run instead, and write docs/performance.md."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else suspended systems would outlive the run
    if only_render:
        render(read_results(docs / "performance.json"), docs)
        return
    if peers is not None and systems is not None:
        raise click.UsageError("--peers and --systems exclude each other: --systems names every system of the run")
    chosen = (
        _names(systems, NAMES, "--systems")
        if systems
        else systems_of_peers(DEFAULT_PEERS if peers is None else _names(peers, PEERS, "--peers"))
    )
    settings = Settings(
        systems=chosen,
        workloads=_names(workloads, WORKLOADS, "--workloads"),
        rounds=1 if quick else rounds,
        seed=seed,
        quick=quick,
        repeat_all=repeat_all,
        work=work.resolve(),
        docs=docs,
    )
    context = Context(settings, model.prepare(settings.models / "source", settings.logs / "source.log"))
    ready, reports = prepare_all(entries_of(chosen), context)
    if not only_prepare:
        results = measure(context, ready, [*reports, *not_asked(chosen)], command_line(invocation))
        docs.mkdir(parents=True, exist_ok=True)
        write_results(docs / "performance.json", results)
        render(results, docs)


def measure(context: Context, ready: list[Prepared], reports: list[SystemReport], command: str) -> Results:
    """The rounds. Interrupted, what they had measured."""
    settings, source = context.settings, context.source
    results = Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        rounds=settings.rounds,
        seed=settings.seed,
        quick=settings.quick,
        machine=Machine.here(),
        systems=reports,
        noise_before=warn_of_noise(),
        command=command,
    )
    read = bandwidth_reader(settings)
    measure_machine(results, read, ready)
    beside = None if read is None else partial(read, num_threads())
    texts = tuple(tuple(passage) for passage in source.passages if len(passage) >= 128)
    draw = Draw(source.vocabulary, texts, settings.seed, 0, settings.quick)
    try:
        Runner(settings, ready, cells_of(settings.workloads), results, draw, beside).run()
    except KeyboardInterrupt:
        click.echo("interrupted: the document has what was measured", err=True)
    return results


def warn_of_noise() -> float:
    share = noise()
    if share > QUIET_SHARE:
        click.echo(f"warning: others take {share:.0%} of the processors; figures will be off", err=True)
    return share


Read = Callable[[int], list[Bandwidth]]
"""Measures the read bandwidth with so many threads."""


def bandwidth_reader(settings: Settings) -> Read | None:
    try:
        return partial(bandwidth.measure, bandwidth.load_reader(settings.work))
    except Unavailable as error:
        click.echo(f"warning: {error}", err=True)
        return None


def measure_machine(results: Results, read: Read | None, ready: list[Prepared]) -> None:
    if read is not None:
        results.bandwidths = [measured for threads in sorted({1, num_threads()}) for measured in read(threads)]
    for measured in results.bandwidths:
        size = f"{measured.buffer_bytes >> 20} MiB"
        click.echo(f"read bandwidth, {size}, {measured.threads} threads: {measured.gb_per_s:.1f} GB/s", err=True)
    ours = [prepared.system for prepared in ready if isinstance(prepared.system, Castline)]
    if ours:
        results.roofline = roofline_of(ours[0].bundle, ours[0].manifest, W1_MEAN_CONTEXT)


def render(results: Results, docs: Path) -> None:
    draw_picture(results, docs / "performance.png")
    write_document(results, docs / "performance.md")
    click.echo(f"wrote {docs / 'performance.md'}, performance.png, performance.json", file=sys.stderr)


if __name__ == "__main__":
    main()
